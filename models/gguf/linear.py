"""Quantised matrices: views on the bytes of the file."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np


@dataclass(frozen=True)
class Linear:
    """The weights of y = W x + b, or of several such matrices of one shape."""

    code: int  # ggml's type number
    data: np.ndarray  # uint8 (rows, bytes per row)
    n_columns: int
    bias: np.ndarray | None = None  # f32 (rows,)
    # ``data`` has the layout of cpu/weights/interleaved.py, which only its dot products read
    repacked: bool = False
    # number of matrices in ``data``, one after another, such as the experts of a layer
    n_matrices: int = 1

    @property
    def n_rows(self) -> int:
        return self.data.shape[0]

    def matrix(self, i: int) -> Linear:
        """Returns matrix i as a view."""
        n = self.n_rows // self.n_matrices
        return replace(self, data=self.data[i * n : (i + 1) * n], n_matrices=1)


@dataclass(frozen=True)
class GatedWeights:
    """The weights of a feed-forward network: down(act(gate x) * up x), or down(act(up x))."""

    # gate and up, or one matrix with gate's rows first; up alone in a network without a gate
    gate_up: tuple[Linear, ...]
    down: Linear

    def linears(self) -> tuple[Linear, ...]:
        return (*self.gate_up, self.down)

    @property
    def n_bytes(self) -> int:
        return sum(linear.data.nbytes for linear in self.linears())

    def mapped(self, change: Callable[[Linear], Linear]) -> GatedWeights:
        return GatedWeights(tuple(map(change, self.gate_up)), change(self.down))
