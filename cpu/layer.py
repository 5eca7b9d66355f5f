"""One decode step of a layer in two calls around the attention, over weights as they lie.

``project_qkv``: RMS norm, q/k/v, biases, q/k norm, rotation. ``finish_layer``: output projection,
residual, RMS norm, gated SiLU feed-forward, residual. Rows of all matrices that share an input are
divided evenly between the threads, one parallel loop a stage.
"""

from __future__ import annotations

import numpy as np
from numba import njit, prange, types
from numba.extending import intrinsic

from sparsekv_cli.cpu import emit
from sparsekv_cli.cpu.blocks import FORMAT_OF_CODE
from sparsekv_cli.cpu.emit import F32, I64, LANES, VF, const, load
from sparsekv_cli.cpu.integer import quantize_activations, quantized_bytes
from sparsekv_cli.cpu.matvec import address, call_rows, kernel_address
from sparsekv_cli.cpu.parallel import PRANGE_ONLY
from sparsekv_cli.cpu.tiles import exp_lanes

# Columns of a matrix table (int64, one row a matrix). INTEGER: the kernel takes quantised inputs.
KERNEL, WEIGHTS, ROW_BYTES, ROWS, COLUMNS, INTEGER = range(6)
FAST = {"reassoc", "contract", "arcp", "nsz"}
NO_BIAS = np.empty(0, np.float32)


def matrix_table(linears) -> np.ndarray:
    """int64 (matrices, 6) that the kernels read; the caller keeps the weights alive.

    linears: objects with code, data uint8 (rows, row bytes) and n_columns. Block formats take the
    integer kernels: 1.3 (Q5_1) to 1.7 (Q4_K) times the f32 ones on one AVX-512 thread.
    """
    rows = []
    for w in linears:
        integer = FORMAT_OF_CODE[w.code].decode is not None
        kernel = kernel_address(w.code, integer)
        rows.append(
            (kernel, address(w.data), w.data.strides[0], w.data.shape[0], w.n_columns, integer)
        )
    return np.array(rows, np.int64)


@njit(cache=True, nogil=True)
def _quantized(table, x):
    """The block form of a table's input x, or an empty array where no matrix takes it."""
    if not table[:, INTEGER].any():
        return np.empty(0, np.uint8)
    n = table[0, COLUMNS]
    out = np.empty(quantized_bytes(n), np.uint8)
    quantize_activations(x.ctypes.data, out.ctypes.data, n)
    return out


@njit(cache=True, nogil=True)
def _matrices_part(table, x, quantized, out, part, n_parts):
    """Part ``part`` of the rows of all matrices of a table, one after another in ``out``.

    x f32 (columns,) and its ``_quantized`` form.
    """
    total = table[:, ROWS].sum()
    first, last = part * total // n_parts, (part + 1) * total // n_parts
    start = 0
    for m in range(table.shape[0]):
        low, high = max(first, start), min(last, start + table[m, ROWS])
        if low < high:
            source = quantized.ctypes.data if table[m, INTEGER] else x.ctypes.data
            call_rows(
                table[m, KERNEL], table[m, WEIGHTS], table[m, ROW_BYTES], table[m, COLUMNS],
                source, out.ctypes.data + 4 * start, low - start, high - start,
            )  # fmt: skip
        start += table[m, ROWS]


@njit(cache=True, nogil=True, fastmath=FAST)
def rms_norm(x, weight, eps, out):
    """out = x / sqrt(mean(x^2) + eps) * weight, all f32 (n,)."""
    total = np.float32(0)
    for i in range(x.shape[0]):
        total += x[i] * x[i]
    scale = np.float32(1) / np.sqrt(total / np.float32(x.shape[0]) + eps)
    for i in range(x.shape[0]):
        out[i] = x[i] * scale * weight[i]


@njit(cache=True, nogil=True, fastmath=FAST)
def _rotate_heads(raw, bias, norm, eps, cos, sin, interleaved, out_nope, out):
    """Bias, norm and rotation of one token's heads.

    raw f32 (heads, d) as the file orders it; out_nope, out f32 (heads, >= d) in half-split order.
    """
    d = raw.shape[1]
    half = cos.shape[0]
    for h in range(raw.shape[0]):
        if bias.shape[0]:
            for c in range(d):
                raw[h, c] += bias[h * d + c]
        if norm.shape[0]:
            rms_norm(raw[h], norm, eps, raw[h])
        if interleaved:
            for i in range(half):
                out_nope[h, i] = raw[h, 2 * i]
                out_nope[h, i + half] = raw[h, 2 * i + 1]
        else:
            for i in range(2 * half):
                out_nope[h, i] = raw[h, i]
        for c in range(2 * half, d):
            out_nope[h, c] = raw[h, c]
            out[h, c] = raw[h, c]
        for i in range(half):
            a, b = out_nope[h, i], out_nope[h, i + half]
            out[h, i] = a * cos[i] - b * sin[i]
            out[h, i + half] = a * sin[i] + b * cos[i]


@njit(cache=True, nogil=True, parallel=PRANGE_ONLY)
def project_qkv(
    x, norm, eps, table, q_bias, k_bias, v_bias, q_norm, k_norm, cos, sin, interleaved,
    head_dim, value_dim, normed, raw, q, k, v, q_nope, k_nope, n_threads,
):  # fmt: skip
    """x f32 (n_embd,) -> q, q_nope (H, d'), k, k_nope (G, d'), v (G, d_v'); d' = d padded to 16.

    table: q, k, v; biases and q/k norms may be empty; cos, sin f32 (n_rot/2,) of this position.
    """
    rms_norm(x, norm, eps, normed)
    quantized = _quantized(table, normed)
    for part in prange(n_threads):
        _matrices_part(table, normed, quantized, raw, part, n_threads)
    n_q, n_k = table[0, ROWS], table[1, ROWS]
    raw_q = raw[:n_q].reshape(n_q // head_dim, head_dim)
    raw_k = raw[n_q : n_q + n_k].reshape(n_k // head_dim, head_dim)
    _rotate_heads(raw_q, q_bias, q_norm, eps, cos, sin, interleaved, q_nope, q)
    _rotate_heads(raw_k, k_bias, k_norm, eps, cos, sin, interleaved, k_nope, k)
    at = n_q + n_k
    for g in range(v.shape[0]):
        for c in range(value_dim):
            v[g, c] = raw[at + g * value_dim + c]
        if v_bias.shape[0]:
            for c in range(value_dim):
                v[g, c] += v_bias[g * value_dim + c]


@intrinsic
def _silu_multiply(typingctx, gate, up, out, count):
    """out[i] = up[i] gate[i] / (1 + e^-gate[i]) for i < count rounded up to 16; addresses."""

    def codegen(context, b, signature, args):
        gate, up, out, count = args

        def body(j, carried):
            at = b.mul(j, I64(4))
            g, u = load(b, VF, b.add(gate, at)), load(b, VF, b.add(up, at))
            e = exp_lanes(b, b.fneg(emit.call_named(b, "llvm.fabs.v16f32", VF, g)))
            positive = b.fcmp_ordered(">=", g, const(F32, 0.0))
            top = b.select(positive, const(F32, 1.0), e)
            sigmoid = b.fdiv(top, b.fadd(const(F32, 1.0), e))
            emit.store(b, b.fmul(b.fmul(g, sigmoid), u), b.add(out, at))
            return []

        emit.loop(b, I64(0), count, LANES, [], body)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 4), codegen


@njit(cache=True, nogil=True, parallel=PRANGE_ONLY)
def finish_layer(
    attended,
    value_dim,
    o_table,
    norm,
    eps,
    ff_table,
    down_table,
    x,
    packed,
    normed,
    hidden,
    n_threads,
):
    """x += W_o attended; x += W_down (silu(W_gate h) * W_up h), h = norm(x). In place on x.

    attended f32 (H, >= value_dim); ff_table: gate, up; hidden f32 (2 n_ff + 16,) scratch.
    """
    for h in range(attended.shape[0]):
        for c in range(value_dim):
            packed[h * value_dim + c] = attended[h, c]
    packed_quantized = _quantized(o_table, packed)
    for part in prange(n_threads):
        _matrices_part(o_table, packed, packed_quantized, normed, part, n_threads)
    for i in range(x.shape[0]):
        x[i] += normed[i]
    rms_norm(x, norm, eps, normed)
    normed_quantized = _quantized(ff_table, normed)
    for part in prange(n_threads):
        _matrices_part(ff_table, normed, normed_quantized, hidden, part, n_threads)
    n_ff = ff_table[0, ROWS]
    gate = hidden.ctypes.data
    _silu_multiply(gate, gate + 4 * n_ff, gate, n_ff)
    hidden_quantized = _quantized(down_table, hidden)
    for part in prange(n_threads):
        _matrices_part(down_table, hidden, hidden_quantized, normed, part, n_threads)
    for i in range(x.shape[0]):
        x[i] += normed[i]


@njit(cache=True, nogil=True, parallel=PRANGE_ONLY)
def output_logits(x, norm, eps, table, normed, logits, n_threads):
    """logits = W_out norm(x), f32 (n_vocab,)."""
    rms_norm(x, norm, eps, normed)
    quantized = _quantized(table, normed)
    for part in prange(n_threads):
        _matrices_part(table, normed, quantized, logits, part, n_threads)
