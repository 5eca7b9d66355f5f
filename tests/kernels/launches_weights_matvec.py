"""Launches of kernels/weights/matvec.py to compile; see test_compile.py."""

from collections.abc import Callable, Iterator
from functools import partial

import torch
from gguf import GGMLQuantizationType
from gguf.constants import GGML_QUANT_SIZES

from sparsekv_cli.kernels.weights import dot, packed


def empty_matrix(name: str, n_rows: int, n_columns: int) -> packed.PackedMatrix:
    n_elements, n_bytes = GGML_QUANT_SIZES[GGMLQuantizationType[name]]
    data = torch.zeros(1, n_columns // n_elements * n_bytes, dtype=torch.uint8)
    return packed.repack(name, data.repeat(n_rows, 1), n_columns)


def launches() -> Iterator[Callable[[], object]]:
    for name in packed.PACKABLE:
        w = empty_matrix(name, 8192, 4096)
        for n_batch in (1, 2) if name in ("Q4_K", "Q6_K", "F16") else (1,):
            yield partial(dot.multiply, w, torch.zeros(n_batch, 4096))
    for name in ("Q4_0", "Q6_K"):  # one warp a row
        yield partial(dot.multiply, empty_matrix(name, 96, 768), torch.zeros(1, 768))
    yield partial(dot.multiply, empty_matrix("Q4_K", 4096, 14336), torch.zeros(1, 14336))
