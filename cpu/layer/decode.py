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

from sparsekv_cli.cpu.jit.kernel import njit
from sparsekv_cli.cpu.jit.pool import expect
from sparsekv_cli.cpu.layer.activation import gate_lanes
from sparsekv_cli.cpu.layer.products import multiply
from sparsekv_cli.cpu.layer.rows import HeadWeights, add_row, gate_row, rms_norm, split_row
from sparsekv_cli.cpu.layer.state import LayerState
from sparsekv_cli.cpu.vector.views import view

# The matrices of a layer after its n_inputs are o, gate, up and down. A feed-forward may lack the
# gate, and a layer may lack the feed-forward.


@njit(cache=True, nogil=True)
def norm_rows(x, weight, eps, out, n_rows):
    """Sets the first n_rows rows of out to the RMS norm of those of x; see ``rms_norm``."""
    for b in range(n_rows):
        rms_norm(x[b], weight, eps, out[b])


@njit(cache=True, nogil=True)
def add_rows(x, y, bias, norm, eps, scale, n_rows):
    """x += scale norm(y + bias); f32 (>= n_rows, n); y may change. See ``add_row``."""
    for b in range(n_rows):
        add_row(x[b], y[b], bias, norm, eps, scale, y[b])


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
    d, d_v, eps, inputs = layer.head_dim, layer.value_dim, np.float32(layer.eps), layer.n_inputs
    n_head, n_kv, normed = layer.n_head, layer.n_head_kv, layer.normed
    norm_rows(layer.x, layer.attn_norm, eps, normed, n_rows)
    expect(layer.regions[inputs:].ctypes.data)
    matrices = layer.matrices[:inputs]
    multiply(matrices, normed, n_rows, layer.quantized, layer.projected, n_threads)
    if n_head == 0:
        return
    weights = HeadWeights(
        layer.q_bias, layer.k_bias, layer.v_bias, layer.q_norm, layer.k_norm, layer.v_norm
    )
    form = layer.interleaved, layer.gated, d, d_v
    half, work = layer.n_rot // 2, np.empty((2, max(d, d_v)), np.float32)
    for b in range(n_rows):
        turn = layer.cos[b, :half], layer.sin[b, :half]
        outs = (
            _one_row(layer.q[b], n_head), _one_row(layer.k[b], n_kv), _one_row(layer.v[b], n_kv),
            _one_row(layer.q_nope[b], n_head), _one_row(layer.k_nope[b], n_kv),
        )  # fmt: skip
        split_row(layer.projected[b], weights, eps, turn, layer.q_scale[b], form, 0, work, outs)


@njit(cache=True, nogil=True)
def _one_row(heads, count):
    """Returns the first ``count`` of heads (>= count, d) as (count, 1, d)."""
    return heads[:count].reshape(count, 1, heads.shape[1])


@njit(cache=True, nogil=True)
def finish_attention(at, attended, n_rows, n_threads):
    """x += s (W_o attended + b); normed = norm(x), for n_rows rows; s: residual_scale.

    at: of a record of LayerState. attended f32 (n_rows H, >= d_v): the heads of the first row, then
    those of the next. A recurrent layer has (n_rows, d_v).
    """
    layer = view(LayerState, at)
    n_head, d_v = max(1, layer.n_head), layer.value_dim
    x, normed, packed = layer.x, layer.normed, layer.packed
    for h in range(n_rows * n_head):
        for c in range(d_v):
            packed[h, c] = attended[h, c]
    for b in range(n_rows if layer.gated else 0):
        heads = packed[b * n_head : (b + 1) * n_head].reshape(n_head * d_v)
        gate_row(layer.projected[b], heads, d_v, heads)
    o = layer.n_inputs
    expect(layer.regions[o + 1 :].ctypes.data)
    rows = packed[: n_rows * n_head].reshape(n_rows, n_head * d_v)
    multiply(layer.matrices[o : o + 1], rows, n_rows, layer.quantized, normed, n_threads)
    eps, scale = np.float32(layer.eps), np.float32(layer.residual_scale)
    add_rows(x, normed, layer.o_bias, layer.attn_post_norm, eps, scale, n_rows)
    norm_rows(x, layer.ffn_norm, eps, normed, n_rows)


@njit(cache=True, nogil=True)
def finish_layer(at, attended, n_rows, n_threads):
    """Runs ``finish_attention``, then x += s W_down (act(W_gate normed) * W_up normed), if any."""
    finish_attention(at, attended, n_rows, n_threads)
    layer = view(LayerState, at)
    n_ff, first, n = layer.n_ff, layer.n_inputs + 1, layer.matrices.shape[0]
    if first == n:
        return
    normed, hidden, quantized = layer.normed, layer.hidden, layer.quantized
    expect(layer.regions[n - 1 :].ctypes.data)
    multiply(layer.matrices[first : n - 1], normed, n_rows, quantized, hidden, n_threads)
    for b in range(n_rows):
        gate_lanes(hidden, layer.activation, hidden[b], hidden[b, n_ff:], hidden[b], n_ff)
    expect(layer.regions[n:].ctypes.data)
    multiply(layer.matrices[n - 1 : n], hidden, n_rows, quantized, normed, n_threads)
    eps, scale = np.float32(layer.eps), np.float32(layer.residual_scale)
    add_rows(layer.x, normed, layer.o_bias[:0], layer.ffn_post_norm, eps, scale, n_rows)


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
    norm_rows(x, norm, eps, normed, len(logits))
    expect(following)
    multiply(table, normed, len(logits), quantized, logits, n_threads)
