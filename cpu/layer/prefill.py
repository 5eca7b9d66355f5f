"""The fused steps of a prefilled chunk between its matrix products, on rows of bf16 or f32.

Each step reads and writes the chunk once, with the functions of layer/rows.py for each row.
"""

import numpy as np
from numba import prange

from sparsekv_cli.cpu.attention.store import store_row
from sparsekv_cli.cpu.jit.kernel import njit
from sparsekv_cli.cpu.jit.threads import PRANGE_ONLY
from sparsekv_cli.cpu.jit.value import LANES
from sparsekv_cli.cpu.layer.activation import gate_lanes, gate_one
from sparsekv_cli.cpu.layer.rows import add_row, gate_row, rms_norm, rounded, split_row, widen


@njit(cache=True, nogil=True, parallel=PRANGE_ONLY)
def norm_rows(x, weight, eps, out, n_threads):
    """out (T, n) = x / sqrt(mean(x^2) + eps) * weight; x f32 (T, n); x if ``weight`` is empty."""
    n_rows = x.shape[0]
    for part in prange(n_threads):
        for row in range(part * n_rows // n_threads, (part + 1) * n_rows // n_threads):
            rms_norm(x[row], weight, eps, out[row])


@njit(cache=True, nogil=True, parallel=PRANGE_ONLY)
def add_rows(x, y, bias, norm, eps, scale, n_threads):
    """x += scale norm(y + bias); x f32 (T, n). bias and norm f32 (n,) may be empty: not applied."""
    n_rows, n = x.shape
    for part in prange(n_threads):
        work = np.empty(n, np.float32)
        for row in range(part * n_rows // n_threads, (part + 1) * n_rows // n_threads):
            add_row(x[row], y[row], bias, norm, eps, scale, work)


@njit(cache=True, nogil=True, parallel=PRANGE_ONLY)
def split_heads(raw, weights, eps, cos, sin, q_scale, form, outs, n_threads):
    """Runs ``split_row`` for a chunk: raw (T, H d + G d + G d_v), outs (heads, T, d or d_v).

    weights: HeadWeights. cos, sin f32 (T, n_rot / 2). q_scale f32 (T,) multiplies the queries.
    """
    n_rows = raw.shape[0]
    for part in prange(n_threads):
        work = np.empty((2, max(form[2], form[3])), np.float32)
        for t in range(part * n_rows // n_threads, (part + 1) * n_rows // n_threads):
            split_row(raw[t], weights, eps, (cos[t], sin[t]), q_scale[t], form, t, work, outs)


@njit(cache=True, nogil=True, parallel=PRANGE_ONLY)
def gate_heads(attended, raw, d, out, n_threads):
    """Runs ``gate_row`` for a chunk: attended and out (T, H d), raw (T, >= H 2 d)."""
    n_rows = out.shape[0]
    for part in prange(n_threads):
        for t in range(part * n_rows // n_threads, (part + 1) * n_rows // n_threads):
            gate_row(raw[t], attended[t], d, out[t])


@njit(cache=True, nogil=True, parallel=PRANGE_ONLY)
def gate_rows(gate_up, activation, out, n_threads):
    """out = act(gate) * up; gate_up (T, 2 n): gate, then up; out (T, n).

    Without an up, gate_up is (T, n).
    """
    n_rows, n = out.shape
    first = gate_up.shape[1] - n
    whole = n // LANES * LANES
    for part in prange(n_threads):
        for row in range(part * n_rows // n_threads, (part + 1) * n_rows // n_threads):
            gate, up = gate_up[row], gate_up[row, first:]
            gate_lanes(out, activation, gate, up, out[row], whole)
            for c in range(whole, n):
                out[row, c] = rounded(out, gate_one(activation, widen(gate[c]), widen(up[c])))


@njit(cache=True, nogil=True, parallel=PRANGE_ONLY)
def store_rows(rows, kind, target, head_bytes, row_bytes, width, n_threads):
    """Writes rows (heads, T, d), f32 or the bits of bf16, as rows of ``kind`` (attention/rows.py).

    target: address of the first row. head_bytes, row_bytes: bytes from a head or a row to the next
    one. width: d padded to a multiple of 16 with zeros.
    """
    n_head, n_rows, d = rows.shape
    for part in prange(n_threads):
        row = np.zeros(width, np.float32)
        for t in range(part * n_rows // n_threads, (part + 1) * n_rows // n_threads):
            for h in range(n_head):
                for c in range(d):
                    row[c] = widen(rows[h, t, c])
                store_row(kind, row.ctypes.data, target + h * head_bytes + t * row_bytes, width)
