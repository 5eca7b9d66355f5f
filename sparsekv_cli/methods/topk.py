"""Exact top-k: the k keys with the largest q . k, per query head.

The oracle that other methods are measured against. It scores every key, so it saves reading values
only. Sinks and the most recent rows are always attended to; sinks are not counted in the budget.
"""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from sparsekv_cli.cache.attend import score_rows
from sparsekv_cli.cache.layer import LayerCache, SelectingCache
from sparsekv_cli.cache.spec import DEFAULT_BUDGET, N_SINKS, Budget, LayerSpec
from sparsekv_cli.cpu.attention.select import select_rows
from sparsekv_cli.methods.base import Method
from sparsekv_cli.settings.option import option


@dataclass(frozen=True)
class TopK(Method):
    """Options of exact top-k."""

    paper: ClassVar[str] = "exact top-k (oracle)"
    description: ClassVar[str] = "scores every key, attends to the best"
    use: ClassVar[str] = "to measure the best that a budget allows; it reads all keys"
    work_of_a_head: ClassVar[int] = 4096
    device_cache: ClassVar[str] = "topk:DeviceTopK"

    budget: Budget = option(DEFAULT_BUDGET, "rows attended a head: N or P%")
    recent: int = option(16, "last rows, always attended", at_least=1)

    def sparse_layer(self, spec: LayerSpec) -> LayerCache:
        return _TopKCache(spec, self)


class _TopKCache(SelectingCache):
    def __init__(self, spec: LayerSpec, method: TopK) -> None:
        super().__init__(spec)
        self.method = method

    def is_dense_at(self, n: int) -> bool:
        return self.method.budget.rows(n) + N_SINKS >= n

    def select(self, q: np.ndarray, n: int) -> tuple[np.ndarray, np.ndarray, int]:
        k = self.method.budget.rows(n)
        scores = score_rows(q, self.store, self.spec)
        idx = np.empty((len(q), N_SINKS + k), np.int32)
        recent = min(self.method.recent, max(1, k // 2))
        select_rows(scores, n, N_SINKS, recent, k, idx)
        return idx, np.full(len(q), idx.shape[1]), len(q) * n

    def bytes_to_select(self, n: int) -> int:
        return self.spec.n_head_kv * n * self.store.k.strides[1]
