"""A CUDA device that is not there: its memory lies on the host, Triton interprets its kernels.

Tensors on ``torch.device("cuda")`` are made of host memory and say that they are on cuda:0. Streams
and events order what is recorded of every launch, copy and piece of host work (stream_order.py); it
is executed at once, in the order of the program. A graph capture executes nothing: it keeps the
launches and copies, and each replay executes them. What a capture must not do is refused there.
Memory that nobody has written holds NaN and large integers, and so does memory that was given back.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import fake_cuda_graphs as graphs
import numpy as np
import pytest
import torch
from fake_cuda_modes import Kernels, Operators, Placement, plain
from memory_ranges import EMPTY, Ranges
from stream_order import Lane, Race, StreamOrder
from torch.utils._python_dispatch import _disable_current_modes

DEVICE, HOST = torch.device("cuda", 0), torch.device("cpu")
ALIGNMENT = 512  # bytes, as CUDA's
LARGE = 0x7F7F7F7F  # no index, count or size


class Block:
    """An allocation. place: device or pinned; pool: of a graph, if it was made in a capture.

    lane: in whose order its memory may be used again once it is given back. torch_knows: whether
    torch notes the streams that copy pinned memory, and waits for them before it is used again.
    """

    def __init__(self, memory: np.ndarray, place: str, lane: Lane, pool: object) -> None:
        self.memory, self.place, self.lane, self.pool = memory, place, lane, pool
        self.users: list[Lane] = []  # lanes that its giving back waits for (record_stream)
        self.is_free = False
        self.torch_knows = True

    def used_by(self, lane: Lane) -> None:
        self.users.append(lane)

    @property
    def ranges(self) -> Ranges:
        return Ranges.of(np.array([self.memory.ctypes.data]), np.array([self.memory.nbytes]))


class FakeCuda:
    """The device, its streams and what was done. Use it as a context, in one test at a time."""

    def __init__(self, *, poison: bool = True) -> None:
        self.order = StreamOrder()
        self.poison = poison
        self.default = graphs.Stream(self, "stream")
        self.threads = {threading.get_ident(): Lane("host")}
        self.capturing: graphs.Graph | None = None
        self.found: list[Race] = []  # where memory was given back too early
        self.launches: list[Any] = []  # of kernels: see fake_cuda_modes.py launch_key
        self.pools: dict[object, graphs.Pool] = {}
        self.placing: str | None = None  # where what is made now lies, if not beside its inputs
        self.sees_tensors = True
        self._blocks: dict[int, Block] = {}  # by the number of a storage
        self._memory: list[np.ndarray] = []  # all there ever was: no address is used twice
        self._current = [self.default]
        self._stack = ExitStack()

    # --- memory -----------------------------------------------------------------------------------

    def new(self, like: torch.Tensor, place: str, *, filled: bool) -> torch.Tensor:
        """A tensor of the same type, shape and strides in memory of its own.

        filled: with the same elements; otherwise with poison.
        """
        if self.capturing and place == "pinned":
            self.refuse("pinning memory of the host")
        n_bytes = max(like.untyped_storage().nbytes(), 1)
        memory = np.zeros(n_bytes + ALIGNMENT, np.uint8)
        memory = memory[-memory.ctypes.data % ALIGNMENT :][:n_bytes]
        self._memory.append(memory)
        pool = self.capturing.pool if self.capturing and place == "device" else None
        block = Block(memory, place, self.stream if place == "device" else self.thread, pool)
        if pool is not None:
            self.pools[pool].blocks.append(block)
        handle = memory[:]
        weakref.finalize(handle, self._give_back, block)
        tensor = self.tensor_on(block, like, handle)
        if filled:
            tensor.copy_(like)
        elif self.poison:
            poison(tensor)
        return tensor

    def locked(self, shape: tuple[int, ...], _: Any = None) -> torch.Tensor:
        """As kernels/pinned.py zeros_on_host: f16, in memory of the host that torch did not pin."""
        with plain():
            tensor = self.new(torch.zeros(shape, dtype=torch.float16), "pinned", filled=True)
        self._blocks[tensor.untyped_storage()._cdata].torch_knows = False
        return tensor

    def tensor_on(
        self,
        block: Block,
        like: torch.Tensor,
        memory: np.ndarray | None = None,
        offset: int | None = None,
    ) -> torch.Tensor:
        """A tensor as ``like`` in the memory of a block. memory: what keeps the block."""
        handle = block.memory[:] if memory is None else memory
        storage = torch.from_numpy(handle).untyped_storage()
        weakref.finalize(handle, self._blocks.pop, storage._cdata, None)
        tensor = torch.empty(0, dtype=like.dtype)
        offset = like.storage_offset() if offset is None else offset
        tensor.set_(storage, offset, like.shape, like.stride())
        self._blocks[storage._cdata] = block
        return tensor

    def block(self, x: torch.Tensor) -> Block | None:
        """The allocation of a tensor; None: pageable memory of the host."""
        return self._blocks.get(x.untyped_storage()._cdata)

    def place(self, x: torch.Tensor) -> str:
        block = self.block(x)
        return block.place if block else "pageable"

    def _give_back(self, block: Block) -> None:
        block.is_free = True
        if block.pool is None:
            self.check_free(block, block.lane)
        elif self.capturing is not None:
            self.capturing.give_back(block)

    def check_free(self, block: Block, behind: Lane) -> None:
        """The memory may be used again, by what the lane ``behind`` does from here on."""
        lane = Lane("memory's next use", dict(behind.clock))
        # No thread refers to it any more: what they did with memory of the host is done.
        threads = self.threads.values() if block.place == "pinned" else [self.thread]
        for each in (*threads, *block.users):
            lane.after(each.clock)
        name = f"giving back {block.memory.nbytes} bytes"
        try:
            self.order.check(name, lane, EMPTY, block.ranges)
        except Race as race:  # a finaliser cannot raise
            self.found.append(race)

    # --- lanes ------------------------------------------------------------------------------------

    @property
    def thread(self) -> Lane:
        n = len(self.threads)
        return self.threads.setdefault(threading.get_ident(), Lane(f"thread {n}"))

    @property
    def stream(self) -> Lane:
        return self._current[-1]

    def wait_for(self, lane: Lane, what: str) -> None:
        """The host waits for a stream."""
        if self.capturing:
            self.refuse(what)
        self.thread.after(lane.clock)

    def wait_for_all(self) -> None:
        """The host waits for the device."""
        if self.capturing:
            self.refuse("the host waits for the device")
        for operation in self.order.operations:
            if operation.lane not in self.threads.values():
                self.thread.after(operation.lane.clock)

    def refuse(self, what: str) -> None:
        raise graphs.CaptureError(f"{what} in a capture")

    def launch(self, name: str, run: Callable[[], Any], reads: Any, writes: Any) -> None:
        """Work of the current stream. run: executes it, and may return its accesses."""
        if self.capturing:
            self.capturing.add(name, self.stream, run, reads, writes)
            return
        lane = self.stream
        lane.after(self.thread.clock)
        found = run()
        if found is not None:
            reads, writes = found
        self.order.record(name, lane, reads, writes)

    def host_work(self, name: str, reads: Ranges = EMPTY, writes: Ranges = EMPTY) -> None:
        """Declares what the current thread does with memory that streams use too."""
        if self.capturing:
            self.refuse(name)
        self.order.record(name, self.thread, reads, writes)

    @contextmanager
    def on(self, lane: Lane) -> Iterator[None]:
        self._current.append(lane)
        try:
            yield
        finally:
            self._current.pop()

    # --- torch ------------------------------------------------------------------------------------

    def __enter__(self) -> FakeCuda:
        patch = self._stack.enter_context(pytest.MonkeyPatch.context())
        for name, value in graphs.cuda_functions(self).items():
            patch.setattr(torch.cuda, name, value)
        patch.setattr(torch.Tensor, "record_stream", lambda x, lane: self.block(x).used_by(lane))
        for target, name, value in graphs.thread_functions(self):
            patch.setattr(target, name, value)
        self._stack.enter_context(Kernels(self))
        self._stack.enter_context(Operators(self))
        self._stack.enter_context(Placement(self))
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()


def poison(x: torch.Tensor) -> None:
    """Fills a tensor with what shows if it is read."""
    if x.numel():
        if x.dtype.is_floating_point:
            x.fill_(torch.nan)
        elif x.dtype == torch.bool:
            x.fill_(True)
        else:
            x.fill_(LARGE & torch.iinfo(x.dtype).max)


def as_one(cuda: FakeCuda, name: str, call: Callable[..., torch.Tensor]) -> Callable[..., Any]:
    """``call``, a function of tensors on the device, as one launch that reads them all."""

    def launched(*args: Any) -> torch.Tensor:
        with _disable_current_modes():  # and subclasses of tensors are what they are
            cuda.sees_tensors = False
            out = call(*args)
            cuda.sees_tensors = True
        with plain():
            out = cuda.new(out, "device", filled=True)
            tensors = [x for x in args if isinstance(x, torch.Tensor)]
            reads = Ranges.union(Ranges.of_tensor(x) for x in tensors)
            cuda.launch(name, lambda: None, reads, Ranges.of_tensor(out))
        return out

    return launched
