"""Storing of a prefilled chunk's rows of K or V, as a decode step stores its one, to the bit."""

from __future__ import annotations

import numpy as np
from numba import njit, prange

from sparsekv_cli.cpu.parallel import PRANGE_ONLY
from sparsekv_cli.cpu.prefill_rows import widen
from sparsekv_cli.cpu.store_rows import store_row


@njit(cache=True, nogil=True, parallel=PRANGE_ONLY)
def store_rows(rows, kind, target, head_bytes, row_bytes, width, n_threads):
    """Writes rows (heads, T, d), f32 or the bits of bf16, as rows of ``kind`` (rows.py).

    target: address of the first; head_bytes, row_bytes: from a head's or a row's to the next one's;
    width: d padded to a multiple of 16 with zeros.
    """
    n_head, n_rows, d = rows.shape
    for part in prange(n_threads):
        row = np.zeros(width, np.float32)
        for t in range(part * n_rows // n_threads, (part + 1) * n_rows // n_threads):
            for h in range(n_head):
                for c in range(d):
                    row[c] = widen(rows[h, t, c])
                store_row(kind, row.ctypes.data, target + h * head_bytes + t * row_bytes, width)
