"""Per-layer inputs, which a layer takes next to the residual stream: for chunks and decode steps.

An input is (norm(projection of the token's embedding) + the layer's own embedding) / sqrt(2).
A layer adds norm(W_out (act(W_gate x) * input)) to the stream.
"""

import numpy as np
from numba import prange

from sparsekv_cli.cpu.jit.kernel import njit
from sparsekv_cli.cpu.jit.threads import PRANGE_ONLY
from sparsekv_cli.cpu.jit.value import LANES
from sparsekv_cli.cpu.layer.activation import gate_lanes, gate_ref
from sparsekv_cli.cpu.layer.decode import add_rows
from sparsekv_cli.cpu.layer.products import ROWS, multiply
from sparsekv_cli.cpu.layer.rows import rms_norm, rounded, widen
from sparsekv_cli.cpu.layer.state import InputState, LayerState
from sparsekv_cli.cpu.vector.views import view

ROOT_HALF = np.float32(0.5**0.5)


@njit(cache=True, nogil=True)
def _make(projected, norm, eps, embedded, out):
    """Computes one layer's input of one token, f32 (n,).

    out = (rms_norm(projected) * norm + embedded) / sqrt(2). All arrays are f32 (n,). ``projected``
    is overwritten.
    """
    rms_norm(projected, norm, eps, projected)
    for c in range(norm.shape[0]):
        out[c] = (projected[c] + embedded[c]) * ROOT_HALF


@njit(cache=True, nogil=True, parallel=PRANGE_ONLY)
def gate_inputs(projected, norm, eps, embedded, gate, activation, out, n_threads):
    """out (T, n) = act(gate) * input; projected, gate, out: f32 or bf16; embedded f32 (T, n)."""
    n_rows, n = out.shape
    for part in prange(n_threads):
        work = np.zeros((3, n + LANES), np.float32)
        values, made, gates = work[0, :n], work[1, :n], work[2]
        for t in range(part * n_rows // n_threads, (part + 1) * n_rows // n_threads):
            for c in range(n):
                values[c] = widen(projected[t, c])
                gates[c] = widen(gate[t, c])
            _make(values, norm, eps, embedded[t], made)
            gate_lanes(work, activation, gates, made, gates, n)
            for c in range(n):
                out[t, c] = rounded(out, gates[c])


def gate_inputs_ref(projected, norm, eps, embedded, gate, activation) -> np.ndarray:
    """numpy reference of ``gate_inputs``, f32 or wider."""
    normed = projected / np.sqrt((projected**2).mean(-1, keepdims=True) + eps) * norm
    return gate_ref(activation, gate, (normed + embedded) / np.sqrt(2))


@njit(cache=True, nogil=True)
def make_inputs(table, x, projected, norm, eps, quantized, inputs, n_rows, n_threads):
    """Replaces the embeddings in ``inputs`` by the inputs of all layers, for n_rows rows.

    table: of the projection; x f32 (B, n_embd); inputs f32 (B, >= layers n). Scratch: projected, of
    the same shape; quantized uint8.
    """
    n, n_all = norm.shape[0], table[0, ROWS]
    multiply(table, x, n_rows, quantized, projected, n_threads)
    for b in range(n_rows):
        for at in range(0, n_all, n):
            own = inputs[b, at : at + n]
            _make(projected[b, at : at + n], norm, eps, own, own)


@njit(cache=True, nogil=True)
def add_input(at, input_at, n_rows, n_threads):
    """Adds a layer's input to x and scales x, for n_rows rows.

    at, input_at: of records of LayerState and of InputState.
    """
    layer, own = view(LayerState, at), view(InputState, input_at)
    n, x, quantized = own.n, layer.x, layer.quantized
    if n:
        multiply(own.matrices[:1], x, n_rows, quantized, own.hidden, n_threads)
        for b in range(n_rows):
            gate = own.hidden[b]
            gate_lanes(x, layer.activation, gate, own.inputs[b, own.first :], gate, n)
        multiply(own.matrices[1:], own.hidden, n_rows, quantized, layer.normed, n_threads)
        eps, one = np.float32(layer.eps), np.float32(1)
        add_rows(x, layer.normed, own.norm[:0], own.norm, eps, one, n_rows)
    scale = np.float32(own.scale)
    for b in range(n_rows):
        for c in range(layer.n_embd):
            x[b, c] *= scale
