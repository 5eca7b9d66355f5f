"""A layer whose cache lies on the host: dense prefill on the GPU, decode by the CPU's kernels.

The LFPS paper's setting of a GPU and its CPU, and the way of every method that has no cache of its
own on the device. In prefill the rows leave for the host while the device goes on: they are copied
into pinned memory on a stream of their own, and the cache takes them in on a thread that follows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from types import ModuleType
from typing import Any

import numpy as np
import torch

from sparsekv_cli.cache.layer import LayerCache
from sparsekv_cli.cache.spec import AttnInput, LayerSpec, Memory
from sparsekv_cli.device.cache import DeviceStore
from sparsekv_cli.device.ops import attend_causal


def as_array(t: torch.Tensor) -> np.ndarray:
    """The memory of a CPU tensor; bf16 as cpu/jit/floats.py has it."""
    return t.view(torch.uint16).numpy() if t.dtype == torch.bfloat16 else t.numpy()


def as_tensor(x: np.ndarray) -> torch.Tensor:
    """The reverse of ``as_array``."""
    tensor = torch.from_numpy(x)
    return tensor.view(torch.bfloat16) if x.dtype == np.uint16 else tensor


def as_tensors(x: AttnInput) -> AttnInput:
    return AttnInput._make((*map(as_tensor, x[:5]), x.pos))


class HostOps:
    """The host's backend (cpu/ops.py), but a chunk's dense attention is computed on the device.

    rows: K and V of the layer that is being prefilled, on the device. ahead: whether the attention
    of what the cache is shown now has been computed already.
    """

    def __init__(self, ops: ModuleType, device: torch.device) -> None:
        # Copied, so that a decode step finds what it calls as fast as in the module itself.
        self.__dict__.update({k: v for k, v in vars(ops).items() if not k.startswith("_")})
        self.device = device
        self.rows: DeviceStore | None = None
        self.ahead = False
        self.dense_prefill = self._dense_prefill

    def _dense_prefill(self, store: Any, x: AttnInput, spec: LayerSpec) -> np.ndarray | None:
        """ops.dense_prefill by way of the device; None if that has been done ahead."""
        if self.ahead:
            return None
        n_past = store.n - x.q.shape[1]
        if self.rows is None:
            self.rows = DeviceStore(spec, self.device)
            if n_past:
                past = (rows[:, :n_past] for rows in (store.keys(), store.values()))
                k, v = (torch.from_numpy(rows).to(self.device) for rows in past)
                self.rows.append(k[..., : spec.head_dim], v[..., : spec.value_dim])
        assert self.rows.n == n_past
        return as_array(self.attend(as_tensors(x), spec).cpu())

    def attend(self, x: AttnInput, spec: LayerSpec) -> torch.Tensor:
        """Adds a chunk's K and V to ``rows`` and attends to them, on the device."""
        assert self.rows is not None
        q, k, v = (t.to(self.device) for t in (x.q, x.k, x.v))
        self.rows.append(k, v)
        return attend_causal(q, self.rows.keys(), self.rows.values(), spec)


class HostWorker:
    """The thread on which caches take in what was prefilled, in order."""

    def __init__(self, device: torch.device) -> None:
        self._pool = ThreadPoolExecutor(1, "host-kv")
        self._pending: list[Future[None]] = []
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def submit(self, call: Callable[[], None]) -> None:
        self._pending.append(self._pool.submit(call))

    def wait(self) -> None:
        """Until all is done; raises what went wrong first."""
        pending, self._pending = self._pending, []
        for future in pending:
            future.exception()
        for future in pending:
            future.result()

    def copy(self, x: AttnInput) -> tuple[AttnInput, Callable[[], None]]:
        """x as arrays on the host, and a call that waits until they are there."""
        if self.stream is None:
            return AttnInput._make((*map(as_array, x[:5]), x.pos)), lambda: None
        self.stream.wait_stream(torch.cuda.current_stream())
        copies = []
        with torch.cuda.stream(self.stream):
            for t in x[:5]:
                t.record_stream(self.stream)
                host = torch.empty(t.shape, dtype=t.dtype, pin_memory=True)
                copies.append(as_array(host.copy_(t, non_blocking=True)))
            event = self.stream.record_event()
        return AttnInput._make((*copies, x.pos)), event.synchronize


class HostCache(LayerCache):
    """A cache of the host, ``cache``, in a decoder on the device.

    deferred: whether prefill goes on before the cache has taken its rows in; not for caches whose
    attention may be another than dense, as in a calibration.
    """

    def __init__(self, cache: LayerCache, ops: HostOps, worker: HostWorker, *, deferred: bool):
        self.cache = cache
        self.spec = cache.spec
        self._ops, self._worker, self._deferred = ops, worker, deferred
        self._next = 0  # position at which the next chunk of a prefill begins

    def prefill(self, x: AttnInput) -> torch.Tensor:
        ops, cache = self._ops, self.cache
        on_host, wait = self._worker.copy(x)
        if x.pos != self._next:  # what is left of a prefill that was interrupted
            ops.rows = None
        self._next = x.pos + x.q.shape[1]
        if self._deferred and (ops.rows is not None or x.pos == 0):
            if ops.rows is None:
                ops.rows = DeviceStore(self.spec, ops.device)

            def take_in() -> None:
                wait()
                ops.ahead = True
                try:
                    cache.prefill(on_host)
                finally:
                    ops.ahead = False

            out = ops.attend(x, self.spec)
            self._worker.submit(take_in)
            return out
        # What there is of earlier rows only the cache itself knows.
        self._worker.wait()
        wait()
        return as_tensor(cache.prefill(on_host)).to(ops.device)

    def finish_prefill(self) -> None:
        self._ops.rows = None
        if self._deferred:
            self._worker.submit(self.cache.finish_prefill)
        else:
            self.cache.finish_prefill()

    def wait(self) -> None:
        """Until the cache has taken in all that was prefilled."""
        self._worker.wait()

    def decode(self, x: Any) -> np.ndarray:
        """LayerCache.decode, with an AttnInput on the host."""
        return self.cache.decode(x)

    # --- the rest is the cache's ------------------------------------------------------------------

    @property
    def n(self) -> int:
        self._worker.wait()
        return self.cache.n

    def reserve(self, n: int) -> None:
        self.cache.reserve(n)

    def truncate(self, n: int) -> int:
        self._ops.rows = None
        self._worker.wait()
        return self.cache.truncate(n)

    def memory(self) -> Memory:
        return self.cache.memory()

    def counters(self) -> Mapping[str, int]:
        return self.cache.counters()
