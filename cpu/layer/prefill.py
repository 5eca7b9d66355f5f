"""The fused steps of a prefilled chunk between its matrix products, on rows of bf16 or f32.

They are the RMS norm; bias, norm and rotation of q/k/v; the gate; and the residual sum. Each step
reads and writes the chunk once. A bf16 is stored as a uint16, the upper half of an f32. Arithmetic
is in f32; results are rounded once, to nearest even.
"""

import numpy as np
from numba import prange, types
from numba.extending import intrinsic

from sparsekv_cli.cpu.attention.store import store_row
from sparsekv_cli.cpu.jit.bf16 import narrowed, widened
from sparsekv_cli.cpu.jit.kernel import njit
from sparsekv_cli.cpu.jit.llvm import LANES, sum_squares
from sparsekv_cli.cpu.jit.threads import PRANGE_ONLY
from sparsekv_cli.cpu.layer.activation import SIGMOID, gate_lanes, gate_one
from sparsekv_cli.cpu.vector.put import put


@intrinsic
def rounded(typingctx, out, value):
    """Rounds a finite f32 to the type of the array ``out``: f32, or bf16 bits (nearest even)."""

    def codegen(context, builder, signature, args):
        return narrowed(builder, args[1]) if signature.return_type == types.uint16 else args[1]

    return out.dtype(out, types.float32), codegen


@intrinsic
def widen(typingctx, value):
    """Returns a number as f32, in numba code. value: the bits of a bf16, uint16, or an f32."""

    def codegen(context, builder, signature, args):
        if signature.args[0] == types.float32:
            return args[0]
        return widened(builder, args[0])

    return types.float32(value), codegen


@njit(cache=True, nogil=True, parallel=PRANGE_ONLY)
def norm_rows(x, weight, eps, out, n_threads):
    """out (T, n) = x / sqrt(mean(x^2) + eps) * weight; x f32 (T, n)."""
    n_rows, n = x.shape
    for part in prange(n_threads):
        for row in range(part * n_rows // n_threads, (part + 1) * n_rows // n_threads):
            scale = np.float32(1) / np.sqrt(sum_squares(x[row]) / np.float32(n) + eps)
            for c in range(n):
                out[row, c] = rounded(out, x[row, c] * scale * weight[c])


@njit(cache=True, nogil=True, parallel=PRANGE_ONLY)
def round_rows(x, out, n_threads):
    """out (T, n) = x f32 (T, n)."""
    n_rows = x.shape[0]
    for part in prange(n_threads):
        for row in range(part * n_rows // n_threads, (part + 1) * n_rows // n_threads):
            for c in range(x.shape[1]):
                out[row, c] = rounded(out, x[row, c])


@njit(inline="always")  # a call would make split_heads a quarter slower
def _normed(x, bias, norm, eps, scale, out):
    """out f32 (n,) = norm(x + bias); bias and norm f32 (n,) may be empty: not applied.

    scale: the norm's factor before its weight; 0: it follows from x + bias.
    """
    n = x.shape[0]
    for c in range(n):
        out[c] = widen(x[c])
    if bias.shape[0]:
        for c in range(n):
            out[c] += bias[c]
    if norm.shape[0]:
        if scale == np.float32(0):
            scale = np.float32(1) / np.sqrt(sum_squares(out) / np.float32(n) + eps)
        for c in range(n):
            out[c] *= scale * norm[c]


@njit(cache=True, nogil=True)
def _scale_of_all(x, bias, norm, eps, d):
    """Returns the factor of the norm over all heads x (heads d,); 0: ``norm`` is over each head."""
    if norm.shape[0] <= d:
        return np.float32(0)
    values = np.empty(x.shape[0], np.float32)
    for c in range(x.shape[0]):
        values[c] = widen(x[c])
    for c in range(bias.shape[0]):
        values[c] += bias[c]
    return np.float32(1) / np.sqrt(sum_squares(values) / np.float32(x.shape[0]) + eps)


@njit(cache=True, nogil=True, parallel=PRANGE_ONLY)
def add_rows(x, y, bias, norm, eps, scale, n_threads):
    """x += scale norm(y + bias); x f32 (T, n). bias and norm f32 (n,) may be empty: not applied."""
    n_rows, n = x.shape
    for part in prange(n_threads):
        work = np.empty(n if bias.shape[0] or norm.shape[0] else 0, np.float32)
        for row in range(part * n_rows // n_threads, (part + 1) * n_rows // n_threads):
            if not work.shape[0]:
                for c in range(n):
                    x[row, c] += scale * widen(y[row, c])
                continue
            _normed(y[row], bias, norm, eps, np.float32(0), work)
            for c in range(n):
                x[row, c] += scale * work[c]


@njit(cache=True, nogil=True)
def _head(raw, bias, norm, eps, whole, cos, sin, scale, interleaved, work, out_nope, out):
    """Applies bias, norm, scale and rotation to one token's head: raw (d,) -> out_nope, out (d,).

    whole: the factor of a norm over all heads, or 0 (``_scale_of_all``). work: scratch f32
    (2, >= d). out_nope and out are in half-split order, before and after the rotation.
    """
    d, half = raw.shape[0], cos.shape[0]
    values, ordered = work[0, :d], work[1, :d]
    _normed(raw, bias, norm, eps, whole, values)
    if scale != np.float32(1):
        for c in range(d):
            values[c] *= scale
    if interleaved:
        for i in range(half):
            ordered[i] = values[2 * i]
            ordered[half + i] = values[2 * i + 1]
        for c in range(2 * half, d):
            ordered[c] = values[c]
    else:
        put(ordered, values)
    for c in range(d):
        out_nope[c] = rounded(out_nope, ordered[c])
    for i in range(half):
        a, b = ordered[i], ordered[half + i]
        out[i] = rounded(out, a * cos[i] - b * sin[i])
        out[half + i] = rounded(out, a * sin[i] + b * cos[i])
    for c in range(2 * half, d):
        out[c] = rounded(out, ordered[c])


@njit(cache=True, nogil=True, parallel=PRANGE_ONLY)
def split_heads(
    raw, q_bias, k_bias, v_bias, q_norm, k_norm, v_norm, eps, cos, sin, q_scale, interleaved, gated,
    q, k, v, q_nope, k_nope, n_threads,
):  # fmt: skip
    """Splits a chunk's projected q/k/v into heads, with bias, norm and rotation.

    raw (T, H d + G d + G d_v); G may be 0. biases: f32 as wide, or empty. norms: f32 (d,), for the
    values (d_v,), or empty. A norm over all heads of q or k is as wide as these. cos, sin f32 (T,
    n_rot / 2). q_scale f32 (T,) multiplies the queries. gated: d elements of a gate follow each
    query's d elements (``gate_heads``). q, q_nope (H, T, d), k, k_nope (G, T, d), v (G, T, d_v).
    """
    n_head, n_rows, d = q.shape
    n_kv, d_v = v.shape[0], v.shape[2]
    q_row = 2 * d if gated else d
    q_step = d if q_norm.shape[0] > d else 0
    k_step = d if k_norm.shape[0] > d else 0
    for part in prange(n_threads):
        work = np.empty((2, max(d, d_v)), np.float32)
        for t in range(part * n_rows // n_threads, (part + 1) * n_rows // n_threads):
            whole = _scale_of_all(raw[t, : n_head * d], q_bias, q_norm, eps, d)
            for h in range(n_head):
                bias, norm = q_bias[h * d : (h + 1) * d], q_norm[h * q_step :][:d]
                _head(
                    raw[t, h * q_row : h * q_row + d], bias, norm, eps, whole, cos[t], sin[t],
                    q_scale[t], interleaved, work, q_nope[h, t], q[h, t],
                )  # fmt: skip
            at = n_head * q_row
            whole = _scale_of_all(raw[t, at : at + n_kv * d], k_bias, k_norm, eps, d)
            for g in range(n_kv):
                bias, norm = k_bias[g * d : (g + 1) * d], k_norm[g * k_step :][:d]
                _head(
                    raw[t, at : at + d], bias, norm, eps, whole, cos[t], sin[t], np.float32(1),
                    interleaved, work, k_nope[g, t], k[g, t],
                )  # fmt: skip
                at += d
            for g in range(n_kv):
                bias, values = v_bias[g * d_v : (g + 1) * d_v], work[0, :d_v]
                _normed(raw[t, at : at + d_v], bias, v_norm, eps, np.float32(0), values)
                for c in range(d_v):
                    v[g, t, c] = rounded(v, values[c])
                at += d_v


@njit(cache=True, nogil=True, parallel=PRANGE_ONLY)
def gate_heads(attended, raw, d, out, n_threads):
    """out (T, H d) = attended * sigmoid(gate); raw (T, >= H 2 d): a head's query, then its gate.

    All f32 or all bf16.
    """
    n_rows, whole = out.shape[0], d // LANES * LANES
    for part in prange(n_threads):
        for t in range(part * n_rows // n_threads, (part + 1) * n_rows // n_threads):
            for h in range(out.shape[1] // d):
                gate, x = raw[t, (2 * h + 1) * d :], attended[t, h * d :]
                to = out[t, h * d : (h + 1) * d]
                places = gate.ctypes.data, x.ctypes.data, to.ctypes.data
                gate_lanes(out, SIGMOID, *places, whole)
                for c in range(whole, d):
                    to[c] = rounded(out, gate_one(SIGMOID, widen(gate[c]), widen(x[c])))


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
            at = gate.ctypes.data, up.ctypes.data, out[row].ctypes.data
            gate_lanes(out, activation, at[0], at[1], at[2], whole)
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
