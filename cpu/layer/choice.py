"""Decides which kernel a matrix product takes. All products and the warm-up ask here.

few rows    weights in their file's layout or repacked (cpu/weights/), inputs in f32 or integers
many rows   matmul_int8.py, matmul_bf16.py, or numpy's BLAS on dequantised weights
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from types import ModuleType

import numpy as np
from numba import types

from sparsekv_cli.cpu.jit.pointers import address, function_address
from sparsekv_cli.cpu.layer import matmul_bf16, matmul_int8
from sparsekv_cli.cpu.weights.dot import rows_dot
from sparsekv_cli.cpu.weights.formats import FORMAT_OF_CODE
from sparsekv_cli.cpu.weights.interleaved import groups_dot


@cache
def few_rows_kernel(code: int, n_planes: int = 0, repacked: bool = False) -> tuple[int, int]:
    """Returns the address of the kernel of a ggml type, and the bytes of an input element.

    n_planes: bytes of a quantised input that are wanted; 0: f32. Plain floats take f32 only. The
    kernel is compiled, or loaded from disk.
    """
    n_planes = n_planes if FORMAT_OF_CODE[code].decode is not None else 0
    literals = (types.literal(code), types.literal(n_planes))
    kernel = groups_dot if repacked else rows_dot
    return function_address(kernel, literals + (types.int64,) * 10), n_planes


def many_rows_kernels(codes: Iterable[int], dtype: str, rows_dtype: str) -> ModuleType | None:
    """Returns the module that multiplies matrices of these ggml types. None: numpy's BLAS.

    dtype: type of the products, f32, bf16 or int8. rows_dtype: of inputs and results, f32 or bf16.
    """
    if dtype == "int8" and all(map(matmul_int8.can_multiply, codes)):
        return matmul_int8
    return matmul_bf16 if rows_dtype == "bf16" else None


def matrix_table(linears, n_planes, n_matrices=1) -> np.ndarray:
    """Returns the table int64 (matrices, 6) of products.py; the caller keeps the weights alive.

    linears: objects with code, data uint8 (rows, row bytes), n_columns and repacked. Block formats
    get integer kernels, which take activations of ``n_planes`` bytes. With two bytes they are 1.3
    (Q5_1) to 1.7 (Q4_K) times as fast as f32 kernels on an AVX-512 thread. n_matrices: the equal
    matrices that each of ``linears`` consists of.
    """
    rows = []
    for w in linears:
        kernel, planes = few_rows_kernel(w.code, n_planes, w.repacked)
        n_rows, row_bytes = len(w.data) // n_matrices, w.data.strides[0]
        rows.append((kernel, address(w.data), row_bytes, n_rows, w.n_columns, planes))
    return np.array(rows, np.int64)
