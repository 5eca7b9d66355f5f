"""Mean and covariance of stored rows, from which LFPS tells heads that need no search (eq 5, 6)."""

from __future__ import annotations

import numpy as np
from numba import njit, prange

from sparsekv_cli.cpu.emit import keep
from sparsekv_cli.cpu.parallel import PRANGE_ONLY
from sparsekv_cli.cpu.tiles import PAD, tile_scores, tile_values

BLOCK = 256  # rows at a time, which stay in the L2 cache
TILE = 4  # of tiles.py


@njit(cache=True, nogil=True, parallel=PRANGE_ONLY)
def row_moments(at, head_bytes, row_bytes, kind, n, mean, covariance):
    """Mean f32 (G, d) and covariance f32 (G, d, d) of n rows of each kv head; d as it is stored.

    at: address of the first row; rows and their ``kind`` as in rows.py. Without covariance, (G, 0,
    0), the mean alone.
    """
    for kv_head in prange(mean.shape[0]):
        first = at + kv_head * head_bytes
        _mean(first, row_bytes, kind, n, mean[kv_head])
        if covariance.shape[1]:
            _covariance(first, row_bytes, kind, n, mean[kv_head], covariance[kv_head])


@njit(cache=True, nogil=True)
def _mean(at, row_bytes, kind, n, mean):
    weights = np.full(BLOCK, np.float32(1 / n))
    mean[:] = 0
    for start in range(0, n, BLOCK):
        tile_values(
            1, kind, weights.ctypes.data, 0, at + start * row_bytes, row_bytes, 0,
            min(BLOCK, n - start), mean.shape[0], mean.ctypes.data,
        )  # fmt: skip
    keep(weights)


@njit(cache=True, nogil=True, fastmath={"reassoc", "contract"})
def _covariance(at, row_bytes, kind, n, mean, covariance):
    d = mean.shape[0]
    units = np.eye(d, dtype=np.float32)  # whose products with rows are the rows' columns, exactly
    columns = np.empty((d, BLOCK + PAD), np.float32)
    covariance[:] = 0
    for start in range(0, n, BLOCK):
        size = min(BLOCK, n - start)
        for c in range(0, d, TILE):
            tile_scores(
                TILE, kind, units[c].ctypes.data, at + start * row_bytes, row_bytes, 0, size, d,
                columns[c].ctypes.data, columns.shape[1],
            )  # fmt: skip
        for i in range(d):
            for row in range(size):
                columns[i, row] -= mean[i]
            for j in range(i + 1):
                total = np.float32(0)
                for row in range(size):
                    total += columns[i, row] * columns[j, row]
                covariance[i, j] += total
    keep(units)
    for i in range(d):
        for j in range(i + 1):
            covariance[i, j] /= n
            covariance[j, i] = covariance[i, j]


def row_moments_ref(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """rows (G, n, d) -> mean (G, d) and covariance (G, d, d), in f64."""
    rows = rows.astype(np.float64)
    mean = rows.mean(1)
    centred = rows - mean[:, None]
    return mean, np.einsum("gni,gnj->gij", centred, centred) / rows.shape[1]
