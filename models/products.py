"""The matrix products of a prefilled layer: of dequantised weights by torch, or in integers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import numpy as np
import torch
from torch.nn.functional import linear

from sparsekv_cli.cpu import matvec, prefill_products
from sparsekv_cli.models.forward import Product
from sparsekv_cli.models.weights import LayerWeights, Linear


def stacks(layer: LayerWeights) -> Iterator[tuple[str, Sequence[Linear]]]:
    """The matrices of a layer, those of one input together."""
    yield "qkv", (layer.q, layer.k, layer.v)
    yield "o", (layer.o,)
    yield "gate_up", (layer.gate, layer.up)
    yield "down", (layer.down,)


class Products:
    """Products by torch. Each matrix is dequantised to ``dtype``, f32 or bf16, into a scratch of
    one layer's size.
    """

    def __init__(self, dtype: torch.dtype, n_threads: int) -> None:
        self._dtype, self._n_threads = dtype, n_threads
        self._scratch: dict[str, torch.Tensor] = {}

    def of_layer(self, layer: LayerWeights) -> dict[str, Product]:
        """Products by the names of ``stacks``, until the next call."""
        return {name: self.of_stack(name, parts) for name, parts in stacks(layer)}

    def of_stack(self, name: str, parts: Sequence[Linear]) -> Product:
        """The product of matrices of one input, their rows one after another."""
        target = matvec.TO_BF16 if self._dtype == torch.bfloat16 else matvec.TO_F32
        n_columns = parts[0].n_columns
        stack = self._room(name, sum(part.n_rows for part in parts), n_columns)
        row_bytes = n_columns * stack.element_size()
        at = stack.data_ptr()
        for part in parts:
            matvec.dequantize_into(
                part.code, part.data, n_columns, at, row_bytes, target, self._n_threads
            )
            at += part.n_rows * row_bytes
        return partial(linear, weight=stack)

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


class IntegerProducts(Products):
    """cpu/prefill_products.py on the weights as they lie; formats that it does not know by torch.

    All results of one name have the same memory, which holds one until the next, or ``clear``: to
    get it anew from the system takes a tenth of a prefill.
    """

    def __init__(self, n_threads: int) -> None:
        super().__init__(torch.float32, n_threads)
        self._results: dict[str, torch.Tensor] = {}

    def of_stack(self, name: str, parts: Sequence[Linear]) -> Product:
        if not all(prefill_products.can_multiply(part.code) for part in parts):
            return super().of_stack(name, parts)
        table = prefill_products.product_table([(part.code, part.data) for part in parts])
        return partial(self._multiply, name, table)

    def clear(self) -> None:
        super().clear()
        self._results = {}

    def _multiply(self, name: str, table: np.ndarray, rows: torch.Tensor) -> torch.Tensor:
        shape = (len(rows), prefill_products.n_rows(table))
        size = shape[0] * shape[1]
        if name not in self._results or self._results[name].numel() < size:
            self._results[name] = torch.empty(size)
        out = self._results[name][:size].view(shape)
        prefill_products.multiply(table, rows.contiguous().numpy(), out.numpy(), self._n_threads)
        return out
