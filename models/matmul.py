"""The matrix products of a prefilled layer: for few rows, and for many in bf16, f32 or integers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np

from sparsekv_cli.cpu.jit.pointers import on_lines
from sparsekv_cli.cpu.jit.threads import blas_threads
from sparsekv_cli.cpu.layer import matmul_bf16, matmul_int8
from sparsekv_cli.cpu.weights import dot
from sparsekv_cli.models.forward import Product
from sparsekv_cli.models.weights import GatedWeights, LayerWeights, Linear, Weights


def stacks(layer: LayerWeights) -> Iterator[tuple[str, Sequence[Linear]]]:
    """The matrices of a layer by the name of their product, stacked if they share an input."""
    yield "qkv", (layer.q, layer.k, layer.v)
    yield "o", (layer.o,)
    if isinstance(layer.ffn, GatedWeights):
        yield "gate_up", (layer.ffn.gate, layer.ffn.up)
        yield "down", (layer.ffn.down,)


def can_multiply(weights: Weights) -> bool:
    """Whether ``IntegerProducts`` knows the formats of all layers."""
    linears = (linear for layer in weights.layers for linear in layer.linears())
    return all(matmul_int8.can_multiply(linear.code) for linear in linears)


class FewRowsProducts:
    """Products of a few f32 rows with the quantised weights, exact."""

    def __init__(self, n_threads: int) -> None:
        self._n_threads = n_threads

    def of_layer(self, layer: LayerWeights) -> dict[str, Product]:
        """Products of f32 arrays by the names of ``stacks``."""
        return {name: self.of_stack(name, parts) for name, parts in stacks(layer)}

    def of_stack(self, name: str, parts: Sequence[Linear]) -> Product:
        """The product of stacked matrices, whose rows follow one another."""
        return partial(self._multiply, parts)

    def clear(self) -> None:
        """Does nothing, because nothing is kept."""

    def _multiply(self, parts: Sequence[Linear], rows: Any) -> np.ndarray:
        rows = np.ascontiguousarray(rows)
        return np.concatenate(
            [dot.matvec(w.code, w.data, w.n_columns, rows, self._n_threads) for w in parts], 1
        )


def room(
    kept: dict[str, np.ndarray], name: str, n_rows: int, n_columns: int, dtype: Any
) -> np.ndarray:
    """An uninitialised matrix in the memory that ``kept`` has under this name."""
    size = n_rows * n_columns
    if name not in kept or len(kept[name]) < size:
        kept[name] = on_lines(size, dtype)
    return kept[name][:size].reshape(n_rows, n_columns)


class ManyRowsProducts(ABC):
    """Products of any number of rows.

    All results of one name share their memory, so a result is valid until the next one of its name,
    or ``clear``. Fresh memory from the system would take a tenth of a prefill's time.
    """

    dtype: Any  # of rows and results

    def __init__(self, n_threads: int) -> None:
        self.n_threads = n_threads
        self._results: dict[str, np.ndarray] = {}

    def of_layer(self, layer: LayerWeights) -> dict[str, Product]:
        """Products of arrays by the names of ``stacks``, until the next call."""
        return {name: self.of_stack(name, parts) for name, parts in stacks(layer)}

    def clear(self) -> None:
        """Frees what is kept between two layers."""
        self._results = {}

    @abstractmethod
    def of_stack(self, name: str, parts: Sequence[Linear]) -> Product:
        """The product of stacked matrices, whose rows follow one another."""

    def _room(self, name: str, n_rows: int, n_columns: int) -> np.ndarray:
        """The memory for the result of this name."""
        return room(self._results, name, n_rows, n_columns, self.dtype)


class BF16Products(ManyRowsProducts):
    """Products of bf16 rows by cpu/layer/matmul_bf16.py."""

    dtype = np.uint16

    def of_stack(self, name: str, parts: Sequence[Linear]) -> Product:
        table = matmul_bf16.product_table([(part.code, part.data) for part in parts])
        return partial(self._multiply, name, table)

    def _multiply(self, name: str, table: np.ndarray, rows: np.ndarray) -> np.ndarray:
        out = self._room(name, len(rows), matmul_bf16.n_rows(table))
        matmul_bf16.multiply_rows(table, np.ascontiguousarray(rows), out, self.n_threads)
        return out


class F32Products(ManyRowsProducts):
    """Products of f32 rows by numpy's BLAS; a matrix is dequantised when it is needed."""

    dtype = np.float32

    def __init__(self, n_threads: int) -> None:
        super().__init__(n_threads)
        self._matrices: dict[str, np.ndarray] = {}  # scratch of one layer's size

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

    def _multiply_dense(self, name: str, matrix: np.ndarray, rows: np.ndarray) -> np.ndarray:
        out = self._room(name, len(rows), len(matrix))
        with blas_threads(self.n_threads):
            return np.matmul(np.ascontiguousarray(rows), matrix.T, out=out)


class IntegerProducts(ManyRowsProducts):
    """Products by cpu/layer/matmul_int8.py, of the rows that ``others`` take.

    others: for the formats that it lacks.
    """

    def __init__(self, others: ManyRowsProducts) -> None:
        super().__init__(others.n_threads)
        self.dtype, self._others = others.dtype, others

    def clear(self) -> None:
        super().clear()
        self._others.clear()

    def of_stack(self, name: str, parts: Sequence[Linear]) -> Product:
        if not all(matmul_int8.can_multiply(part.code) for part in parts):
            return self._others.of_stack(name, parts)
        table = matmul_int8.product_table([(part.code, part.data) for part in parts])
        return partial(self._multiply, name, table)

    def _multiply(self, name: str, table: np.ndarray, rows: np.ndarray) -> np.ndarray:
        out = self._room(name, len(rows), matmul_int8.n_rows(table))
        matmul_int8.multiply(table, np.ascontiguousarray(rows), out, self.n_threads)
        return out
