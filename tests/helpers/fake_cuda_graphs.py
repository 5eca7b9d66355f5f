"""Streams, events, graphs and threads of fake_cuda.py."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from stream_order import Clock, Lane


class CaptureError(AssertionError):
    """A capture does what CUDA or torch refuse in it."""


class Stream(Lane):
    def __init__(self, cuda: Any, name: str) -> None:
        super().__init__(name)
        self.cuda, self.device, self.cuda_stream = cuda, torch.device("cuda", 0), id(self)

    def wait_stream(self, other: Lane) -> None:
        self.wait_event(Event(self.cuda).record_on(other))

    def wait_event(self, event: Event) -> None:
        graph = self.cuda.capturing
        if graph is None:
            if event.graph is not None:
                raise CaptureError("a stream waits for an event of a capture")
            self.after(event.clock)
        else:
            graph.wait(self, event)

    def record_event(self, event: Event | None = None) -> Event:
        return (event or Event(self.cuda)).record_on(self)

    def synchronize(self) -> None:
        self.cuda.wait_for(self, "the host waits for a stream")

    def query(self) -> bool:
        return False


class Event:
    def __init__(self, cuda: Any, *_: Any, **__: Any) -> None:
        self.cuda = cuda
        self.clock: Clock = {}
        self.graph: Graph | None = None
        self.lane: Lane | None = None
        self.key: object = None  # in a graph

    def record_on(self, lane: Lane) -> Event:
        graph = self.cuda.capturing
        if graph is not None and lane in graph.lanes:
            self.graph, self.lane = graph, lane
            graph.record(lane, self)
        else:
            lane.after(self.cuda.thread.clock)
            self.graph, self.lane, self.clock = None, lane, dict(lane.clock)
        return self

    def record(self, stream: Any = None) -> None:
        self.record_on(stream or self.cuda.stream)

    def wait(self, stream: Any = None) -> None:
        (stream or self.cuda.stream).wait_event(self)

    def synchronize(self) -> None:
        if self.cuda.capturing:
            self.cuda.refuse("the host waits for an event")
        self.cuda.thread.after(self.clock)

    def query(self) -> bool:
        return False

    def elapsed_time(self, _: Event) -> float:
        return 0.0


class Pool:
    """Memory of graphs. uses: how many of them there are."""

    def __init__(self) -> None:
        self.uses, self.blocks = 0, []  # type: int, list[Any]


class Graph:
    """What one capture kept. A replay runs it on lanes of its own beside the current stream."""

    def __init__(self, cuda: Any) -> None:
        self.cuda = cuda
        self.pool: object = None
        self.lanes: list[Lane] = []  # those that are captured; the first one began the capture
        self._unjoined: set[int] = set()
        self._steps: list[Callable[[dict[int, Lane], dict[Any, Clock]], None]] = []

    def begin(self, pool: object, lane: Lane) -> None:
        cuda = self.cuda
        if cuda.capturing is not None:
            raise CaptureError("a capture within a capture")
        self.pool = pool or object()
        known = cuda.pools.setdefault(self.pool, Pool())
        # torch's create_or_incref_pool, behind the empty_cache of torch.cuda.graph.
        if known.uses == 0 and any(not block.is_free for block in known.blocks):
            raise CaptureError("use_count > 0: the pool has no graph, but a tensor in it lives")
        known.uses += 1
        cuda.capturing, self.lanes = self, [lane]

    def end(self) -> None:
        self.cuda.capturing = None
        if self._unjoined:
            raise CaptureError("a capture ends ahead of the join of a stream that it forked")

    def __del__(self) -> None:
        if self.pool is not None:
            self.cuda.pools[self.pool].uses -= 1

    def add(self, name: str, lane: Lane, run: Any, reads: Any, writes: Any) -> None:
        if lane not in self.lanes:
            raise CaptureError(f"{name}: a launch on a stream that is not captured")
        if lane is not self.lanes[0]:
            self._unjoined.add(id(lane))
        cuda = self.cuda

        def step(lanes: dict[int, Lane], _: Any) -> None:
            with cuda.on(lanes[id(lane)]):
                cuda.launch(name, run, reads, writes)

        self._steps.append(step)

    def record(self, lane: Lane, event: Event) -> None:
        key = event.key = object()

        def step(lanes: dict[int, Lane], clocks: dict[Any, Clock]) -> None:
            clocks[key] = dict(lanes[id(lane)].clock)

        self._steps.append(step)

    def wait(self, lane: Lane, event: Event) -> None:
        if event.graph is not self:
            raise CaptureError("a captured stream waits for an event from outside the capture")
        if lane not in self.lanes:
            self.lanes.append(lane)
        if event.lane is not None:
            self._unjoined.discard(id(event.lane))
        key = event.key

        def step(lanes: dict[int, Lane], clocks: dict[Any, Clock]) -> None:
            lanes[id(lane)].after(clocks[key])

        self._steps.append(step)

    def give_back(self, block: Any) -> None:
        """From here on what else the capture makes in the block's lane may lie in its memory.

        torch keeps what ``record_stream`` was called for to the end of the capture.
        """
        lane = block.lane
        if lane not in self.lanes or block.users:
            return

        def step(lanes: dict[int, Lane], _: Any) -> None:
            self.cuda.check_free(block, lanes[id(lane)])

        self._steps.append(step)

    def replay(self) -> None:
        cuda = self.cuda
        if cuda.capturing:
            cuda.refuse("a replay")
        main = cuda.stream
        lanes = {id(lane): Lane(lane.name) for lane in self.lanes}
        lanes[id(self.lanes[0])] = main
        clocks: dict[Any, Clock] = {}
        for step in self._steps:
            step(lanes, clocks)
        for lane in lanes.values():
            main.after(lane.clock)
        if cuda.poison:  # other graphs use the same memory
            for block in cuda.pools[self.pool].blocks:
                block.memory[:] = 0xFF


def cuda_functions(cuda: Any) -> dict[str, Any]:
    """What takes the place of functions of torch.cuda."""
    numbers = iter(range(1, 1000))

    @contextmanager
    def on_stream(stream: Any) -> Iterator[None]:
        with cuda.on(stream) if stream is not None else contextlib.nullcontext():
            yield

    @contextmanager
    def capture(graph: Graph, pool: object = None, **_: Any) -> Iterator[None]:
        cuda.wait_for(cuda.stream, "")
        lane = Stream(cuda, "stream")
        graph.begin(pool, lane)
        try:
            with cuda.on(lane):
                yield
        except BaseException:
            cuda.capturing = None
            raise
        graph.end()

    return {
        "Stream": lambda *_, **__: Stream(cuda, f"side stream {next(numbers)}"),
        "Event": partial(Event, cuda),
        "CUDAGraph": partial(Graph, cuda),
        "graph": capture,
        "graph_pool_handle": object,
        "current_stream": lambda *_: cuda.stream,
        "stream": on_stream,
        "synchronize": lambda *_: cuda.wait_for_all(),
        "empty_cache": lambda: None,
        "is_current_stream_capturing": lambda: cuda.capturing is not None,
        "mem_get_info": lambda *_: (1 << 40, 1 << 40),
    }


def thread_functions(cuda: Any) -> Iterator[tuple[Any, str, Any]]:
    """What takes the place of methods that order threads: a task comes behind its submission, and
    who asks for its result comes behind the task.
    """
    submit, result, exception = ThreadPoolExecutor.submit, Future.result, Future.exception

    def submit_ordered(pool: Any, call: Any, *args: Any, **kwargs: Any) -> Any:
        begin, end = dict(cuda.thread.clock), {}

        def task() -> Any:
            cuda.thread.after(begin)
            try:
                return call(*args, **kwargs)
            finally:
                end.update(cuda.thread.clock)

        future: Any = submit(pool, task)
        future.clock_at_end = end
        return future

    def ordered(ask: Any, future: Any, timeout: Any = None) -> Any:
        try:
            return ask(future, timeout)
        finally:
            cuda.thread.after(getattr(future, "clock_at_end", {}))

    yield ThreadPoolExecutor, "submit", submit_ordered
    yield Future, "result", lambda future, timeout=None: ordered(result, future, timeout)
    yield Future, "exception", lambda future, timeout=None: ordered(exception, future, timeout)
