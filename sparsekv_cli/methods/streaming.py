"""StreamingLLM (Xiao et al., arXiv:2309.17453): the first tokens and the most recent ones.

Attends to the sinks and the last k rows at their absolute positions. Departure: the paper
renumbers positions within the cache; with absolute positions the rows need no second rotation, and
contexts here stay within what the model was trained on. Old rows stay in memory, so that a later
prefill can still attend to them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from sparsekv_cli.cache import (
    DEFAULT_BUDGET,
    N_SINKS,
    Backend,
    Budget,
    LayerCache,
    LayerSpec,
    Method,
    SelectingCache,
)


@dataclass(frozen=True)
class Streaming(Method):
    """Options of StreamingLLM."""

    paper: ClassVar[str] = "arXiv:2309.17453"
    summary: ClassVar[str] = "attention sinks and the most recent rows"

    budget: Budget = field(
        default=DEFAULT_BUDGET, metadata={"help": "recent rows attended: N or P%"}
    )
    sinks: int = field(default=N_SINKS, metadata={"help": "first rows always attended"})

    def __post_init__(self) -> None:
        if self.sinks < 0:
            raise ValueError(f"sinks = {self.sinks}: must be 0 or more")

    def sparse_layer(self, spec: LayerSpec, backend: Backend) -> LayerCache:
        return _StreamingCache(spec, backend, self)


class _StreamingCache(SelectingCache):
    def __init__(self, spec: LayerSpec, backend: Backend, method: Streaming) -> None:
        super().__init__(spec, backend)
        self.method = method

    def selects_all(self, n: int) -> bool:
        return self.method.budget.rows(n) + self.method.sinks >= n

    def select(self, q: np.ndarray, n: int) -> tuple[np.ndarray, np.ndarray, int]:
        k, sinks = self.method.budget.rows(n), self.method.sinks
        rows = np.concatenate([np.arange(sinks), np.arange(n - k, n)]).astype(np.int32)
        n_kv = self.spec.n_head_kv
        return np.tile(rows, (n_kv, 1)), np.full(n_kv, len(rows)), 0
