"""The matrix products of prefill: for few rows, and for many rows in bf16, f32 or integers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np

from sparsekv_cli.cpu.jit.pointers import on_lines
from sparsekv_cli.cpu.jit.threads import blas_threads
from sparsekv_cli.cpu.layer import matmul_bf16, matmul_int8
from sparsekv_cli.cpu.layer.products import ROWS, matrix_table, multiply_groups
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


def room(
    kept: dict[str, np.ndarray], name: str, n_rows: int, n_columns: int, dtype: Any
) -> np.ndarray:
    """Returns an uninitialised matrix in the memory ``kept[name]``, enlarged if necessary."""
    size = n_rows * n_columns
    if name not in kept or len(kept[name]) < size:
        kept[name] = on_lines(size, dtype)
    return kept[name][:size].reshape(n_rows, n_columns)


class ManyRowsProducts(ABC):
    """Products of any number of rows.

    All results of one name share their memory. A result is valid until the next result of its name
    or until ``clear``. New memory for each result would take a tenth of a prefill's time.
    """

    dtype: Any  # type of rows and results

    def __init__(self, n_threads: int) -> None:
        self.n_threads = n_threads
        self._results: dict[str, np.ndarray] = {}

    def clear(self) -> None:
        """Frees the memory that is kept between layers."""
        self._results = {}

    @abstractmethod
    def of_stack(self, name: str, parts: Sequence[Linear]) -> Product:
        """Returns the product of stacked matrices. The result joins their rows."""

    @abstractmethod
    def of_experts(
        self, name: str, parts: Sequence[Linear], rows: np.ndarray, offsets: np.ndarray
    ) -> Product:
        """See ``StackProducts``."""

    def _room(self, name: str, n_rows: int, n_columns: int) -> np.ndarray:
        """Returns the memory for the result of this name."""
        return room(self._results, name, n_rows, n_columns, self.dtype)


class TableProducts(ManyRowsProducts):
    """Products by kernels that read a table of matrices and dequantise panels of weights."""

    kernels: Any  # the module with ``product_table`` and ``multiply``

    def _table(self, parts: Sequence[Linear], n_experts: int) -> np.ndarray:
        return self.kernels.product_table([(part.code, part.data) for part in parts], n_experts)

    def of_stack(self, name: str, parts: Sequence[Linear]) -> Product:
        table = self._table(parts, 1)

        def multiply(x: np.ndarray) -> np.ndarray:
            rows, offsets = no_experts(len(x))
            return self._multiply(name, table, rows, offsets, np.ascontiguousarray(x))

        return multiply

    def of_experts(
        self, name: str, parts: Sequence[Linear], rows: np.ndarray, offsets: np.ndarray
    ) -> Product:
        table = self._table(parts, len(offsets) - 1)
        return partial(self._multiply, name, table, rows, offsets)

    def _multiply(
        self, name: str, table: np.ndarray, rows: np.ndarray, offsets: np.ndarray, x: np.ndarray
    ) -> np.ndarray:
        out = self._room(name, len(rows), table[:, ROWS].sum())
        self.kernels.multiply(table, offsets, rows, x, out, self.n_threads)
        return out


class BF16Products(TableProducts):
    """Products of bf16 rows by cpu/layer/matmul_bf16.py."""

    dtype = np.uint16
    kernels = matmul_bf16


class F32Products(ManyRowsProducts):
    """Products of f32 rows by numpy's BLAS. ``of_stack`` dequantises the matrices."""

    dtype = np.float32

    def __init__(self, n_threads: int) -> None:
        super().__init__(n_threads)
        self._matrices: dict[str, np.ndarray] = {}  # one layer's dequantised matrices

    def clear(self) -> None:
        super().clear()
        self._matrices = {}

    def of_stack(self, name: str, parts: Sequence[Linear]) -> Product:
        n_rows, n_columns = sum(part.n_rows for part in parts), parts[0].n_columns
        matrix = room(self._matrices, name, n_rows, n_columns, np.float32)
        at = 0
        for part in parts:
            target = matrix[at : at + part.n_rows]
            dot.dequantize_into(
                part.code, part.data, n_columns, dot.address(target), matrix.strides[0],
                dot.TO_F32, self.n_threads,
            )  # fmt: skip
            at += part.n_rows
        return partial(self._multiply_dense, name, matrix)

    def of_experts(
        self, name: str, parts: Sequence[Linear], rows: np.ndarray, offsets: np.ndarray
    ) -> Product:
        return partial(self._multiply_experts, name, parts, rows, offsets)

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
                product = self.of_stack(name, [part.matrix(e) for part in parts])
                out[first:last] = product(x[rows[first:last]])
        return out

    def _multiply_dense(self, name: str, matrix: np.ndarray, rows: np.ndarray) -> np.ndarray:
        out = self._room(name, len(rows), len(matrix))
        with blas_threads(self.n_threads):
            return np.matmul(np.ascontiguousarray(rows), matrix.T, out=out)


class IntegerProducts(TableProducts):
    """Products by cpu/layer/matmul_int8.py, with rows of the type of ``others``.

    others: the products for formats that cpu/layer/matmul_int8.py lacks.
    """

    kernels = matmul_int8

    def __init__(self, others: ManyRowsProducts) -> None:
        super().__init__(others.n_threads)
        self.dtype, self._others = others.dtype, others

    def clear(self) -> None:
        super().clear()
        self._others.clear()

    def of_stack(self, name: str, parts: Sequence[Linear]) -> Product:
        if not all(matmul_int8.can_multiply(part.code) for part in parts):
            return self._others.of_stack(name, parts)
        return super().of_stack(name, parts)

    def of_experts(
        self, name: str, parts: Sequence[Linear], rows: np.ndarray, offsets: np.ndarray
    ) -> Product:
        if not all(matmul_int8.can_multiply(part.code) for part in parts):
            return self._others.of_experts(name, parts, rows, offsets)
        return super().of_experts(name, parts, rows, offsets)
