"""A layer with its cache on the host: dense prefill on the GPU, decode by the CPU's kernels.

The LFPS paper works in this way. Here every method without a cache class for the device does so. In
a prefill a second stream copies the rows to page-locked memory while the device computes. A thread
then adds them to the cache.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar, TypeVar

import numpy as np
import torch

from sparsekv_cli.cache.layer import ChunkAttention, LayerCache
from sparsekv_cli.cache.spec import WINDOW, AttnInput, Memory
from sparsekv_cli.cache.store import KVStore
from sparsekv_cli.device.cache import CachePlan
from sparsekv_cli.device.layers.store import UNLIMITED, DeviceStore, copy_items, rows_like
from sparsekv_cli.device.window import WindowStore
from sparsekv_cli.kernels.attention.decode import Attended

Result = TypeVar("Result")
ALIGNMENT = 64  # bytes: a vector of the kernels that read the rows
ROWS_A_COPY = 2048  # of K and V that lie on the device
N_BUFFERS = 4  # chunks on their way to the host: copied, waiting or read


def as_array(t: torch.Tensor) -> np.ndarray:
    """Returns the memory of a CPU tensor as an array; bf16 as in cpu/jit/floats.py."""
    return t.view(torch.uint16).numpy() if t.dtype == torch.bfloat16 else t.numpy()


def as_tensor(x: np.ndarray) -> torch.Tensor:
    """Returns the memory of an array as a tensor, the reverse of ``as_array``."""
    tensor = torch.from_numpy(x)
    return tensor.view(torch.bfloat16) if x.dtype == np.uint16 else tensor


class Buffer:
    """Memory of the host through which a chunk's rows go. With a GPU it is page-locked."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._reader: Future[Any] | None = None  # reads the rows that were given last

    def split(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Returns room for each of ``tensors``. Waits until the rows here before have been read."""
        self.wait()
        sizes = [-(-t.nbytes // ALIGNMENT) * ALIGNMENT for t in tensors]
        if len(self._memory) < sum(sizes):
            self._memory = torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=True)
        parts = self._memory[: sum(sizes)].split(sizes)
        return [
            part[: t.nbytes].view(t.dtype).view(t.shape)
            for t, part in zip(tensors, parts, strict=True)
        ]

    def read_by(self, reader: Future[Any]) -> None:
        self._reader = reader

    def wait(self) -> None:
        if self._reader is not None:
            self._reader.exception()  # HostWorker.wait raises it
            self._reader = None


class HostWorker:
    """The thread on which caches add the rows of a prefill, in order.

    Rows go through a ring of buffers. Before a copy, the worker waits until the rows of N_BUFFERS
    copies earlier have been read. It does not wait for a copy to end.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._pool = ThreadPoolExecutor(1, "host-kv")
        self._pending: list[Future[Any]] = []
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._ring = deque(Buffer() for _ in range(N_BUFFERS))

    def submit(self, call: Callable[[], Result]) -> Future[Result]:
        future = self._pool.submit(call)
        self._pending.append(future)
        return future

    def wait(self) -> None:
        """Waits until all is done. Raises the first exception."""
        pending, self._pending = self._pending, []
        for future in pending:
            future.exception()
        for buffer in self._ring:
            buffer.wait()
        for future in pending:
            future.result()

    def hand_over(
        self, x: AttnInput, take: Callable[[AttnInput], Result], n_queries: int | None = None
    ) -> Future[Result]:
        """Submits ``take`` of x as arrays on the host, which it may use until it returns.

        n_queries: see LayerCache.queries_read.
        """
        if n_queries is not None:
            from_row = max(0, x.q.shape[1] - n_queries)
            unrotated = x.q_nope[:, :0], x.k_nope[:, :0]
            x = AttnInput(x.q[:, from_row:], x.k, x.v, *unrotated, x.pos)
        if self.stream is None:
            on_host = AttnInput._make((*map(as_array, x[:5]), x.pos))
            return self.submit(lambda: take(on_host))
        self._ring.rotate(-1)
        buffer = self._ring[-1]
        copies = buffer.split(x[:5])
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            for to, t in zip(copies, x[:5], strict=True):
                t.record_stream(self.stream)
                to.copy_(t, non_blocking=True)
            copied = self.stream.record_event()
        arrays = AttnInput._make((*map(as_array, copies), x.pos))

        def read() -> Result:
            copied.synchronize()
            return take(arrays)

        reader = self.submit(read)
        buffer.read_by(reader)
        return reader


def rows_on_host(
    worker: HostWorker, k: torch.Tensor, v: torch.Tensor
) -> Callable[[], tuple[np.ndarray, np.ndarray]]:
    """Begins to copy rows of a prefill, (G, T, items), to the host.

    Returns a function that waits for them, and returns them as a KVStore has them. The rows stay in
    use until ``worker.wait``.
    """
    copies = rows_like(k), rows_like(v)

    def take(first: int, x: AttnInput) -> None:
        for to, rows in zip(copies, (x.k, x.v), strict=True):
            copy_items(to[:, first : first + rows.shape[1]], rows)

    def copy(first: int) -> Future[None]:
        at, none = slice(first, first + ROWS_A_COPY), k[:, :0]
        x = AttnInput(none, k[:, at], v[:, at], none, none, first)
        return worker.hand_over(x, partial(take, first))

    readers = [copy(first) for first in range(0, k.shape[1], ROWS_A_COPY)]

    def rows() -> tuple[np.ndarray, np.ndarray]:
        for reader in readers:
            reader.result()
        return copies

    return rows


class HostCache(LayerCache):
    """A cache of the host, ``cache``, in a decoder on the device.

    has_device_part: whether the device attends to some rows of each step (``attend_on_device``).
    """

    has_device_part: ClassVar[bool] = False
    reads_on_gpu = True

    def __init__(self, cache: LayerCache, worker: HostWorker) -> None:
        self.cache = cache
        super().__init__(cache.spec, cache.store, cache.ledger)
        self._worker = worker
        self._rows: DeviceStore | None = None  # K and V on the device, during a prefill
        self._next = 0  # position at which the next chunk of a prefill begins

    def extend(self, x: AttnInput) -> DeviceStore:
        """Returns the rows on the device. The cache takes its own while the device continues."""
        worker, device, n_new = self._worker, self._worker.device, x.q.shape[1]
        if x.pos != self._next:  # rows are left of a prefill that was interrupted
            self._rows = None
        self._next = x.pos + n_new
        rows = self._rows
        if rows is None and x.pos > 0:  # only the cache itself knows the earlier rows
            taken = worker.hand_over(x, self.cache.extend, self.cache.queries_read)
            worker.wait()
            store: KVStore = taken.result()
            rows, spec = self._new_rows(), self.spec
            past = (stored[:, :-n_new] for stored in (store.keys(), store.values()))
            k, v = (torch.from_numpy(stored).to(device) for stored in past)
            rows.append(k[..., : spec.head_dim], v[..., : spec.value_dim])
        else:
            rows = rows or self._new_rows()

            def take_in(on_host: AttnInput) -> None:
                self.cache.extend(on_host)

            worker.hand_over(x, take_in, self.cache.queries_read)
        self._rows = rows
        return rows.append(x.k, x.v)

    def _new_rows(self) -> DeviceStore:
        store = WindowStore if self.spec.kind == WINDOW else DeviceStore
        spec = replace(self.spec, cache_type_k="f16", cache_type_v="f16")  # not rounded yet
        return store(spec, self._worker.device)

    def attend(self, attend: ChunkAttention, x: AttnInput) -> torch.Tensor:
        """Returns the attention of a chunk that attends on the host, as calibrations need it."""
        attended = self._worker.hand_over(x, lambda on_host: attend(self.cache, on_host))
        self._worker.wait()
        return as_tensor(attended.result()).to(self._worker.device)

    def begin_step(self, n: int, n_max: int) -> CachePlan:
        """Starts a step (DeviceCache.begin_step). Most caches put nothing on the device."""
        return CachePlan(None, UNLIMITED)

    def finish_prefill(self) -> None:
        self._rows = None
        self._worker.submit(self.cache.finish_prefill)

    def rows_of(self, first: int, stop: int) -> Callable[[], tuple[np.ndarray, np.ndarray]]:
        made = self._worker.submit(lambda: self.cache.rows_of(first, stop))
        return lambda: made.result()()

    def decode(self, x: Any) -> np.ndarray:
        """See LayerCache.decode. x: an AttnInput on the host."""
        return self.cache.decode(x)

    @property
    def lse(self) -> np.ndarray:
        """f32 (H,): the log of the sum of exponentials of the scores that ``decode`` includes."""
        raise NotImplementedError

    def attend_on_device(self, q: torch.Tensor, others: Attended, out: torch.Tensor) -> None:
        """Launches the device's part for q f32 (1, H, d), and its merge with ``others``.

        out f32 (1, H, d_v) gets the attention to all rows.
        """
        raise NotImplementedError

    def most_rows(self, n: int) -> int:
        return 1  # no drafts

    def end_step(self, n: int) -> None:
        self.cache.end_step(n)

    # --- the cache does the rest ------------------------------------------------------------------

    @property
    def store(self) -> Any:
        return self.cache.store

    @store.setter
    def store(self, store: Any) -> None:
        self.cache.store = store

    @property
    def spared_bytes(self) -> int:
        return self.cache.spared_bytes

    def save_own(self) -> Any:
        return self.cache.save_own()

    def take_back_own(self, own: Any) -> None:
        self.cache.take_back_own(own)

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
