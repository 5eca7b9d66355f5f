"""StreamingLLM, naively (Xiao et al., arXiv:2309.17453).

| paper | here |
|---|---|
| section 3.2, sinks and a rolling cache | NaiveStreaming.select |
| section 3.2, positions within the cache | NaiveStreaming.attend, with ``reposition=true`` |

Letters: S sinks, k recent rows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from sparsekv_cli.cache.spec import AttnInput, LayerSpec
from sparsekv_cli.methods.naive.base import FORCED, NEVER, Choice, Naive, rotate

if TYPE_CHECKING:
    from sparsekv_cli.methods.streaming import Streaming


class NaiveStreaming(Naive):
    """All heads attend to the S sinks and the last k rows."""

    method: Streaming

    def __init__(self, method: Streaming, spec: LayerSpec) -> None:
        super().__init__(method, spec)
        self.k_nope = self.k  # (G, n, d), before RoPE

    def append(self, x: AttnInput) -> None:
        d = self.spec.head_dim
        k_nope = x.k_nope[..., :d].astype(np.float64)
        self.k_nope = np.concatenate([self.k_nope, k_nope], axis=1)
        self.q_nope = x.q_nope[:, -1, :d].astype(np.float64)  # (H, d)
        super().append(x)

    def is_dense_at(self, n: int) -> bool:
        return n <= self.method.sinks + self.method.budget.rows(n)

    def select(self) -> list[Choice]:
        n, k = self.n, self.method.budget.rows(self.n)
        rows = np.r_[: self.method.sinks, n - k : n]
        scores = np.full(n, NEVER)
        scores[rows] = FORCED
        return [Choice(rows, scores) for _ in range(self.n_kv)]

    def attend(self, choices: list[Choice]) -> np.ndarray:
        rows = choices[0].rows
        if not self.method.reposition or len(rows) == self.n:
            return super().attend(choices)
        turn = self.spec.theta, self.spec.rope_scale
        places = np.arange(len(rows))  # positions within the cache
        k = rotate(self.k_nope[:, rows], places, *turn)  # (G, S + k, d)
        q = rotate(self.q_nope[:, None], places[-1:], *turn)[:, 0]  # (H, d)
        weights = [self.weights(h, self.scores(h, q, k)) for h in range(self.n_head)]
        return np.stack([w @ self.v[h // self.group, rows] for h, w in enumerate(weights)])

    def truncate(self, n: int) -> None:
        super().truncate(n)
        self.k_nope = self.k_nope[:, :n]
