"""The matrix products of a prefilled layer by torch, of weights dequantised as they are needed."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.nn.functional import linear

from sparsekv_cli.cpu.jit.floats import as_tensor, seen
from sparsekv_cli.cpu.weights import dot
from sparsekv_cli.models.forward import Product
from sparsekv_cli.models.matmul import stacks
from sparsekv_cli.models.weights import LayerWeights, Linear


class TorchProducts:
    """Each matrix is dequantised to ``dtype``, f32 or bf16, into a scratch of one layer's size."""

    def __init__(self, dtype: torch.dtype, n_threads: int) -> None:
        self._dtype, self._n_threads = dtype, n_threads
        self._scratch: dict[str, torch.Tensor] = {}

    def of_layer(self, layer: LayerWeights) -> dict[str, Product]:
        """Products by the names of ``stacks``, until the next call."""
        return {name: self.of_stack(name, parts) for name, parts in stacks(layer)}

    def of_stack(self, name: str, parts: Sequence[Linear]) -> Product:
        """The product of matrices of one input, their rows one after another."""
        target = dot.TO_BF16 if self._dtype == torch.bfloat16 else dot.TO_F32
        n_columns = parts[0].n_columns
        stack = self._room(name, sum(part.n_rows for part in parts), n_columns)
        row_bytes = n_columns * stack.element_size()
        at = stack.data_ptr()
        for part in parts:
            dot.dequantize_into(
                part.code, part.data, n_columns, at, row_bytes, target, self._n_threads
            )
            at += part.n_rows * row_bytes
        return partial(self._multiply, stack)

    def _multiply(self, stack: torch.Tensor, rows: Any) -> Any:
        """Arrays of arrays, tensors of tensors."""
        out = linear(as_tensor(rows), stack)
        return seen(out) if isinstance(rows, np.ndarray) else out

    def clear(self) -> None:
        """Frees what is kept between two layers."""
        self._scratch = {}

    def _room(self, name: str, n_rows: int, n_columns: int) -> torch.Tensor:
        """An uninitialised matrix in the scratch, which all layers use: fresh memory costs more to
        get from the system than dequantising takes.
        """
        size = n_rows * n_columns
        if name not in self._scratch or self._scratch[name].numel() < size:
            self._scratch[name] = torch.empty(size, dtype=self._dtype)
        return self._scratch[name][:size].view(n_rows, n_columns)
