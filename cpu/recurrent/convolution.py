"""Causal convolutions over a few rows, one filter a channel; a state keeps the last rows.

``gated_convolution`` replaces attention in LFM2's layers (LFM2 technical report, arXiv:2511.23404).
It is c * conv(b * x), where b, c and x are projections of a row. The delta net's convolution with
SiLU is in delta_net.py.
"""

import numpy as np
from numba import prange

from sparsekv_cli.cpu.jit.kernel import njit
from sparsekv_cli.cpu.jit.threads import PRANGE_ONLY
from sparsekv_cli.cpu.layer.rows import rounded, widen


def convolution_ref(
    x: np.ndarray, weight: np.ndarray, state: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """numpy reference: y[t] = sum_j weight[j] x[t - L + 1 + j], and the new state.

    x f32 (T, n); weight (L, n); state (L - 1, n): the rows before x.
    """
    rows = np.concatenate([state, x])
    length, n_rows = len(weight), len(x)
    y = sum(weight[j] * rows[j : j + n_rows] for j in range(length))
    return y, rows[n_rows:]


def gated_convolution_ref(
    raw: np.ndarray, weight: np.ndarray, state: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """numpy reference: c * conv(b * x) of raw (T, 3 n): b, c, x; and the new state."""
    b, c, x = np.split(raw, 3, axis=1)
    y, state = convolution_ref(b * x, weight, state)
    return c * y, state


@njit(cache=True, nogil=True, parallel=PRANGE_ONLY)
def gated_convolution(raw, weight, state, out, n_threads):
    """out (T, n) = c * conv(b * x); raw (T, 3 n): b, c, x, and out: f32, or both bf16.

    weight f32 (L, n); state f32 (L - 1, n), which becomes the state after the rows.
    """
    n_rows, n = out.shape
    length = weight.shape[0]
    for part in prange(n_threads):
        first, last = part * n // n_threads, (part + 1) * n // n_threads
        width = last - first
        rows = np.empty((length, width), np.float32)  # a ring: row p is at p % length
        total = np.empty(width, np.float32)
        for j in range(length - 1):
            for c in range(width):
                rows[j, c] = state[j, first + c]
        for t in range(n_rows):
            new = rows[(t + length - 1) % length]
            b, x = raw[t, first:last], raw[t, 2 * n + first : 2 * n + last]
            for c in range(width):
                new[c] = widen(b[c]) * widen(x[c])
                total[c] = weight[length - 1, first + c] * new[c]
            for j in range(length - 1):
                row, factor = rows[(t + j) % length], weight[j, first:last]
                for c in range(width):
                    total[c] += factor[c] * row[c]
            gate = raw[t, n + first : n + last]
            for c in range(width):
                out[t, first + c] = rounded(out, widen(gate[c]) * total[c])
        for j in range(length - 1):
            row = rows[(n_rows + j) % length]
            for c in range(width):
                state[j, first + c] = row[c]
