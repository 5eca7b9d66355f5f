"""A decode step as pieces of device work, captured in CUDA graphs, with host work between them."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple
from weakref import ref

import torch

Call = Callable[[], None]
MOST_GRAPHS = 8  # steps of different keys that are kept; each holds its own intermediate results


class Piece(NamedTuple):
    """Work in order: on the host, after all that was launched before is done, or launches only."""

    call: Call
    on_host: bool


class Steps:
    """Runs steps; one whose key was seen before is captured, and replayed from then on.

    The first step under a key runs as it is: kernels are compiled then, and libraries set up. On a
    device without graphs (the interpreter's) every step does.
    """

    def __init__(self, device: torch.device, *, capture: bool = True) -> None:
        self._capture = capture and device.type == "cuda"
        self._device = device
        # Not kept alive: a cache that is let go of frees its memory before the next step.
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
        """Runs ``program`` or its capture. owners: whose buffers it uses; captures of others go.

        watched: whether pieces do more this time than launch, so that ``program`` runs as it is.
        What a piece on the host holds is kept while its capture is: not the owners.
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
            pieces = self._graphs[key] = [self._captured(piece) for piece in program()]
        for piece in pieces:
            if piece.on_host:
                self._synchronize()
            piece.call()

    def _captured(self, piece: Piece) -> Piece:
        if piece.on_host:
            return piece
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        # One pool for all: pieces run one after another, and nothing in it outlives its piece.
        with torch.cuda.graph(graph, pool=self._pool):
            piece.call()
        return Piece(graph.replay, False)

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()
