"""FASA, naively ("Frequency-Aware Sparse Attention", Wang et al.).

| paper | here |
|---|---|
| eq 4, 5, the dominant chunks, which calibration has ranked | NaiveFASA.__init__ |
| section 4.1, scores by dominant chunks, top N_fac | NaiveFASA.select |
| eq 6, 7, focused attention at original positions | Naive.attend |

Chunk i is the dims (i, i + C), C chunks. S: scores of the keys by the dominant chunks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from sparsekv_cli.cache.spec import N_SINKS, LayerSpec
from sparsekv_cli.methods.naive.base import Choice, Naive, best

if TYPE_CHECKING:
    from sparsekv_cli.methods.fasa import FASA

N_RECENT = 16


class NaiveFASA(Naive):
    """Each query head attends to N_fac rows."""

    method: FASA

    def __init__(self, method: FASA, spec: LayerSpec) -> None:
        super().__init__(method, spec)
        _, n_dims = method.dominant_dims(spec)
        self.dominant = spec.calibration[f"dom_{method.metric}"][:, : n_dims // 2].astype(int)

    def is_dense_at(self, n: int) -> bool:
        return n <= self.method.budget.rows(n)

    def select(self) -> list[Choice]:
        n, n_fac, c = self.n, self.method.budget.rows(self.n), self.spec.n_chunk
        forced = np.empty(0, int)
        if self.method.force == "default":
            n_recent = min(N_RECENT, max(1, n_fac // 2))
            forced = np.r_[: min(N_SINKS, n_fac - n_recent), n - n_recent : n]
        choices = []
        for h in range(self.n_head):
            s, q, k = np.zeros(n), self.q[h], self.k[h // self.group]
            for i in self.dominant[h // self.group]:
                s += q[i] * k[:, i] + q[i + c] * k[:, i + c]
            choices.append(best(s, forced, n_fac - len(forced)))
        return choices
