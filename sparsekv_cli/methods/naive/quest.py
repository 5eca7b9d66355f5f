"""Quest, naively (Tang et al., arXiv:2406.10774).

| paper | here |
|---|---|
| 3.3 min and max of a page's keys | NaiveQuest.page_scores |
| 3.3 criticality of a page, sum_c max(q_c min_c, q_c max_c) | NaiveQuest.page_scores |
| 3.4 top-k pages, then attention over their rows | NaiveQuest.select |

Every step makes the summaries of all pages again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from sparsekv_cli.cache.spec import N_SINKS
from sparsekv_cli.methods.naive.base import FORCED, Choice, Naive, half, softmax

if TYPE_CHECKING:
    from sparsekv_cli.methods.quest import Quest


class NaiveQuest(Naive):
    """Each kv head attends to chosen pages, to the sinks, and to the page of the current token."""

    method: Quest

    def is_dense_at(self, n: int) -> bool:
        return n <= N_SINKS + self.method.budget.rows(n)

    def select(self) -> list[Choice]:
        n, p, budget = self.n, self.method.page, self.method.budget.rows(self.n)
        n_page = (n - 1) // p  # whole pages before the current token's page
        n_best = min(n_page, (budget - 1) // p)
        choices = []
        for g in range(self.n_kv):
            pages = self.pooled(g, n_page) if n_page else np.empty(0)
            chosen = np.sort(np.argsort(-pages, kind="stable")[:n_best])
            scores = np.append(np.repeat(pages, p), np.full(n - n_page * p, FORCED))
            scores[:N_SINKS] = FORCED
            rows = [np.arange(N_SINKS), np.arange(n_page * p, n)]
            rows += [np.arange(j * p, (j + 1) * p) for j in chosen]
            choices.append(Choice(np.unique(np.concatenate(rows)), scores))
        return choices

    def pooled(self, g: int, n_page: int) -> np.ndarray:
        """Returns page scores (n_page,): the mean of softmax(scores) over kv head g's queries."""
        s = np.array([self.page_scores(g, j) for j in range(n_page)]).reshape(n_page, self.group)
        return np.mean([softmax(self.capped(each)) for each in s.T], axis=0)

    def page_scores(self, g: int, j: int) -> np.ndarray:
        """Returns page j's score for each query head of kv head g, (H/G,)."""
        p, q = self.method.page, self.q[g * self.group : (g + 1) * self.group]
        keys = self.k[g, max(j * p, N_SINKS) : (j + 1) * p]
        if self.method.summary == "minmax":
            hi, lo = keys.max(0), keys.min(0)
        else:
            hi, lo = keys.mean(0) + keys.std(0), keys.mean(0) - keys.std(0)
        hi, lo = half(hi), half(lo)
        return self.scale * np.maximum(q * hi, q * lo).sum(1)
