"""Launches of kernels/weights/dequantize.py to compile; see test_compile.py."""

from collections.abc import Callable, Iterator
from functools import partial

from launches_weights_matvec import empty_matrix

from sparsekv_cli.kernels.weights.dequantize import dequantize


def launches() -> Iterator[Callable[[], object]]:
    for name in ("Q4_0", "Q4_K", "Q6_K", "Q8_0"):
        yield partial(dequantize, empty_matrix(name, 96, 768))
