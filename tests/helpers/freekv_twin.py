"""FreeKV step by step as docs/methods.md numbers it, in numpy f64: slow, literal, no shared code.

Every step summarises all pages anew from the keys; there is no pool, no ring, no speculation in
time: a kv head looks up which query it has to choose with, and chooses. Letters: H query heads, G
kv heads, n keys, d head size, p rows a page.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np


@dataclass(frozen=True)
class TwinOptions:
    """The options that change what is computed. ``budget``: B of a context of n rows."""

    budget: Callable[[int], int]
    sinks: int = 16
    window: int = 64
    page: int = 8
    summary: str = "meanstd"
    tau: float = 0.9
    speculate: bool = True
    correct: bool = True
    cache_pages: float = 2.0


@dataclass
class HeadChoice:
    """What one kv head does in a step."""

    cosine: float
    corrected: bool
    pages: np.ndarray  # chosen, ascending
    rows: np.ndarray  # attended, ascending
    pooled: np.ndarray  # scores of the candidates
    cut: float  # the lowest pooled score that was chosen


@dataclass
class Cached:
    """The recalled pages of a kv head: page -> (when it was last used, slot)."""

    used: dict[int, tuple[int, int]] = field(default_factory=dict)
    time: int = 0
    hit: int = 0
    recalled: int = 0

    def take(self, pages: np.ndarray, n_slot: int) -> None:
        """Hits are marked first; then each miss takes an empty slot, or the longest unused one."""
        self.time += 1
        misses = [int(j) for j in pages if int(j) not in self.used]
        for j in set(pages.tolist()) - set(misses):
            self.used[j] = (self.time, self.used[j][1])
        self.hit += len(pages) - len(misses)
        self.recalled += len(misses)
        for j in misses:
            taken = {slot for _, slot in self.used.values()}
            free = sorted(set(range(n_slot)) - taken)
            slot = free[0] if free else -1
            if not free:
                oldest = min(self.used, key=lambda page: self.used[page])
                slot = self.used.pop(oldest)[1]
            self.used[j] = (self.time, slot)


class FreeKVTwin:
    """One layer: ``start`` after the prefill, then ``choose`` and ``finish`` for every token."""

    def __init__(self, options: TwinOptions, n_head: int, n_head_kv: int) -> None:
        self.options, self.n_head, self.n_kv = options, n_head, n_head_kv
        self.group = n_head // n_head_kv
        self.cached = [Cached() for _ in range(n_head_kv)]
        self.taken = [(0, 0, 0)] * n_head_kv

    def start(self, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> None:
        """q (H, d) of the last row, k (G, n, d), v (G, n, d_v) of the context."""
        self.k, self.v = k.astype(np.float64), v.astype(np.float64)
        self.previous = q.astype(np.float64)
        self.scale = 1 / np.sqrt(k.shape[2])

    def candidates(self, n: int) -> np.ndarray:
        """Steps 3 and 4: pages between the sinks and the window of a step of n rows."""
        options, p = self.options, self.options.page
        start = (n - options.window) // p * p
        pages = np.arange(n // p + 1)
        return pages[(pages * p >= options.sinks) & ((pages + 1) * p <= start)]

    def pooled(self, q: np.ndarray, g: int, pages: np.ndarray) -> np.ndarray:
        """Steps 1, 2 and 4: q (H, d) -> the mean over kv head g's queries of softmax(scores)."""
        p = self.options.page
        keys = np.stack([self.k[g, j * p : (j + 1) * p] for j in pages])
        if self.options.summary == "minmax":
            hi, lo = keys.max(1), keys.min(1)
        else:
            mean, std = keys.mean(1), keys.std(1)
            hi, lo = mean + std, mean - std
        hi, lo = (x.astype(np.float16).astype(np.float64) for x in (hi, lo))  # as they are kept
        weights = []
        for h in range(g * self.group, (g + 1) * self.group):
            s = (np.maximum(q[h], 0) * hi - np.maximum(-q[h], 0) * lo).sum(1) * self.scale
            weights.append(softmax(s))
        return np.mean(weights, axis=0)

    def n_best(self, n: int) -> int:
        options = self.options
        return (options.budget(n) - options.sinks - options.window) // options.page

    def best(self, q: np.ndarray, g: int, n: int) -> tuple[np.ndarray, np.ndarray, float]:
        """The chosen pages of a step of n rows, the pooled scores and the lowest one chosen."""
        pages, k = self.candidates(n), self.n_best(n)
        pooled = self.pooled(q, g, pages)
        places = np.sort(np.argsort(-pooled, kind="stable")[:k])
        cut = pooled[places].min() if len(places) < len(pages) else -np.inf
        return pages[places], pooled, cut

    def choose(self, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> list[HeadChoice]:
        """Steps 3 to 7 for a token: q (H, d), k (G, d), v (G, d_v); its row is added first."""
        self.k = np.concatenate([self.k, k[:, None].astype(np.float64)], axis=1)
        self.v = np.concatenate([self.v, v[:, None].astype(np.float64)], axis=1)
        self.q = q.astype(np.float64)
        options, p, n = self.options, self.options.page, self.k.shape[1]
        choices = []
        for g in range(self.n_kv):
            heads = range(g * self.group, (g + 1) * self.group)
            cosine = float(np.mean([cosine_of(self.q[h], self.previous[h]) for h in heads]))
            corrected = options.speculate and options.correct and cosine < options.tau
            query = self.previous if options.speculate and not corrected else self.q
            pages, pooled, cut = self.best(query, g, n)
            rows = [np.arange(options.sinks), np.arange((n - options.window) // p * p, n)]
            rows += [np.arange(j * p, (j + 1) * p) for j in pages]
            choices.append(
                HeadChoice(cosine, corrected, pages, np.sort(np.concatenate(rows)), pooled, cut)
            )
        return choices

    def finish(self, choices: list[HeadChoice]) -> np.ndarray:
        """Outputs (H, d_v) of the rows in ``choices``; the query becomes the previous one."""
        out = []
        for h in range(self.n_head):
            g = h // self.group
            rows = choices[g].rows
            out.append(softmax(self.k[g, rows] @ self.q[h] * self.scale) @ self.v[g, rows])
        self.previous = self.q
        return np.stack(out)

    def take(self, g: int, pages: np.ndarray, n: int, asked_at: int) -> None:
        """Step 8's cache: kv head g makes its pages of a step of n rows resident.

        asked_at: rows when the query was current. What it chose with the same query, of the same
        candidates, it has already.
        """
        key = (asked_at, len(self.candidates(n)), self.n_best(n))
        if self.taken[g] != key:
            self.taken[g] = key
            n_slot = max(self.n_best(n), round(self.options.cache_pages * self.n_best(n)))
            self.cached[g].take(pages, n_slot)


def cosine_of(a: np.ndarray, b: np.ndarray) -> float:
    return float(a @ b / (np.linalg.norm(a) * np.linalg.norm(b)))


def softmax(scores: np.ndarray) -> np.ndarray:
    weights = np.exp(scores - scores.max())
    return weights / weights.sum()
