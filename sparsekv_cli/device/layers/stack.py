"""Matrices in device memory that share an input."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.nn.functional import linear

from sparsekv_cli.device.layers.rows import DeviceRows
from sparsekv_cli.kernels.weights import dequantize, dot
from sparsekv_cli.kernels.weights.packed import PackedMatrix


class Stack:
    """Matrices that share an input, stacked by rows: y = W x.

    parts: one bf16 matrix, or the quantised ones.
    """

    def __init__(self, parts: Sequence[PackedMatrix]) -> None:
        self.parts = tuple(parts)
        self.n_rows = sum(part.n_rows for part in parts)
        self.n_columns = parts[0].n_columns
        self._launches = _in_pairs(self.parts)

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)

    def apply(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Returns W x, f32 (B, rows), of x f32 (B, columns). It is written to ``out``, if given."""
        if out is None:
            out = torch.empty(len(x), self.n_rows, dtype=torch.float32, device=x.device)
        at = 0
        for parts in self._launches:
            end = at + sum(part.n_rows for part in parts)
            for start in range(0, len(x), dot.MAX_BATCH):
                some = slice(start, start + dot.MAX_BATCH)
                if len(parts) == 1:
                    dot.multiply(parts[0], x[some], out[some, at:end])
                else:
                    dot.multiply_pair(parts[0], parts[1], x[some], out[some, at:end])
            at = end
        return out

    def dense(self, dtype: torch.dtype) -> torch.Tensor:
        """Returns W (rows, columns) in ``dtype``, without a copy if it is stored in that type."""
        if len(self.parts) == 1 and self.parts[0].low.dtype == dtype:
            return self.parts[0].low
        device = self.parts[0].low.device
        out = torch.empty(self.n_rows, self.n_columns, dtype=dtype, device=device)
        at = 0
        for part in self.parts:
            dequantize.dequantize(part, dtype, out[at : at + part.n_rows])
            at += part.n_rows
        return out

    def product(self, dtype: torch.dtype) -> Callable[[Any], Any]:
        """Returns the product W x of a prefill, of rows and W in ``dtype``."""
        return partial(linear, weight=self.dense(dtype))


def _in_pairs(parts: Sequence[PackedMatrix]) -> list[Sequence[PackedMatrix]]:
    """Returns the parts in their order, two neighbours together if one launch can take both."""
    found: list[Sequence[PackedMatrix]] = []
    for part in parts:
        if found and len(found[-1]) == 1 and dot.can_pair(found[-1][0], part):
            found[-1] = [*found[-1], part]
        else:
            found.append([part])
    return found


@dataclass(frozen=True)
class GatedStacks:
    """The matrices of a feed-forward: gate and up, or up alone, and down."""

    gate_up: Stack
    down: Stack

    @property
    def nbytes(self) -> int:
        return self.gate_up.nbytes + self.down.nbytes

    def step(
        self, _x: torch.Tensor, normed: torch.Tensor, rows: DeviceRows, out: torch.Tensor
    ) -> None:
        """Writes the output for rows x to ``out``. normed: their norm; all f32 (B, n_embd)."""
        self.down.apply(rows.gate(self.gate_up.apply(normed)), out)

    def dense(self, dtype: torch.dtype) -> dict[str, Any]:
        """Returns the products of a prefill."""
        return {"gate_up": self.gate_up.product(dtype), "down": self.down.product(dtype)}
