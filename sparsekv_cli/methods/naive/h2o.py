"""H2O, naively (Zhang et al., arXiv:2306.14048).

| paper | here |
|---|---|
| section 4, F_score: attention accumulated | NaiveH2O.receive |
| Algorithm 1, lines 4 to 8: the row to drop | NaiveH2O.drop |
| section 5, half heavy hitters and half recent rows | NaiveH2O.drop |

All rows stay in K and V. ``held`` has, for each kv head, the positions of the rows not dropped.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from sparsekv_cli.cache.spec import N_SINKS, AttnInput, LayerSpec
from sparsekv_cli.methods.naive.base import FORCED, NEVER, Choice, Naive, best

if TYPE_CHECKING:
    from sparsekv_cli.methods.h2o import H2O


class NaiveH2O(Naive):
    """The positions that each kv head holds, and F, the attention that each row has received."""

    method: H2O

    def __init__(self, method: H2O, spec: LayerSpec) -> None:
        super().__init__(method, spec)
        self.held = [np.empty(0, int)] * self.n_kv
        self.f = np.empty((self.n_kv, 0))  # (G, n)
        self.ranked = np.empty((self.n_kv, 0))  # F at the time when rows were last dropped
        self.start = 0, list(self.held), self.f, self.ranked  # the end of the last prefill

    def append(self, x: AttnInput) -> None:
        n_past = self.n
        super().append(x)
        self.held = [np.append(held, np.arange(n_past, self.n)) for held in self.held]
        new = np.zeros((self.n_kv, self.n - n_past))
        self.f = np.append(self.f, new, axis=1)
        self.ranked = np.append(self.ranked, new + FORCED, axis=1)

    def kept(self, g: int) -> np.ndarray:
        return self.held[g]

    def is_dense_at(self, n: int) -> bool:
        return len(self.held[0]) == n

    def select(self) -> list[Choice]:
        return [Choice(*each) for each in zip(self.held, self.ranked, strict=True)]

    def receive(self, h: int, rows: np.ndarray, weights: np.ndarray, n_left: int) -> None:
        if not self.method.window or n_left <= self.method.window:
            self.f[h // self.group, rows] += weights

    def finish_prefill(self, q: np.ndarray) -> None:
        self.drop()
        self.start = self.n, list(self.held), self.f.copy(), self.ranked.copy()

    def finish_step(self, choices: list[Choice]) -> None:
        if len(choices) == self.n_kv:
            self.held = [choice.rows for choice in choices]
        self.drop()

    def drop(self) -> None:
        """Drops rows so that the next row fits the budget. Half of it is for recent rows."""
        n = self.n + 1  # the next step's rows
        budget = self.method.budget.rows(n)
        limit, recent = N_SINKS + budget - 1, n - max(1, budget // 2)
        for g, held in enumerate(self.held):
            if len(held) > limit:
                f = np.full(self.n, NEVER)
                f[held] = self.f[g, held]
                forced = held[(held < N_SINKS) | (held >= recent)]
                choice = best(f, forced, limit - len(forced))
                self.held[g], self.ranked[g] = choice.rows, choice.scores

    def truncate(self, n: int) -> None:
        super().truncate(n)
        start, held, f, ranked = self.start
        assert n == start, "summed attention cannot be taken back"
        self.held, self.f, self.ranked = list(held), f.copy(), ranked.copy()
