"""Decode steps of a layer in two stages around the attention, with the weights in file layout.

``project_qkv``: RMS norm, q/k/v, biases, q/k norm, rotation. ``finish_attention``: output
projection, residual, RMS norm. ``finish_layer``: ``finish_attention``, the gated feed-forward and
its residual. Each addition to the residual stream may have its own RMS norm. ``next_layer`` joins
a layer's second stage and the next layer's first stage. One call saves microseconds for the
arguments. For the same reason all constant arguments are in a record of LayerState, whose address
the functions get.
experts/decode.py has layers with experts. A step has one or several rows (sequences), which share
every weight that is loaded.
"""

import numpy as np
from numba import carray

from sparsekv_cli.cpu.jit.kernel import njit
from sparsekv_cli.cpu.jit.llvm import LANES, sum_squares
from sparsekv_cli.cpu.jit.pointers import float_pointer
from sparsekv_cli.cpu.jit.pool import expect
from sparsekv_cli.cpu.layer.activation import SIGMOID, gate_lanes
from sparsekv_cli.cpu.layer.products import multiply
from sparsekv_cli.cpu.layer.state import LayerState
from sparsekv_cli.cpu.vector.views import view

# The matrices of a layer after its n_inputs are o, gate, up and down. A feed-forward may lack the
# gate, and a layer may lack the feed-forward.


@njit(cache=True, nogil=True)
def floats(address, n):
    """Returns the f32 array (n,) at an address; an empty one for address 0."""
    return carray(float_pointer(address), n if address else 0)


@njit(cache=True, nogil=True)
def float_rows(address, n_rows, n):
    """Returns the f32 array (n_rows, n) at an address."""
    return carray(float_pointer(address), (n_rows, n))


@njit(cache=True, nogil=True)
def rms_norm(x, weight, eps, out):
    """out = x / sqrt(mean(x^2) + eps) * weight, all f32 (n,)."""
    scale = np.float32(1) / np.sqrt(sum_squares(x) / np.float32(x.shape[0]) + eps)
    for i in range(x.shape[0]):
        out[i] = x[i] * scale * weight[i]


@njit(cache=True, nogil=True)
def _norm_input(x, weight, eps, out):
    """Sets out (n_rows, n) to the RMS norm of each row of x; to the row if ``weight`` is empty."""
    for b in range(out.shape[0]):
        if weight.shape[0]:
            rms_norm(x[b], weight, eps, out[b])
        else:
            out[b] = x[b]


@njit(cache=True, nogil=True)
def _norm_all_heads(raw, bias, norm, eps):
    """Adds the bias to all heads raw f32 (heads d,), and norms them together, in place."""
    for c in range(bias.shape[0]):
        raw[c] += bias[c]
    rms_norm(raw, norm, eps, raw)


@njit(cache=True, nogil=True)
def _rotate_heads(raw, d, bias, norm, eps, cos, sin, scale, interleaved, out_nope, out):
    """Applies bias, norm, scale and rotation to one token's heads.

    raw f32 (heads, >= d): projected heads in the file's order. norm f32 (d,), or as long as all
    heads: then these are normed together. out_nope, out f32 (heads, >= d): in
    half-split order, before and after the rotation.
    """
    half = cos.shape[0]
    if norm.shape[0] > d:
        _norm_all_heads(raw.reshape(raw.size), bias, norm, eps)
        bias, norm = bias[:0], norm[:0]
    for h in range(raw.shape[0]):
        head = raw[h, :d]
        if bias.shape[0]:
            for c in range(d):
                head[c] += bias[h * d + c]
        if norm.shape[0]:
            rms_norm(head, norm, eps, head)
        if scale != np.float32(1):
            for c in range(d):
                head[c] *= scale
        if interleaved:
            for i in range(half):
                out_nope[h, i] = head[2 * i]
                out_nope[h, i + half] = head[2 * i + 1]
        else:
            for i in range(2 * half):
                out_nope[h, i] = head[i]
        for c in range(2 * half, d):
            out_nope[h, c] = head[c]
            out[h, c] = head[c]
        for i in range(half):
            a, b = out_nope[h, i], out_nope[h, i + half]
            out[h, i] = a * cos[i] - b * sin[i]
            out[h, i + half] = a * sin[i] + b * cos[i]


@njit(cache=True, nogil=True)
def project_qkv(at, n_rows, n_threads):
    """Computes q, k, v, q_nope, k_nope of a layer from x, for n_rows rows.

    at: of a record of LayerState. For a recurrent layer it computes only ``projected``. Before that
    it does the same for the next layer, if that has the same input.
    """
    partner = view(LayerState, at).partner
    if partner:
        _project(partner, n_rows, n_threads)
    _project(at, n_rows, n_threads)


@njit(cache=True, nogil=True)
def _project(at, n_rows, n_threads):
    """See ``project_qkv``."""
    layer = view(LayerState, at)
    n_embd, d, d_v, eps = layer.n_embd, layer.head_dim, layer.value_dim, np.float32(layer.eps)
    n_head, n_kv, normed = layer.n_head, layer.n_head_kv, layer.normed
    _norm_input(layer.x, layer.attn_norm, eps, normed[:n_rows])
    expect(layer.regions[layer.n_inputs :].ctypes.data)
    multiply(
        layer.matrices[: layer.n_inputs], normed.ctypes.data, 4 * n_embd, n_rows,
        layer.quantized.ctypes.data, layer.projected.ctypes.data, layer.projected.strides[0],
        n_threads,
    )  # fmt: skip
    q_row = 2 * d if layer.gated else d
    half, one = layer.n_rot // 2, np.float32(1)
    for b in range(n_rows if n_head else 0):
        cos, sin, raw = layer.cos[b, :half], layer.sin[b, :half], layer.projected[b].ctypes.data
        _rotate_heads(
            float_rows(raw, n_head, q_row), d, layer.q_bias, layer.q_norm, eps, cos, sin,
            layer.q_scale[b], layer.interleaved, layer.q_nope[b], layer.q[b],
        )  # fmt: skip
        raw += 4 * n_head * q_row
        _rotate_heads(
            float_rows(raw, n_kv, d), d, layer.k_bias, layer.k_norm, eps, cos, sin, one,
            layer.interleaved, layer.k_nope[b], layer.k[b],
        )  # fmt: skip
        raw_v, v = float_rows(raw + 4 * n_kv * d, n_kv, d_v), layer.v[b]
        for g in range(n_kv):
            for c in range(d_v):
                v[g, c] = raw_v[g, c]
            if layer.v_bias.shape[0]:
                for c in range(d_v):
                    v[g, c] += layer.v_bias[g * d_v + c]
            if layer.v_norm.shape[0]:
                rms_norm(v[g, :d_v], layer.v_norm, eps, v[g, :d_v])


@njit(cache=True, nogil=True)
def add_rows(x, y, norm, eps, scale, n_rows):
    """x += scale y, or scale norm(y) if ``norm`` is not empty; f32 (>= n_rows, n); y may change."""
    for b in range(n_rows):
        if norm.shape[0]:
            rms_norm(y[b], norm, eps, y[b])
        for c in range(x.shape[1]):
            x[b, c] += scale * y[b, c]


@njit(cache=True, nogil=True)
def _gate_heads(projected, n_head, packed, n_rows):
    """packed f32 (n_rows H, d_v) times the sigmoid of the gates in ``projected``."""
    d, one = packed.shape[1], np.float32(1)
    whole = d // LANES * LANES
    for h in range(n_rows * n_head):
        gate, x = projected[h // n_head, (2 * (h % n_head) + 1) * d :], packed[h]
        gate_lanes(packed, SIGMOID, gate.ctypes.data, x.ctypes.data, x.ctypes.data, whole)
        for c in range(whole, d):
            x[c] /= one + np.exp(-gate[c])


@njit(cache=True, nogil=True)
def finish_attention(at, attended, n_rows, n_threads):
    """x += s (W_o attended + b); normed = norm(x), for n_rows rows; s: residual_scale.

    at: of a record of LayerState. attended f32 (n_rows H, >= d_v): the heads of the first row, then
    those of the next. A recurrent layer has (n_rows, d_v).
    """
    layer = view(LayerState, at)
    n_embd, n_head, d_v = layer.n_embd, max(1, layer.n_head), layer.value_dim
    x, normed, packed, bias = layer.x, layer.normed, layer.packed, layer.o_bias
    for h in range(n_rows * n_head):
        for c in range(d_v):
            packed[h, c] = attended[h, c]
    if layer.gated:
        _gate_heads(layer.projected, n_head, packed, n_rows)
    o = layer.n_inputs
    expect(layer.regions[o + 1 :].ctypes.data)
    multiply(
        layer.matrices[o : o + 1], packed.ctypes.data, 4 * n_head * d_v, n_rows,
        layer.quantized.ctypes.data, normed.ctypes.data, 4 * n_embd, n_threads,
    )  # fmt: skip
    if bias.shape[0]:
        for b in range(n_rows):
            for c in range(n_embd):
                normed[b, c] += bias[c]
    eps = np.float32(layer.eps)
    add_rows(x, normed, layer.attn_post_norm, eps, np.float32(layer.residual_scale), n_rows)
    _norm_input(x, layer.ffn_norm, eps, normed[:n_rows])


@njit(cache=True, nogil=True)
def finish_layer(at, attended, n_rows, n_threads):
    """Runs ``finish_attention``, then x += s W_down (act(W_gate normed) * W_up normed), if any."""
    finish_attention(at, attended, n_rows, n_threads)
    layer = view(LayerState, at)
    n_embd, n_ff, first, n = layer.n_embd, layer.n_ff, layer.n_inputs + 1, layer.matrices.shape[0]
    if first == n:
        return
    hidden, hidden_row = layer.hidden.ctypes.data, layer.hidden.strides[0]
    normed, quantized = layer.normed.ctypes.data, layer.quantized.ctypes.data
    expect(layer.regions[n - 1 :].ctypes.data)
    multiply(
        layer.matrices[first : n - 1], normed, 4 * n_embd, n_rows, quantized, hidden, hidden_row,
        n_threads,
    )  # fmt: skip
    for b in range(n_rows):
        gate = hidden + b * hidden_row
        gate_lanes(layer.x, layer.activation, gate, gate + 4 * n_ff, gate, n_ff)
    expect(layer.regions[n:].ctypes.data)
    multiply(
        layer.matrices[n - 1 : n], hidden, hidden_row, n_rows, quantized, normed,
        4 * n_embd, n_threads,
    )  # fmt: skip
    eps, scale = np.float32(layer.eps), np.float32(layer.residual_scale)
    add_rows(layer.x, layer.normed, layer.ffn_post_norm, eps, scale, n_rows)


@njit(cache=True, nogil=True)
def next_layer(at, following, attended, n_rows, n_threads):
    """Runs ``finish_layer``, then ``project_qkv`` of the next layer.

    following: the address of its record; 0: there is none.
    """
    finish_layer(at, attended, n_rows, n_threads)
    if following:
        project_qkv(following, n_rows, n_threads)


@njit(cache=True, nogil=True)
def output_logits(x, norm, eps, table, following, normed, quantized, logits, n_threads):
    """logits[b] = W_out norm(x[b]), f32 (B, n_vocab), for x f32 (>= B, n_embd).

    following: address of the ``regions`` that the next step reads first. Scratch: normed f32
    (>= B, n_embd), quantized uint8 (>= B, quantized_stride(n_embd)).
    """
    n_rows, n_embd = logits.shape[0], x.shape[1]
    for b in range(n_rows):
        rms_norm(x[b], norm, eps, normed[b])
    expect(following)
    multiply(
        table, normed.ctypes.data, 4 * n_embd, n_rows, quantized.ctypes.data, logits.ctypes.data,
        4 * logits.shape[1], n_threads,
    )  # fmt: skip
