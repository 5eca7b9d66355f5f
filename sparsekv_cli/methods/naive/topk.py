"""Exact top-k, naively: the oracle.

| docs/methods.md | here |
|---|---|
| 1, all rows are scored for each query head | NaiveTopK.select |
| 2, sinks, recent rows and the best others | NaiveTopK.select |
| 3, exact attention to these rows | Naive.attend |
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from sparsekv_cli.cache.spec import N_SINKS
from sparsekv_cli.methods.naive.base import Choice, Naive, best

if TYPE_CHECKING:
    from sparsekv_cli.methods.topk import TopK


class NaiveTopK(Naive):
    """Each query head attends to the sinks and to the k best other rows."""

    method: TopK

    def is_dense_at(self, n: int) -> bool:
        return n <= N_SINKS + self.method.budget.rows(n)

    def select(self) -> list[Choice]:
        n, k = self.n, self.method.budget.rows(self.n)
        n_recent = min(self.method.recent, max(1, k // 2))
        forced = np.r_[:N_SINKS, n - n_recent : n]
        return [
            best(self.scores(h, self.q, self.k), forced, k - n_recent) for h in range(self.n_head)
        ]
