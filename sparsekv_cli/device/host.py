"""A layer whose cache lies on the host: dense prefill on the GPU, decode by the CPU's kernels.

This is the LFPS paper's setting, and used for every method without a cache of its own on the
device. In prefill the rows are copied to pinned host memory on a second stream while the device
goes on, and a thread hands them to the cache.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import torch

from sparsekv_cli.cache.layer import ChunkAttention, LayerCache
from sparsekv_cli.cache.spec import AttnInput, Memory
from sparsekv_cli.cache.store import KVStore
from sparsekv_cli.device.cache import DeviceStore


def as_array(t: torch.Tensor) -> np.ndarray:
    """The memory of a CPU tensor; bf16 as cpu/jit/floats.py has it."""
    return t.view(torch.uint16).numpy() if t.dtype == torch.bfloat16 else t.numpy()


def as_tensor(x: np.ndarray) -> torch.Tensor:
    """The reverse of ``as_array``."""
    tensor = torch.from_numpy(x)
    return tensor.view(torch.bfloat16) if x.dtype == np.uint16 else tensor


class HostWorker:
    """The thread on which caches take the rows of a prefill, in order."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._pool = ThreadPoolExecutor(1, "host-kv")
        self._pending: list[Future[None]] = []
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def submit(self, call: Callable[[], None]) -> None:
        self._pending.append(self._pool.submit(call))

    def wait(self) -> None:
        """Waits until all is done; raises the first exception."""
        pending, self._pending = self._pending, []
        for future in pending:
            future.exception()
        for future in pending:
            future.result()

    def copy(
        self, x: AttnInput, n_queries: int | None = None
    ) -> tuple[AttnInput, Callable[[], None]]:
        """x as arrays on the host, and a function that waits until they are filled.

        n_queries: see LayerCache.queries_read.
        """
        if n_queries is not None:
            from_row = max(0, x.q.shape[1] - n_queries)
            unrotated = x.q_nope[:, :0], x.k_nope[:, :0]
            x = AttnInput(x.q[:, from_row:], x.k, x.v, *unrotated, x.pos)
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
    """A cache of the host, ``cache``, in a decoder on the device."""

    def __init__(self, cache: LayerCache, worker: HostWorker) -> None:
        self.cache = cache
        self.spec = cache.spec
        self._worker = worker
        self._rows: DeviceStore | None = None  # K and V on the device, during a prefill
        self._next = 0  # position at which the next chunk of a prefill begins

    def extend(self, x: AttnInput) -> DeviceStore:
        """The rows on the device; the cache takes its own in while the device goes on."""
        device, n_new = self._worker.device, x.q.shape[1]
        on_host, wait = self._worker.copy(x, self.cache.queries_read)
        if x.pos != self._next:  # what is left of a prefill that was interrupted
            self._rows = None
        self._next = x.pos + n_new
        rows = self._rows
        if rows is None and x.pos > 0:  # what there is of earlier rows only the cache itself knows
            self._worker.wait()
            wait()
            store: KVStore = self.cache.extend(on_host)
            rows, spec = DeviceStore(self.spec, device), self.spec
            past = (stored[:, :-n_new] for stored in (store.keys(), store.values()))
            k, v = (torch.from_numpy(stored).to(device) for stored in past)
            rows.append(k[..., : spec.head_dim], v[..., : spec.value_dim])
        else:
            rows = rows or DeviceStore(self.spec, device)

            def take_in() -> None:
                wait()
                self.cache.extend(on_host)

            self._worker.submit(take_in)
        rows.append(x.k, x.v)
        self._rows = rows
        return rows

    def attend(self, attend: ChunkAttention, x: AttnInput) -> torch.Tensor:
        """A chunk that attends on the host in its own way, as in a calibration's trials."""
        on_host, wait = self._worker.copy(x)
        self._worker.wait()
        wait()
        return as_tensor(attend(self.cache, on_host)).to(self._worker.device)

    def finish_prefill(self) -> None:
        self._rows = None
        self._worker.submit(self.cache.finish_prefill)

    def wait(self) -> None:
        """Waits until the cache has taken all rows of the prefill."""
        self._worker.wait()

    def decode(self, x: Any) -> np.ndarray:
        """LayerCache.decode, with an AttnInput on the host."""
        return self.cache.decode(x)

    def learn(self) -> None:
        self.cache.learn()

    # --- the rest is the cache's ------------------------------------------------------------------

    @property
    def n(self) -> int:
        self._worker.wait()
        return self.cache.n

    def reserve(self, n: int) -> None:
        self.cache.reserve(n)

    def truncate(self, n: int) -> int:
        self._rows = None
        self._worker.wait()
        return self.cache.truncate(n)

    def memory(self) -> Memory:
        return self.cache.memory()

    def counters(self) -> Mapping[str, int]:
        return self.cache.counters()
