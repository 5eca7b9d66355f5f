"""FreeKV, naively (Liu et al., arXiv:2505.13109).

| paper | here |
|---|---|
| 3.2 page summaries (min-max pooled keys) | NaiveFreeKV.summary |
| 3.2 page scores, group-consistent selection: mean of softmax(P) | NaiveFreeKV.pooled |
| 3.2 speculative retrieval with the query of the step before | NaiveFreeKV.select |
| 3.3 query-based identification, C_i < tau; head-wise correction | NaiveFreeKV.select |

Every step summarises all pages again. No page is copied and none is chosen ahead.
Letters: B budget, S sinks, W window, p rows of a page; previous: the query of the step before.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from sparsekv_cli.cache.spec import LayerSpec
from sparsekv_cli.methods.naive.base import FORCED, NEVER, Choice, Naive, half, softmax

if TYPE_CHECKING:
    from sparsekv_cli.methods.freekv import FreeKV

GROUPED = 8  # pages of a group


class NaiveFreeKV(Naive):
    """Each kv head attends to the sinks, the window and the pages that it chooses between them."""

    method: FreeKV

    def __init__(self, method: FreeKV, spec: LayerSpec) -> None:
        super().__init__(method, spec)
        self.previous: np.ndarray | None = None  # (H, d); None: it is not known
        self.n_sink = 0  # number of pages with sinks, set by the first sparse step; 0: not set

    def recent(self, n: int) -> int:
        return min(self.method.window, max(1, self.method.budget.rows(n) // 4))

    def first_pages(self, n: int) -> tuple[int, int]:
        """Returns the first page after the sinks and the first page of the window (step 3)."""
        p, budget = self.method.page, self.method.budget.rows(n)
        n_sink = min(-(-self.method.sinks // p), max(1, budget // (4 * p)))
        return self.n_sink or n_sink, (n - self.recent(n)) // p

    def is_dense_at(self, n: int) -> bool:
        n_sink, window = self.first_pages(n)
        return self.method.budget.rows(n) >= n or window <= n_sink

    def n_best(self, n: int) -> int:
        p = self.method.page
        return max(1, (self.method.budget.rows(n) - self.n_sink * p - self.recent(n)) // p)

    def select(self) -> list[Choice]:
        method, n, p = self.method, self.n, self.method.page
        self.n_sink, window = self.first_pages(n)
        before = self.previous if method.speculate else None
        self.corrected = np.zeros(self.n_kv, bool)
        choices = []
        for g in range(self.n_kv):
            q = self.q if before is None else before
            if before is not None and method.correct:  # step 7
                heads = range(g * self.group, (g + 1) * self.group)
                turned = np.mean([cosine(self.q[h], before[h]) for h in heads])
                self.corrected[g] = method.tau > -1 and (method.tau > 1 or turned < method.tau)
                q = self.q if self.corrected[g] else before
            pages, pooled = self.choose_pages(g, q, window, n)
            scores = np.full(window * p, NEVER)
            scores.reshape(window, p)[pages] = pooled[:, None]
            scores[: self.n_sink * p] = FORCED
            scores = np.append(scores, np.full(n - window * p, FORCED))
            best = pages[np.argsort(-pooled, kind="stable")[: self.n_best(n)]]
            rows = [np.flatnonzero(scores == FORCED)]
            rows += [np.arange(j * p, (j + 1) * p) for j in best]
            choices.append(Choice(np.sort(np.concatenate(rows)), scores))
        return choices

    def choose_pages(self, g: int, q: np.ndarray, window: int, n: int) -> tuple:
        """Step 4: returns the pages that kv head g scores in a context of n rows, and their scores.

        window: the first page of the window. A score is a mean of softmaxes, as ``pooled`` returns
        it.
        """
        hi, lo = self.summary(g, window)
        pages, n_group, n_visited = np.arange(self.n_sink, window), window // GROUPED, 0
        if self.method.groups:  # step 9
            n_visited = 4 * self.n_best(n)
        if n_visited and n_group > 2 * n_visited:
            of_groups = self.pooled(g, q, *self.of_groups(hi, lo, n_group))
            visited = np.argsort(-of_groups, kind="stable")[:n_visited]
            of_page = pages // GROUPED
            pages = pages[np.isin(of_page, visited) | (of_page >= n_group)]
        return pages, self.pooled(g, q, hi[pages], lo[pages])

    def pooled(self, g: int, q: np.ndarray, hi: np.ndarray, lo: np.ndarray) -> np.ndarray:
        """Steps 2 and 4: returns page scores (pages,): the mean over kv head g's softmaxes.

        hi, lo: summaries (pages, d). q (H, d).
        """
        positive, negative = np.maximum(q, 0), np.maximum(-q, 0)
        heads = range(g * self.group, (g + 1) * self.group)
        s = [(hi @ positive[h] - lo @ negative[h]) * self.scale for h in heads]
        return np.mean([softmax(self.capped(each)) for each in s], axis=0)

    def summary(self, g: int, n_page: int) -> tuple[np.ndarray, np.ndarray]:
        """Step 1: returns the summaries hi and lo (n_page, d) of kv head g's first n_page pages."""
        p = self.method.page
        keys = self.k[g, : n_page * p].reshape(n_page, p, -1)
        if self.method.summary == "minmax":
            return half(keys.max(1)), half(keys.min(1))
        mean, std = keys.mean(1), keys.std(1)
        return half(mean + std), half(mean - std)

    def of_groups(self, hi: np.ndarray, lo: np.ndarray, n: int) -> tuple[np.ndarray, np.ndarray]:
        """Step 9: returns hi and lo (n, d) of the first n groups of 8 pages.

        hi, lo: the summaries (pages, d) of the pages.
        """
        hi, lo = (x[: n * GROUPED].reshape(n, GROUPED, -1) for x in (hi, lo))
        if self.method.summary == "minmax":
            return half(hi.max(1)), half(lo.min(1))
        mean, square = (hi + lo).mean(1) / 2, ((hi + lo) ** 2 + (hi - lo) ** 2).mean(1) / 4
        std = np.sqrt(np.maximum(square - mean**2, 0))
        return half(mean + std), half(mean - std)

    def finish_prefill(self, q: np.ndarray) -> None:
        self.previous, self.n_sink = None, 0

    def finish_step(self, choices: list[Choice]) -> None:
        self.previous = self.q
        if self.is_dense_at(self.n):
            self.n_sink = 0

    def truncate(self, n: int) -> None:
        self.previous, self.n_sink = None, 0
        super().truncate(n)


def cosine(a: np.ndarray, b: np.ndarray) -> float:
    return float(a @ b / (np.linalg.norm(a) * np.linalg.norm(b)))
