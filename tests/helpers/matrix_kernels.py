"""Calls of the kernels of cpu/weights: one matrix, one kernel by its address, or rounding."""

from ctypes import CFUNCTYPE, c_int64

import numpy as np

from sparsekv_cli.cpu.jit.pointers import address
from sparsekv_cli.cpu.weights.integer import quantize_rows, quantized_bytes, quantized_stride
from sparsekv_cli.models.gguf.linear import Linear
from sparsekv_cli.models.matmul import FewRowsProducts


def matvec(
    code: int, w: np.ndarray, n_columns: int, x: np.ndarray, n_threads: int = 1, n_planes: int = 0
) -> np.ndarray:
    """Returns W x: w uint8 (rows, row bytes), x f32 (n_columns,) or (B, n_columns)."""
    product = FewRowsProducts(n_threads, n_planes).of_stack("w", [Linear(code, w, n_columns)])
    out = product(np.atleast_2d(x))
    return out[0] if x.ndim == 1 else out


def call_rows(kernel: int, *given: int) -> None:
    """Calls a kernel like ``rows_dot`` (cpu/weights/dot.py), with all but its two literals."""
    n_literals = 2
    CFUNCTYPE(None, *[c_int64] * (n_literals + len(given)))(kernel)(0, 0, *given)


def quantize(x: np.ndarray, n_planes: int) -> np.ndarray:
    """Rounds x f32 (n,), n a multiple of 32, to blocks: uint8 (quantized_bytes(n),).

    x f32 (B, n) gives uint8 (B, quantized_stride(n)).
    """
    n = x.shape[-1]
    out = np.zeros((x.size // n, quantized_stride(n)), np.uint8)
    rows = np.ascontiguousarray(x)
    quantize_rows(address(rows), 4 * n, len(out), n, n_planes, address(out), out.strides[0])
    return out[0, : quantized_bytes(n)] if x.ndim == 1 else out
