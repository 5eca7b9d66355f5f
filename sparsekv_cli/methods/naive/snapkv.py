"""SnapKV, naively (Li et al., arXiv:2404.14469).

| paper | here |
|---|---|
| section 4, attention of the observation window, summed | NaiveSnapKV.receive |
| section 4, pooling, so that neighbours are kept together | NaiveSnapKV.finish_prefill |
| section 4, top-k of the prefix, and the window itself | NaiveSnapKV.finish_prefill |

All rows stay in K and V. ``held`` has, for each kv head, the positions of the rows not dropped.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from sparsekv_cli.cache.spec import N_SINKS, AttnInput, LayerSpec
from sparsekv_cli.methods.naive.base import FORCED, NEVER, Choice, Naive, best

if TYPE_CHECKING:
    from sparsekv_cli.methods.snapkv import SnapKV


class NaiveSnapKV(Naive):
    """The positions that each kv head holds. They are chosen at the end of a prefill."""

    method: SnapKV

    def __init__(self, method: SnapKV, spec: LayerSpec) -> None:
        super().__init__(method, spec)
        self.held = [np.empty(0, int)] * self.n_kv
        self.pooled = [np.empty(0)] * self.n_kv  # scores (n,) of the last choice

    def append(self, x: AttnInput) -> None:
        n_past = self.n
        super().append(x)
        new, n_new = np.arange(n_past, self.n), self.n - n_past
        self.held = [np.append(held, new) for held in self.held]
        self.pooled = [np.append(pooled, np.full(n_new, FORCED)) for pooled in self.pooled]
        self.received = np.zeros((self.n_kv, self.n))

    def kept(self, g: int) -> np.ndarray:
        return self.held[g]

    def is_dense_at(self, n: int) -> bool:
        return len(self.held[0]) == n

    def select(self) -> list[Choice]:
        return [Choice(*each) for each in zip(self.held, self.pooled, strict=True)]

    def finish_step(self, choices: list[Choice]) -> None:
        if len(choices) == self.n_kv:
            self.held = [choice.rows for choice in choices]

    def receive(self, h: int, rows: np.ndarray, weights: np.ndarray, n_left: int) -> None:
        if n_left <= self.method.window:
            self.received[h // self.group, rows] += weights

    def finish_prefill(self, q: np.ndarray) -> None:
        budget, window, w = self.method.budget.rows(self.n), self.method.window, self.method.kernel
        if N_SINKS + budget + window >= len(self.held[0]):
            return
        for g, held in enumerate(self.held):
            prefix = self.received[g, held[:-window]]
            padded = np.pad(prefix, w // 2, constant_values=NEVER)
            pooled = np.lib.stride_tricks.sliding_window_view(padded, w).max(1)
            scores = np.full(self.n, NEVER)
            scores[held[:-window]] = pooled
            choice = best(scores, np.append(held[:N_SINKS], held[-window:]), budget)
            self.held[g], self.pooled[g] = choice.rows, choice.scores

    def truncate(self, n: int) -> None:
        super().truncate(n)
        self.held = [held[held < n] for held in self.held]
        self.pooled = [pooled[:n] for pooled in self.pooled]
