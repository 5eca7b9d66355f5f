"""Reads memory at full speed. ``bench`` measures the bandwidth of its roofline lines with it."""

from itertools import pairwise

import numpy as np
from numba import prange

from sparsekv_cli.cpu.jit.kernel import njit
from sparsekv_cli.cpu.jit.threads import PRANGE_ONLY


def sum_parts_ref(data: np.ndarray, n_parts: int) -> np.ndarray:
    """numpy reference: f32 (n_parts,) sums of the parts of ``data``, f32 (n,)."""
    bounds = [part * len(data) // n_parts for part in range(n_parts + 1)]
    return np.array([data[a:b].sum() for a, b in pairwise(bounds)], np.float32)


@njit(cache=True, nogil=True, fastmath={"reassoc", "nsz"})
def _sum(data):
    """Returns the sum of data f32 (n,). LLVM may reorder the additions, so it loads vectors."""
    total = np.float32(0)
    for i in range(data.shape[0]):
        total += data[i]
    return total


@njit(cache=True, nogil=True, parallel=PRANGE_ONLY)
def sum_parts(data, n_parts):
    """Returns f32 (n_parts,): the sums of ``n_parts`` equal parts of data f32 (n,)."""
    out = np.empty(n_parts, np.float32)
    for part in prange(n_parts):
        first, last = part * data.shape[0] // n_parts, (part + 1) * data.shape[0] // n_parts
        out[part] = _sum(data[first:last])
    return out
