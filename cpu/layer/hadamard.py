"""The Hadamard rotation of key and value heads before their quantisation.

One element may be much larger than the others of its row. Its quantised block then needs a large
scale, which loses precision. The rotation spreads the element over the whole row (QuaRot,
arXiv:2404.00456). The matrix is symmetric and its own inverse. If queries and keys are both
rotated, their products stay the same.
"""

import numpy as np
from numba import prange

from sparsekv_cli.cpu.jit.kernel import njit
from sparsekv_cli.cpu.jit.threads import PRANGE_ONLY


def block_of(d: int) -> int:
    """Returns how many elements one rotation mixes: the largest power of two that divides d.

    A head of 96 elements is three blocks of 32.
    """
    return d & -d


@njit(cache=True, nogil=True)
def rotate_row(values, d, block):
    """Rotates, in place, the first d elements of f32 (>= d,), ``block`` at once; see above.

    The matrix is Sylvester's, divided by sqrt(block). The fast transform applies it.
    """
    half, scale = 1, np.float32(1 / np.sqrt(block))
    while half < block:
        for start in range(0, d, 2 * half):
            for i in range(start, start + half):
                a, b = values[i], values[i + half]
                values[i] = a + b
                values[i + half] = a - b
        half *= 2
    for i in range(d):
        values[i] *= scale


@njit(cache=True, nogil=True, parallel=PRANGE_ONLY)
def rotate_rows(x, d, block, n_threads):
    """Rotates, in place, the first d elements of each row of x f32 (rows, >= d), ``block`` at once.

    See ``rotate_row``.
    """
    n_rows = x.shape[0]
    for part in prange(n_threads):
        for row in range(part * n_rows // n_threads, (part + 1) * n_rows // n_threads):
            rotate_row(x[row], d, block)


def rotate_rows_ref(x: np.ndarray) -> np.ndarray:
    """Returns the product of x (..., d) with the matrix, in f64."""
    d = x.shape[-1]
    matrix = np.ones((1, 1))
    while len(matrix) < block_of(d):
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    blocks = x.astype(np.float64).reshape(*x.shape[:-1], -1, len(matrix))
    return (blocks @ matrix / np.sqrt(len(matrix))).reshape(x.shape)
