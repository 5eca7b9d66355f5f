"""Launches of kernels/matvec.py to compile; see test_compile.py."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from gguf import GGMLQuantizationType
from gguf.constants import GGML_QUANT_SIZES

from sparsekv_cli.kernels import blocks, matvec

SIZES = ((8192, 4096), (96, 768))  # rows and columns: several warps a row, and one


def empty_matrix(name: str, n_rows: int, n_columns: int) -> blocks.PackedMatrix:
    n_elements, n_bytes = GGML_QUANT_SIZES[GGMLQuantizationType[name]]
    data = torch.zeros(1, n_columns // n_elements * n_bytes, dtype=torch.uint8)
    return blocks.repack(name, data.repeat(n_rows, 1), n_columns)


def launches() -> Iterator[Callable[[], object]]:
    for name in blocks.PACKABLE:
        for n_rows, n_columns in SIZES:
            w = empty_matrix(name, n_rows, n_columns)
            for n_batch in (1, 4, 16) if n_rows == SIZES[0][0] else (1,):
                x = torch.zeros(n_batch, n_columns)
                yield lambda: matvec.matvec(w, x)  # noqa: B023
        yield lambda: matvec.dequantize(w)  # noqa: B023
