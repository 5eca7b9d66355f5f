"""The matrix products of a prefilled layer: which there are, of few rows, and in integers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np

from sparsekv_cli.cpu import matvec, prefill_products
from sparsekv_cli.cpu.tensors import load_torch
from sparsekv_cli.models.forward import Product
from sparsekv_cli.models.weights import LayerWeights, Linear, Weights


def stacks(layer: LayerWeights) -> Iterator[tuple[str, Sequence[Linear]]]:
    """The matrices of a layer, those of one input together."""
    yield "qkv", (layer.q, layer.k, layer.v)
    yield "o", (layer.o,)
    yield "gate_up", (layer.gate, layer.up)
    yield "down", (layer.down,)


def can_multiply(weights: Weights) -> bool:
    """Whether ``IntegerProducts`` knows the formats of all layers."""
    linears = (linear for layer in weights.layers for linear in layer.linears())
    return all(prefill_products.can_multiply(linear.code) for linear in linears)


class FewRowsProducts:
    """Products of some f32 rows with the weights as they lie: exact, and without torch."""

    def __init__(self, n_threads: int) -> None:
        self._n_threads = n_threads

    def of_layer(self, layer: LayerWeights) -> dict[str, Product]:
        """Products of f32 arrays by the names of ``stacks``."""
        return {name: partial(self._multiply, parts) for name, parts in stacks(layer)}

    def clear(self) -> None:
        """Nothing is kept."""

    def _multiply(self, parts: Sequence[Linear], rows: Any) -> np.ndarray:
        rows = np.ascontiguousarray(rows)
        return np.concatenate(
            [matvec.matvec(w.code, w.data, w.n_columns, rows, self._n_threads) for w in parts], 1
        )


class IntegerProducts:
    """cpu/prefill_products.py on the weights as they lie; formats that it does not know by torch.

    All results of one name have the same memory, which holds one until the next, or ``clear``: to
    get it anew from the system takes a tenth of a prefill.
    """

    def __init__(self, n_threads: int) -> None:
        self._n_threads = n_threads
        self._results: dict[str, np.ndarray] = {}
        self._torch: Any = None  # TorchProducts, for formats that are not known

    def of_layer(self, layer: LayerWeights) -> dict[str, Product]:
        """Products of f32 arrays by the names of ``stacks``, until the next call."""
        return {name: self._of_stack(name, parts) for name, parts in stacks(layer)}

    def clear(self) -> None:
        """Frees what is kept between two layers."""
        self._results, self._torch = {}, None

    def _of_stack(self, name: str, parts: Sequence[Linear]) -> Product:
        if not all(prefill_products.can_multiply(part.code) for part in parts):
            return self._of_stack_by_torch(name, parts)
        table = prefill_products.product_table([(part.code, part.data) for part in parts])
        return partial(self._multiply, name, table)

    def _of_stack_by_torch(self, name: str, parts: Sequence[Linear]) -> Product:
        from sparsekv_cli.models.torch_products import TorchProducts

        torch = load_torch()
        if self._torch is None:
            self._torch = TorchProducts(torch.float32, self._n_threads)
        multiply = self._torch.of_stack(name, parts)
        return lambda rows: multiply(torch.from_numpy(np.ascontiguousarray(rows))).numpy()

    def _multiply(self, name: str, table: np.ndarray, rows: Any) -> np.ndarray:
        shape = (len(rows), prefill_products.n_rows(table))
        size = shape[0] * shape[1]
        if name not in self._results or len(self._results[name]) < size:
            self._results[name] = np.empty(size, np.float32)
        out = self._results[name][:size].reshape(shape)
        prefill_products.multiply(table, np.ascontiguousarray(rows), out, self._n_threads)
        return out
