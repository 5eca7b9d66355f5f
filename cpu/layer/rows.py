"""The steps of one row of a layer between its products: for chunks of a prefill and decode steps.

They are the RMS norm; bias, norm and rotation of q, k and v; the gate of heads; and the residual
sum. Rows are f32 or bf16, stored as a uint16, the upper half of an f32. Arithmetic is in f32;
results are rounded once, to nearest even.
"""

from typing import NamedTuple

import numpy as np
from numba import types
from numba.extending import intrinsic

from sparsekv_cli.cpu.jit.bf16 import narrowed, widened
from sparsekv_cli.cpu.jit.kernel import njit
from sparsekv_cli.cpu.jit.llvm import sum_squares
from sparsekv_cli.cpu.jit.value import LANES, write
from sparsekv_cli.cpu.layer.activation import SIGMOID, gate_lanes, gate_one
from sparsekv_cli.cpu.vector.put import put


@intrinsic
def rounded(typingctx, out, value):
    """Rounds a finite f32 to the type of the array ``out``: f32, or bf16 bits (nearest even)."""

    def codegen(context, builder, signature, args):
        is_bf16 = signature.return_type == types.uint16
        return write(builder, narrowed, args[1]) if is_bf16 else args[1]

    return out.dtype(out, types.float32), codegen


@intrinsic
def widen(typingctx, value):
    """Returns a number as f32, in numba code. value: the bits of a bf16, uint16, or an f32."""

    def codegen(context, builder, signature, args):
        return args[0] if signature.args[0] == types.float32 else write(builder, widened, args[0])

    return types.float32(value), codegen


@njit(cache=True, nogil=True)
def rms_scale(x, eps):
    """Returns the factor of the RMS norm of x f32 (n,): 1 / sqrt(mean(x^2) + eps)."""
    return np.float32(1) / np.sqrt(sum_squares(x) / np.float32(x.shape[0]) + eps)


@njit(cache=True, nogil=True)
def rms_norm(x, weight, eps, out):
    """out (n,) = x / sqrt(mean(x^2) + eps) * weight, x f32; x itself if ``weight`` is empty."""
    if weight.shape[0]:
        scale = rms_scale(x, eps)
        for i in range(x.shape[0]):
            out[i] = rounded(out, x[i] * scale * weight[i])
    else:
        for i in range(x.shape[0]):
            out[i] = rounded(out, x[i])


@njit(inline="always")  # a call would make split_heads a quarter slower
def normed(x, bias, norm, eps, scale, out):
    """out f32 (n,) = norm(x + bias); bias and norm f32 (n,) may be empty: not applied.

    scale: the norm's factor before its weight; 0: it follows from x + bias. out may be x.
    """
    n = x.shape[0]
    for c in range(n):
        out[c] = widen(x[c])
    if bias.shape[0]:
        for c in range(n):
            out[c] += bias[c]
    if norm.shape[0]:
        if scale == np.float32(0):
            scale = rms_scale(out, eps)
        for c in range(n):
            out[c] = out[c] * scale * norm[c]


@njit(cache=True, nogil=True)
def add_row(x, y, bias, norm, eps, scale, work):
    """x += scale norm(y + bias), x f32 (n,). work f32 (n,): scratch, which may be y."""
    if bias.shape[0] or norm.shape[0]:
        normed(y, bias, norm, eps, np.float32(0), work)
        for c in range(x.shape[0]):
            x[c] += scale * work[c]
    else:
        for c in range(x.shape[0]):
            x[c] += scale * widen(y[c])


@njit(cache=True, nogil=True)
def _scale_of_all(x, bias, norm, eps, d):
    """Returns the factor of the norm over all heads x (heads d,); 0: ``norm`` is over each head."""
    if norm.shape[0] <= d:
        return np.float32(0)
    values = np.empty(x.shape[0], np.float32)
    normed(x, bias, norm[:0], eps, np.float32(0), values)
    return rms_scale(values, eps)


@njit(cache=True, nogil=True)
def _head(raw, bias, norm, eps, whole, cos, sin, scale, interleaved, work, out_nope, out):
    """Applies bias, norm, scale and rotation to one token's head: raw (d,) -> out_nope, out (d,).

    whole: the factor of a norm over all heads, or 0 (``_scale_of_all``). work: scratch f32
    (2, >= d). out_nope and out are in half-split order, before and after the rotation.
    """
    d, half = raw.shape[0], cos.shape[0]
    values, ordered = work[0, :d], work[1, :d]
    normed(raw, bias, norm, eps, whole, values)
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


class HeadWeights(NamedTuple):
    """Weights between the projections and the heads, f32; each may be empty: not applied.

    Norms are over each head, or over all heads of q or of k together.
    """

    q_bias: np.ndarray
    k_bias: np.ndarray
    v_bias: np.ndarray
    q_norm: np.ndarray
    k_norm: np.ndarray
    v_norm: np.ndarray


@njit(cache=True, nogil=True)
def split_row(raw, weights, eps, turn, q_scale, form, t, work, outs):
    """Splits a token's projected q, k and v into heads, with bias, norm, scale and rotation.

    raw (H d + G d + G d_v,); G may be 0. turn: cos and sin f32 (n_rot / 2,). form: whether the
    pairs of a rotation are interleaved; whether d elements of a gate follow each query's d
    elements (``gate_row``); d; d_v. work: scratch f32 (2, >= d and d_v). outs: q (H, T, >= d),
    k (G, T, >= d), v (G, T, >= d_v), q_nope and k_nope, whose row t is written.
    """
    q, k, v, q_nope, k_nope = outs
    cos, sin = turn
    interleaved, gated, d, d_v = form
    at, q_row, one = 0, 2 * d if gated else d, np.float32(1)
    whole = _scale_of_all(raw[: len(q) * d], weights.q_bias, weights.q_norm, eps, d)
    step = d if weights.q_norm.shape[0] > d else 0
    for h in range(len(q)):
        bias, norm = weights.q_bias[h * d : (h + 1) * d], weights.q_norm[h * step :][:d]
        _head(
            raw[at : at + d], bias, norm, eps, whole, cos, sin, q_scale, interleaved, work,
            q_nope[h, t], q[h, t],
        )  # fmt: skip
        at += q_row
    whole = _scale_of_all(raw[at : at + len(k) * d], weights.k_bias, weights.k_norm, eps, d)
    step = d if weights.k_norm.shape[0] > d else 0
    for g in range(len(k)):
        bias, norm = weights.k_bias[g * d : (g + 1) * d], weights.k_norm[g * step :][:d]
        _head(
            raw[at : at + d], bias, norm, eps, whole, cos, sin, one, interleaved, work,
            k_nope[g, t], k[g, t],
        )  # fmt: skip
        at += d
    for g in range(len(v)):
        bias, values = weights.v_bias[g * d_v : (g + 1) * d_v], work[0, :d_v]
        normed(raw[at : at + d_v], bias, weights.v_norm, eps, np.float32(0), values)
        for c in range(d_v):
            v[g, t, c] = rounded(v, values[c])
        at += d_v


@njit(cache=True, nogil=True)
def gate_row(raw, x, d, out):
    """out (H d,) = x * sigmoid(gate); raw (>= H 2 d,): a head's query, then its gate.

    All f32 or all bf16. out may be x.
    """
    whole = d // LANES * LANES
    for h in range(len(out) // d):
        gate, of_head, to = raw[(2 * h + 1) * d :], x[h * d :], out[h * d : (h + 1) * d]
        gate_lanes(out, SIGMOID, gate, of_head, to, whole)
        for c in range(whole, d):
            to[c] = rounded(out, gate_one(SIGMOID, widen(gate[c]), widen(of_head[c])))
