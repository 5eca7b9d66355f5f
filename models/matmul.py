"""The matrix products of prefill: for few rows, and for many rows in bf16, f32 or integers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np

from sparsekv_cli.cpu.jit.pointers import on_lines
from sparsekv_cli.cpu.jit.threads import blas_threads
from sparsekv_cli.cpu.layer.choice import many_rows_kernels, matrix_table
from sparsekv_cli.cpu.layer.products import ROWS, multiply_groups
from sparsekv_cli.cpu.weights import dot
from sparsekv_cli.models.forward import Product
from sparsekv_cli.models.weights import (
    GatedWeights,
    LatentWeights,
    LayerWeights,
    Linear,
    StateWeights,
)


def stacks(layer: LayerWeights) -> Iterator[tuple[str, Sequence[Linear]]]:
    """Yields each product's name and its matrices. Matrices with the same input are stacked."""
    if isinstance(layer, StateWeights):
        yield "qkv", layer.wide
        if layer.gates:
            yield "gates", layer.gates
    else:
        yield "qkv", layer.inputs()
    if isinstance(layer, LatentWeights) and layer.heads.q is not None:
        yield "queries", (layer.heads.q,)
    yield "o", (layer.o,)
    if isinstance(layer.ffn, GatedWeights):
        yield "gate_up", layer.ffn.gate_up
        yield "down", (layer.ffn.down,)
    if layer.input is not None:
        names = ("input_projection", "input_gate", "input_output")
        yield from ((name, (w,)) for name, w in zip(names, layer.input.linears(), strict=True))


def no_experts(n_rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns rows and offsets (``StackProducts.of_experts``) of one expert that takes all rows."""
    return np.arange(n_rows), np.array([0, n_rows])


class FewRowsProducts:
    """Products of a few f32 rows with the quantised weights, by the kernels of decode.

    n_planes: bytes of an input element after rounding; 0: inputs are not rounded.
    """

    def __init__(self, n_threads: int, n_planes: int = 0) -> None:
        self._n_threads, self._n_planes = n_threads, n_planes

    def of_stack(self, name: str, parts: Sequence[Linear]) -> Product:
        """Returns the product of stacked matrices. The result joins their rows."""
        table = matrix_table(parts, self._n_planes)
        return lambda x: self._multiply(table, np.array([0, len(x)]), np.ascontiguousarray(x))

    def of_experts(
        self, name: str, parts: Sequence[Linear], rows: np.ndarray, offsets: np.ndarray
    ) -> Product:
        """See ``StackProducts``."""
        table = matrix_table(parts, self._n_planes, len(offsets) - 1)
        return lambda x: self._multiply(table, offsets, x[rows])

    def clear(self) -> None:
        """Does nothing: these products keep no memory."""

    def _multiply(self, table: np.ndarray, offsets: np.ndarray, x: np.ndarray) -> np.ndarray:
        out = np.empty((len(x), table[:, ROWS].sum()), np.float32)
        multiply_groups(table, offsets, x, out, self._n_threads)
        return out


class ManyRowsProducts:
    """Products of any number of rows, by the kernels that cpu/layer/choice.py chooses.

    All results of one name share their memory. A result is valid until the next result of its name
    or until ``clear``. New memory for each result would take a tenth of a prefill's time.
    """

    def __init__(self, n_threads: int, dtype: str = "f32", rows_dtype: str = "f32") -> None:
        """dtype: type of the products, f32, bf16 or int8. rows_dtype: of rows and results."""
        self._n_threads, self._types = n_threads, (dtype, rows_dtype)
        self._dtype: Any = np.uint16 if rows_dtype == "bf16" else np.float32
        self._results: dict[str, np.ndarray] = {}
        self._matrices: dict[str, np.ndarray] = {}  # one layer's dequantised matrices

    def clear(self) -> None:
        """Frees the memory that is kept between layers."""
        self._results, self._matrices = {}, {}

    def of_stack(self, name: str, parts: Sequence[Linear]) -> Product:
        """Returns the product of stacked matrices. The result joins their rows."""
        if self._kernels(parts) is None:
            return partial(self._multiply_dense, name, self._dequantized(name, parts))
        multiply = self._by_table(name, parts, 1)
        return lambda x: multiply(np.ascontiguousarray(x), *no_experts(len(x)))

    def of_experts(
        self, name: str, parts: Sequence[Linear], rows: np.ndarray, offsets: np.ndarray
    ) -> Product:
        """See ``StackProducts``."""
        if self._kernels(parts) is None:
            return partial(self._multiply_experts, name, parts, rows, offsets)
        multiply = self._by_table(name, parts, len(offsets) - 1)
        return lambda x: multiply(x, rows, offsets)

    def _kernels(self, parts: Sequence[Linear]) -> Any:
        return many_rows_kernels([part.code for part in parts], *self._types)

    def _by_table(self, name: str, parts: Sequence[Linear], n_experts: int) -> Any:
        """Returns the product of rows x[rows] with the experts that have the pairs ``offsets``."""
        kernels = self._kernels(parts)
        table = kernels.product_table([(part.code, part.data) for part in parts], n_experts)

        def multiply(x: np.ndarray, rows: np.ndarray, offsets: np.ndarray) -> np.ndarray:
            out = self._room(self._results, name, len(rows), table[:, ROWS].sum(), self._dtype)
            kernels.multiply(table, offsets, rows, x, out, self._n_threads)
            return out

        return multiply

    def _room(
        self, kept: dict[str, np.ndarray], name: str, n_rows: int, n_columns: int, dtype: Any
    ) -> np.ndarray:
        """Returns an uninitialised matrix in the memory ``kept[name]``, enlarged if necessary."""
        size = n_rows * n_columns
        if name not in kept or len(kept[name]) < size:
            kept[name] = on_lines(size, dtype)
        return kept[name][:size].reshape(n_rows, n_columns)

    def _dequantized(self, name: str, parts: Sequence[Linear]) -> np.ndarray:
        """Returns stacked matrices in f32."""
        n_rows, n_columns = sum(part.n_rows for part in parts), parts[0].n_columns
        matrix = self._room(self._matrices, name, n_rows, n_columns, np.float32)
        at = 0
        for part in parts:
            target = dot.address(matrix[at : at + part.n_rows])
            args = part.code, part.data, n_columns, target, matrix.strides[0], dot.TO_F32
            dot.dequantize_into(*args, self._n_threads)
            at += part.n_rows
        return matrix

    def _multiply_experts(
        self,
        name: str,
        parts: Sequence[Linear],
        rows: np.ndarray,
        offsets: np.ndarray,
        x: np.ndarray,
    ) -> np.ndarray:
        """Multiplies by one expert after another."""
        width = sum(part.n_rows // part.n_matrices for part in parts)
        out = np.empty((len(rows), width), np.float32)
        for e, (first, last) in enumerate(pairwise(offsets)):
            if first < last:
                matrix = self._dequantized(name, [part.matrix(e) for part in parts])
                out[first:last] = self._multiply_dense(name, matrix, x[rows[first:last]])
        return out

    def _multiply_dense(self, name: str, matrix: np.ndarray, rows: np.ndarray) -> np.ndarray:
        out = self._room(self._results, name, len(rows), len(matrix), np.float32)
        with blas_threads(self._n_threads):
            return np.matmul(np.ascontiguousarray(rows), matrix.T, out=out)
