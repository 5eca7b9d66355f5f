"""The matrix products of a prefilled layer: which there are, and those in integers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property, partial
from typing import Any

import numpy as np

from sparsekv_cli.cpu import prefill_products
from sparsekv_cli.cpu.tensors import load_torch
from sparsekv_cli.models.forward import Product
from sparsekv_cli.models.weights import LayerWeights, Linear


def stacks(layer: LayerWeights) -> Iterator[tuple[str, Sequence[Linear]]]:
    """The matrices of a layer, those of one input together."""
    yield "qkv", (layer.q, layer.k, layer.v)
    yield "o", (layer.o,)
    yield "gate_up", (layer.gate, layer.up)
    yield "down", (layer.down,)


class IntegerProducts:
    """cpu/prefill_products.py on the weights as they lie; formats that it does not know by torch.

    All results of one name have the same memory, which holds one until the next, or ``clear``: to
    get it anew from the system takes a tenth of a prefill.
    """

    def __init__(self, n_threads: int) -> None:
        self._n_threads = n_threads
        self._results: dict[str, np.ndarray] = {}

    def of_layer(self, layer: LayerWeights) -> dict[str, Product]:
        """Products of f32 arrays by the names of ``stacks``, until the next call."""
        return {name: self._of_stack(name, parts) for name, parts in stacks(layer)}

    def clear(self) -> None:
        """Frees what is kept between two layers."""
        self._results = {}
        self.__dict__.pop("_by_torch", None)

    @cached_property
    def _by_torch(self) -> Any:
        from sparsekv_cli.models.torch_products import TorchProducts

        return TorchProducts(load_torch().float32, self._n_threads)

    def _of_stack(self, name: str, parts: Sequence[Linear]) -> Product:
        if not all(prefill_products.can_multiply(part.code) for part in parts):
            multiply = self._by_torch.of_stack(name, parts)
            from_numpy = load_torch().from_numpy
            return lambda rows: multiply(from_numpy(np.ascontiguousarray(rows))).numpy()
        table = prefill_products.product_table([(part.code, part.data) for part in parts])
        return partial(self._multiply, name, table)

    def _multiply(self, name: str, table: np.ndarray, rows: Any) -> np.ndarray:
        shape = (len(rows), prefill_products.n_rows(table))
        size = shape[0] * shape[1]
        if name not in self._results or len(self._results[name]) < size:
            self._results[name] = np.empty(size, np.float32)
        out = self._results[name][:size].reshape(shape)
        prefill_products.multiply(table, np.ascontiguousarray(rows), out, self._n_threads)
        return out
