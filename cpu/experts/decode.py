"""Runs a decode step's rows through a layer's experts, with the weights in the file's layout.

``next_expert_layer`` replaces ``next_layer`` of layer/decode.py: one call goes from a layer's
attention to the next layer's inputs. The rows are grouped by expert, so that an expert that several
sequences have chosen is read once. Products that do not depend on each other are one table of jobs.
The threads share its cost evenly.
"""

import numpy as np

from sparsekv_cli.cpu.experts.routing import (
    NO_BIAS,
    add_biases,
    group_rows,
    route_ref,
    route_row,
    sigmoid_product,
    weigh_row,
)
from sparsekv_cli.cpu.experts.state import MixtureState
from sparsekv_cli.cpu.jit.kernel import njit
from sparsekv_cli.cpu.jit.llvm import copy_bytes, keep
from sparsekv_cli.cpu.jit.pool import N_REGIONS, expect
from sparsekv_cli.cpu.layer.activation import gate_lanes
from sparsekv_cli.cpu.layer.decode import add_rows, finish_attention, project_qkv
from sparsekv_cli.cpu.layer.products import (
    N_COLUMNS,
    PLANES,
    ROW_BYTES,
    ROWS,
    WEIGHTS,
    most_planes,
    multiply,
    run_jobs,
    set_jobs,
)
from sparsekv_cli.cpu.layer.rows import rms_norm
from sparsekv_cli.cpu.layer.state import LayerState
from sparsekv_cli.cpu.vector.views import view
from sparsekv_cli.cpu.weights.integer import (
    quantize_activations,
    quantize_rows,
    quantized_stride,
)

# The matrices of such a layer's LayerState, after its inputs: o, the router, whose inputs are
# f32, and the shared expert's gate, up and down. These are zero if there is no shared expert. The
# architecture may have no gates.
ROUTER, SHARED = 1, 2


@njit(cache=True, nogil=True)
def _expect_down(matrix, offsets):
    """Announces the matrices of one kind of the first chosen experts, so that they are prefetched.

    matrix: the matrix of expert 0.
    """
    regions = np.zeros((N_REGIONS, 2), np.int64)
    size, n = matrix[ROWS] * matrix[ROW_BYTES], 0
    for e in range(offsets.shape[0] - 1):
        if offsets[e] < offsets[e + 1] and n < N_REGIONS:
            regions[n, 0], regions[n, 1] = matrix[WEIGHTS] + e * size, size
            n += 1
    expect(regions.ctypes.data)
    keep(regions)


@njit(cache=True, nogil=True, forceinline=True)
def gate_and_up(layer, mixture, given, offsets, rows, n_rows, jobs):
    """Sets the jobs of gate and up of the chosen and the shared experts; returns their number.

    layer, mixture: views of LayerState and MixtureState. given: addresses of the experts' inputs,
    in f32 and quantised.
    """
    n_embd, n_parts = layer.n_embd, mixture.n_parts
    x_row, stride = 4 * n_embd, quantized_stride(n_embd)
    hidden, hidden_row = mixture.hidden.ctypes.data, mixture.hidden.strides[0]
    n = 0
    for e in range(mixture.n_expert):
        first, count = offsets[e], offsets[e + 1] - offsets[e]
        if count == 0:
            continue
        b = rows[first]
        inputs = given[0] + b * x_row, x_row, given[1] + b * stride, stride
        if count > 1:
            at, row = mixture.gathered[first:].ctypes.data, mixture.gathered.strides[0]
            for p in range(count):
                b = rows[first + p]
                copy_bytes(given[0] + b * x_row, at + p * row, x_row)
                copy_bytes(given[1] + b * stride, at + p * row + x_row, stride)
            inputs = at, row, at + x_row, row
        table, out = mixture.matrices[:n_parts], hidden + first * hidden_row
        set_jobs(jobs[n : n + n_parts], table, e, inputs, count, out, hidden_row)
        n += n_parts
    if mixture.n_shared:
        table = layer.matrices[layer.n_inputs + SHARED : layer.matrices.shape[0] - 1]
        inputs = layer.normed.ctypes.data, x_row, layer.quantized.ctypes.data, stride
        out = hidden + rows.shape[0] * hidden_row
        set_jobs(jobs[n : n + len(table)], table, 0, inputs, n_rows, out, hidden_row)
        n += len(table)
    return n


@njit(cache=True, nogil=True)
def _gate_rows(activation, hidden, quantized, n_ff, n_planes):
    """Overwrites the gate of slots by act(gate) * up; quantises it if n_planes is not 0.

    hidden f32 (slots, >= 2 n_ff), quantized uint8 (slots, row).
    """
    for p in range(hidden.shape[0]):
        gate_lanes(hidden, activation, hidden[p], hidden[p, n_ff:], hidden[p], n_ff)
        if n_planes:
            quantize_activations(n_planes, hidden[p], quantized[p], n_ff)


@njit(cache=True, nogil=True, forceinline=True)
def _down(layer, mixture, offsets, n_slots, n_rows, jobs):
    """Sets the jobs of down of the chosen and the shared experts; returns their number."""
    hidden, row = mixture.hidden.ctypes.data, mixture.hidden.strides[0]
    quantized, stride = mixture.quantized.ctypes.data, mixture.quantized.strides[0]
    results, result_row, n = mixture.results.ctypes.data, 4 * layer.n_embd, 0
    for e in range(mixture.n_expert):
        first, count = offsets[e], offsets[e + 1] - offsets[e]
        if count:
            inputs = hidden + first * row, row, quantized + first * stride, stride
            table, out = mixture.matrices[mixture.n_parts :], results + first * result_row
            set_jobs(jobs[n : n + 1], table, e, inputs, count, out, result_row)
            n += 1
    if mixture.n_shared:
        inputs = hidden + n_slots * row, row, quantized + n_slots * stride, stride
        out = results + n_slots * result_row
        set_jobs(jobs[n : n + 1], layer.matrices[-1:], 0, inputs, n_rows, out, result_row)
        n += 1
    return n


@njit(cache=True, nogil=True)
def add_experts(at, mixture_at, n_rows, n_threads):
    """x += s (the experts of a layer over ``normed``), for n_rows rows; s: residual_scale.

    at, mixture_at: of records of LayerState and of MixtureState. If router and experts have their
    own norms, these are norms of x, and only the shared expert takes ``normed``. Then both results
    have a norm, too.
    """
    layer, mixture = view(LayerState, at), view(MixtureState, mixture_at)
    n_embd, n_expert, n_used = layer.n_embd, mixture.n_expert, mixture.n_used
    n_slots, n_parts, eps = n_rows * n_used, mixture.n_parts, np.float32(layer.eps)
    matrices, table = layer.matrices[layer.n_inputs :], mixture.matrices
    last = matrices.shape[0] - 1
    x, normed, results = layer.x, layer.normed, mixture.results
    has_norms = mixture.router_norm.shape[0] > 0
    routed, given = normed, np.int64(normed.ctypes.data)
    own = np.empty((2, n_rows if has_norms else 0, n_embd), np.float32)
    if has_norms:
        routed, given = own[0], np.int64(own[1].ctypes.data)
        for b in range(n_rows):
            rms_norm(x[b], mixture.router_norm, eps, own[0, b])
            rms_norm(x[b], mixture.expert_norm, eps, own[1, b])
    logits = np.empty((n_rows, n_expert), np.float32)
    expect(layer.regions[layer.n_inputs + SHARED :].ctypes.data)
    table_of_router = matrices[ROUTER : ROUTER + 1]
    multiply(table_of_router, routed, n_rows, layer.quantized, logits, n_threads)
    chosen, weights = np.empty((n_rows, n_used), np.int64), np.empty((n_rows, n_used), np.float32)
    offsets, rows = np.empty(n_expert + 1, np.int64), np.empty(n_slots, np.int64)
    places = np.empty((n_rows, n_used), np.int64)
    for b in range(n_rows):
        for e in range(mixture.router_bias.shape[0]):
            logits[b, e] += mixture.router_bias[e]
        route_row(
            logits[b], mixture.choice_bias, mixture.sigmoid, mixture.normalised,
            (mixture.n_group, mixture.n_group_used), chosen[b], weights[b],
        )  # fmt: skip
        if mixture.result_scale.shape[0]:
            for j in range(n_used):
                weights[b, j] *= mixture.result_scale[chosen[b, j]]
    group_rows(chosen, offsets, rows, places)

    n_planes = max(most_planes(table[:n_parts]), most_planes(matrices[SHARED:last]))
    stride, quantized = quantized_stride(n_embd), np.int64(layer.quantized.ctypes.data)
    if n_planes:
        quantize_rows(normed.ctypes.data, 4 * n_embd, n_rows, n_embd, n_planes, quantized, stride)
    own_quantized = np.empty(n_rows * stride if has_norms and n_planes else 0, np.uint8)
    if has_norms and n_planes:
        quantized = np.int64(own_quantized.ctypes.data)
        quantize_rows(given, 4 * n_embd, n_rows, n_embd, n_planes, quantized, stride)
    jobs = np.empty((2 * (min(n_slots, n_expert) + 1), N_COLUMNS), np.int64)
    _expect_down(table[n_parts], offsets)
    n = gate_and_up(layer, mixture, (given, quantized), offsets, rows, n_rows, jobs)
    run_jobs(jobs[:n], n_threads)
    keep(own)
    keep(own_quantized)
    hidden, to = mixture.hidden, mixture.quantized
    if mixture.hidden_bias.shape[0]:
        add_biases(hidden, offsets, mixture.hidden_bias, n_threads)
    n_planes = table[n_parts, PLANES]
    _gate_rows(layer.activation, hidden[:n_slots], to[:n_slots], mixture.n_ff, n_planes)
    if mixture.n_shared:
        n_planes, shared = matrices[last, PLANES], slice(n_slots, n_slots + n_rows)
        _gate_rows(layer.activation, hidden[shared], to[shared], mixture.n_shared, n_planes)
    expect(layer.regions[layer.matrices.shape[0] :].ctypes.data)
    run_jobs(jobs[: _down(layer, mixture, offsets, n_slots, n_rows, jobs)], n_threads)

    if mixture.result_bias.shape[0]:
        add_biases(results, offsets, mixture.result_bias, n_threads)
    for b in range(n_rows):
        weight, shared_row = sigmoid_product(normed[b], mixture.shared_gate), results[n_slots + b]
        weigh_row(results, places[b], weights[b], normed[b])
        if has_norms:
            rms_norm(normed[b], mixture.result_norm, eps, normed[b])
            rms_norm(shared_row, mixture.shared_norm, eps, shared_row)
        if mixture.n_shared:
            for c in range(n_embd):
                normed[b, c] += weight * shared_row[c]
    scale = np.float32(layer.residual_scale)
    add_rows(x, normed, layer.o_bias[:0], layer.ffn_post_norm, eps, scale, n_rows)


@njit(cache=True, nogil=True)
def next_expert_layer(at, mixture_at, following, attended, n_rows, n_threads):
    """Runs a layer after its attention, then ``project_qkv`` of the next one.

    following: the address of the next layer's LayerState; 0: there is none.
    """
    finish_attention(at, attended, n_rows, n_threads)
    add_experts(at, mixture_at, n_rows, n_threads)
    if following:
        project_qkv(following, n_rows, n_threads)


def experts_ref(
    normed, router, gates, ups, downs, n_used, normalised, bias=NO_BIAS, given=None, scale=None
) -> np.ndarray:
    """numpy reference of the chosen experts' sum: normed (B, n_embd), f64 of the same shape.

    given: the experts' inputs; None: normed. scale (experts,): factors of their results; None: 1.
    router (experts, n_embd); gates, ups (experts, n_ff, n_embd); downs (experts, n_embd, n_ff).
    """
    chosen, weights = route_ref(normed @ router.T, bias, n_used, normalised, len(bias) > 0)
    out = np.zeros(normed.shape)
    weights = weights if scale is None else weights * scale[chosen]
    for b, row in enumerate(normed if given is None else given):
        for e, weight in zip(chosen[b], weights[b], strict=True):
            gate = gates[e] @ row
            out[b] += weight * (downs[e] @ (gate / (1 + np.exp(-gate)) * (ups[e] @ row)))
    return out
