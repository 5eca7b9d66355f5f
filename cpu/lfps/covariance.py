"""Mean and covariance of stored rows, for LFPS' high-sparsity test (eq 5, 6)."""

from __future__ import annotations

import numpy as np
from numba import njit, prange

from sparsekv_cli.cpu.attention.rows import K_HEAD, K_KIND, K_ROW
from sparsekv_cli.cpu.attention.tile import tile_values
from sparsekv_cli.cpu.jit.llvm import keep
from sparsekv_cli.cpu.jit.threads import PRANGE_ONLY

BLOCK = 256  # rows whose mean is summed up at a time
STEP = 4  # rows that a pass over the covariance takes in


@njit(cache=True, nogil=True, parallel=PRANGE_ONLY)
def mean_and_covariance(layout, of, first, n, mean, covariance, n_threads):
    """Mean f32 (G, d) and covariance f32 (G, d, d) of n rows of each kv head; d as it is stored.

    layout int64 (8,): see attention/rows.py; of: its column K or V, whose rows from ``first`` on
    are meant. If covariance has shape (G, 0, 0), only the mean is computed.
    """
    n_kv_head, row_bytes, kind = mean.shape[0], layout[K_ROW + of], layout[K_KIND + of]
    for part in prange(n_threads):
        for kv_head in range(part, n_kv_head, n_threads):
            at = layout[of] + kv_head * layout[K_HEAD + of] + first * row_bytes
            _mean(at, row_bytes, kind, n, mean[kv_head])
            if covariance.shape[1]:
                _covariance(at, row_bytes, kind, n, mean[kv_head], covariance[kv_head])


@njit(cache=True, nogil=True)
def _mean(at, row_bytes, kind, n, mean):
    d = mean.shape[0]
    ones, part, total = np.ones(BLOCK, np.float32), np.empty(d, np.float32), np.zeros(d)
    for start in range(0, n, BLOCK):
        part[:] = 0
        tile_values(
            1, kind, ones.ctypes.data, 0, at + start * row_bytes, row_bytes, 0,
            min(BLOCK, n - start), d, part.ctypes.data,
        )  # fmt: skip
        keep(ones)
        total += part
    mean[:] = total / n


@njit(cache=True, nogil=True, fastmath={"contract"})
def _covariance(at, row_bytes, kind, n, mean, covariance):
    d = mean.shape[0]
    one, rows = np.ones(1, np.float32), np.empty((STEP, d), np.float32)
    a, b, c, e = rows[0], rows[1], rows[2], rows[3]
    covariance[:] = 0
    for start in range(0, n, STEP):
        rows[:] = 0
        for i in range(min(STEP, n - start)):
            row = at + (start + i) * row_bytes
            tile_values(1, kind, one.ctypes.data, 0, row, row_bytes, 0, 1, d, rows[i].ctypes.data)
            rows[i] -= mean
        for i in range(d):
            out = covariance[i]
            for j in range(d):
                out[j] += a[i] * a[j] + b[i] * b[j] + c[i] * c[j] + e[i] * e[j]
    keep(one)
    covariance /= np.float32(n)


def mean_and_covariance_ref(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """rows (G, n, d) -> mean (G, d) and covariance (G, d, d), in f64."""
    rows = rows.astype(np.float64)
    mean = rows.mean(1)
    centred = rows - mean[:, None]
    return mean, np.einsum("gni,gnj->gij", centred, centred) / rows.shape[1]
