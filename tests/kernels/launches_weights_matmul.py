"""Launches of kernels/weights/matmul.py to compile; see test_compile.py."""

from collections.abc import Callable, Iterator
from functools import partial

import torch
from launches_weights_matvec import empty_matrix

from sparsekv_cli.kernels.weights import dot, packed


def launches() -> Iterator[Callable[[], object]]:
    for name in packed.PACKABLE:
        yield partial(dot.multiply, empty_matrix(name, 8192, 4096), torch.zeros(16, 4096))
    # the columns in parts
    yield partial(dot.multiply, empty_matrix("Q4_K", 4096, 14336), torch.zeros(8, 14336))
