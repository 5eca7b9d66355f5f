"""LFPS with its tables and rows on the host, and the sinks' rows on the device too.

In the paper, too, the device attends to the sinks, and the host to the rows that it chose. One
kernel attends to the sinks and merges the host's output by its log-sum-exp. The host has a copy of
the sinks' keys, but not of their values. It scores the keys, because the sinks' mass decides
whether a head is bypassed (eq 6).

The host sends its output first, and the device continues with the layer. Meanwhile, in
``end_step``, the host updates its tables (eq 10) and finds the next candidates (eq 7, 8).
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from sparsekv_cli.cache.spec import N_SINKS, Memory
from sparsekv_cli.device.cache import CachePlan
from sparsekv_cli.device.host import HostCache, HostWorker
from sparsekv_cli.device.layers.prefill import softmax_on
from sparsekv_cli.device.layers.store import UNLIMITED
from sparsekv_cli.kernels.attention import decode as attention
from sparsekv_cli.kernels.attention.decode import Attended
from sparsekv_cli.methods.lfps import LFPSCache


class HostLFPS(HostCache):
    """One layer. The device has the sinks as f16, with the values of the host's rows."""

    cache: LFPSCache
    has_device_part = True

    def __init__(self, cache: LFPSCache, worker: HostWorker) -> None:
        super().__init__(cache, worker)
        cache.exclude_sinks()
        cache.update_later()
        n_kv, d, d_v = (cache.spec.n_head_kv, cache.spec.head_dim, cache.spec.value_dim)
        self._k, self._v = (
            torch.zeros(1, n_kv, N_SINKS, width, dtype=torch.float16, device=worker.device)
            for width in (d, d_v)
        )
        self._softmax = softmax_on(cache.spec, worker.device)
        self._count = torch.full((1,), N_SINKS, dtype=torch.int32, device=worker.device)
        self._copied = False
        self._n_steps = 0

    def begin_step(self, n: int, n_max: int) -> CachePlan:
        """Copies the sinks to the device as soon as all are there. No step needs them earlier.

        While the host attends to every row, its log-sum-exp says that the sinks are included.
        """
        store = self.cache.store
        if not self._copied and self.n >= N_SINKS:
            self._copied = True
            for ours, theirs, kind in (
                (self._k, store.k, store.k_type),
                (self._v, store.v, store.v_type),
            ):
                sinks = kind.read(theirs[:, :N_SINKS])[..., : kind.d]
                ours[0] = torch.from_numpy(sinks).to(ours.device)
        return CachePlan(None, UNLIMITED if self._copied else n)

    def attend_on_device(self, q: torch.Tensor, others: Attended, out: torch.Tensor) -> None:
        """Attends to the first rows. A model's sinks are in this part, too."""
        attention.attend_dense(
            q, self._k, self._v, self._count, N_SINKS, self._softmax, out, others=others
        )

    def decode(self, x: Any) -> np.ndarray:
        self._n_steps += 1
        return super().decode(x)

    @property
    def lse(self) -> np.ndarray:
        return self.cache.lse

    def truncate(self, n: int) -> int:
        kept = super().truncate(n)
        self._copied = self._copied and kept >= N_SINKS
        return kept

    def memory(self) -> Memory:
        return replace(self.cache.memory(), device=self._nbytes)

    def counters(self) -> Mapping[str, int]:
        counts = Counter(self.cache.counters())
        counts["bytes_read"] += self._n_steps * self._nbytes
        return counts

    @property
    def _nbytes(self) -> int:
        return self._k.nbytes + self._v.nbytes
