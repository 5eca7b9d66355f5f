"""StreamingLLM: "Efficient Streaming Language Models with Attention Sinks" (Xiao et al., 2023).

A step attends to the first rows, the sinks, and to the last k rows.

| paper | here |
|---|---|
| section 3.2, sinks and a rolling cache | select |
| section 3.2, positions within the cache | _turn_sinks, with ``reposition=true`` |

Departures:
(1) Positions stay absolute by default; ``reposition=true`` numbers the rows within the cache.
    Within the length that a model was trained for, this changes the distance to the sinks only.
(2) Old rows stay in memory, because a later prefill attends to all rows.
"""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from sparsekv_cli.cache.layer import LayerCache, SelectingCache
from sparsekv_cli.cache.spec import DEFAULT_BUDGET, N_SINKS, AttnInput, Budget, LayerSpec
from sparsekv_cli.methods.base import Method
from sparsekv_cli.settings.option import option


@dataclass(frozen=True)
class Streaming(Method):
    """Options of StreamingLLM."""

    paper: ClassVar[str] = "arXiv:2309.17453"
    description: ClassVar[str] = "attention sinks and the most recent rows"
    use: ClassVar[str] = "endless text; it finds nothing between the first and the recent rows"
    work_of_a_head: ClassVar[int] = 256
    device_cache: ClassVar[str] = "streaming:DeviceStreaming"

    budget: Budget = option(DEFAULT_BUDGET, "last rows attended: N or P%")
    sinks: int = option(N_SINKS, "first rows always attended", at_least=0)
    reposition: bool = option(False, "number positions within the cache")

    def sparse_layer(self, spec: LayerSpec) -> LayerCache:
        return _StreamingCache(spec, self)


class _StreamingCache(SelectingCache):
    def __init__(self, spec: LayerSpec, method: Streaming) -> None:
        super().__init__(spec)
        self.method = method

    def is_dense_at(self, n: int) -> bool:
        return self.method.budget.rows(n) + self.method.sinks >= n

    def decode(self, x: AttnInput) -> np.ndarray:
        n, sinks = self.store.n + 1, self.method.sinks
        if not self.method.reposition or self.is_dense_at(n):
            return super().decode(x)
        self._turn_sinks(n)
        out = super().decode(x)
        assert self.attended is not None
        self.attended[0][:, :sinks] = np.arange(sinks)
        return out

    def select(self, q: np.ndarray, n: int) -> tuple[np.ndarray, np.ndarray, int]:
        k, sinks = self.method.budget.rows(n), self.method.sinks
        first = n if self.method.reposition else 0
        rows = np.concatenate([np.arange(first, first + sinks), np.arange(n - k, n)])
        n_kv = self.spec.n_head_kv
        return np.tile(rows.astype(np.int32), (n_kv, 1)), np.full(n_kv, len(rows)), 0

    def _turn_sinks(self, n: int) -> None:
        """Writes copies of the sinks after row n - 1, with keys rotated towards the recent rows.

        The rotation is by the number of rows left out between them. The stored sinks stay as they
        are, because other layers and a thread that writes files read them.
        """
        store, sinks, half = self.store, self.method.sinks, len(self.spec.theta)
        store.reserve(n + sinks)
        angles = (n - sinks - self.method.budget.rows(n)) * self.spec.theta  # f64 (half,)
        cos, sin = np.cos(angles), np.sin(angles)
        keys = store.k_type.read(store.k[:, :sinks])[..., : self.spec.head_dim].astype(np.float64)
        a, b = keys[..., :half], keys[..., half : 2 * half]
        turned = np.concatenate([a * cos - b * sin, a * sin + b * cos, keys[..., 2 * half :]], -1)
        store.k_type.write(store.k[:, n : n + sinks], turned.astype(np.float32))
        if store.v is not store.k:
            store.v[:, n : n + sinks] = store.v[:, :sinks]
