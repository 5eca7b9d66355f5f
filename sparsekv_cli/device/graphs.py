"""Runs a decode step in pieces: device work in CUDA graphs, and host work between them."""

import gc
import threading
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple
from weakref import ref

import torch

Call = Callable[[], None]
_CAPTURING = threading.Lock()  # a process can capture one graph at a time
MOST_GRAPHS = 8  # kept captures, of steps with different keys; each has its own results


class Piece(NamedTuple):
    """A piece of a step: launches only, or host work, which waits for all earlier launches."""

    call: Call
    on_host: bool
    beside: Call | None = None  # host work that runs at the same time as the launches


class Steps:
    """Runs steps. It captures the second step under a key, and later replays the capture.

    The first step under a key runs uncaptured, because it compiles kernels and sets libraries up. A
    device without graphs (Triton's interpreter) captures no step.
    """

    def __init__(self, device: torch.device) -> None:
        self._capture = device.type == "cuda"
        self._device = device
        # Weak references: the memory of a cache without users is free before the next step.
        self._owners: list[ref[object]] = []
        self._pool: Any = None
        self._seen: set[Hashable] = set()
        self._graphs: dict[Hashable, list[Piece]] = {}

    def run(
        self,
        owners: Sequence[object],
        key: Hashable,
        program: Callable[[], Sequence[Piece]],
        *,
        watched: bool = False,
    ) -> None:
        """Runs ``program`` or its capture. Drops captures of other owners' buffers.

        owners: the caches whose buffers the program uses. watched: whether pieces of this step do
        more than launch, so that ``program`` runs uncaptured. A capture keeps the objects alive
        that its host pieces refer to, but not the owners.
        """
        known = [owner() for owner in self._owners]
        if len(owners) != len(known) or any(a is not b for a, b in zip(owners, known, strict=True)):
            self._owners, self._graphs, self._seen = [ref(owner) for owner in owners], {}, set()
        pieces: Sequence[Piece]
        if watched or not self._capture or key not in self._seen:
            self._seen.add(key)
            pieces = program()
        elif key in self._graphs:
            pieces = self._graphs[key]
        else:
            if len(self._graphs) == MOST_GRAPHS:
                del self._graphs[next(iter(self._graphs))]
            if not self._graphs:  # nothing may be captured into a pool that no graph uses any more
                self._pool = torch.cuda.graph_pool_handle()
            with _CAPTURING, _no_garbage():
                pieces = self._graphs[key] = [self._captured(piece) for piece in program()]
        for piece in pieces:
            if piece.on_host:
                self._synchronize()
            piece.call()
            if piece.beside is not None:
                piece.beside()

    def _captured(self, piece: Piece) -> Piece:
        if piece.on_host:
            return piece
        graph = torch.cuda.CUDAGraph()
        # One pool for all: pieces run one after another, and nothing in it outlives its piece.
        # Other models run in other threads. Their work does not end this capture.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            piece.call()
        return Piece(graph.replay, False, piece.beside)

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()


@contextmanager
def _no_garbage() -> Iterator[None]:
    """Collects garbage once, and none within this block: freeing objects may break a capture."""
    was_enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def in_order(calls: Sequence[Callable[[], None]]) -> Callable[[], None]:
    """Returns one function that makes all ``calls``."""

    def run() -> None:
        for call in calls:
            call()

    return run
