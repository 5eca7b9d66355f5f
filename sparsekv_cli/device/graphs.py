"""A decode step as pieces of device work, captured in CUDA graphs, with host work between them."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple

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
        self._owner: object = None
        self._seen: set[Hashable] = set()
        self._graphs: dict[Hashable, list[Piece]] = {}

    def run(self, owner: object, key: Hashable, program: Callable[[], Sequence[Piece]]) -> None:
        """Runs ``program`` or its capture. owner: whose buffers they use; another one's are let go."""
        if owner is not self._owner:
            self._owner, self._graphs, self._seen = owner, {}, set()
        pieces: Sequence[Piece]
        if not self._capture or key not in self._seen:
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
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            piece.call()
        return Piece(graph.replay, False)

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()
