"""The steps of latent attention in a decode step, with the weights in the file's layout.

A head's query is multiplied by the head's matrix of keys. Its product with a row's latent vector is
then the product with the head's key. The mean of latent vectors is multiplied by the head's matrix
of values. All rows of a step share the loads of both matrices.
"""

import numpy as np

from sparsekv_cli.cpu.jit.kernel import njit
from sparsekv_cli.cpu.latent.prefill import turn_pairs
from sparsekv_cli.cpu.latent.state import LatentState
from sparsekv_cli.cpu.layer.products import COLUMNS, N_COLUMNS, PLANES, multiply, run_jobs, set_jobs
from sparsekv_cli.cpu.layer.rows import rms_norm
from sparsekv_cli.cpu.vector.put import put
from sparsekv_cli.cpu.vector.views import view
from sparsekv_cli.cpu.weights.integer import quantize_rows


@njit(cache=True, nogil=True)
def _multiply_heads(this, matrix, x, x_row, x_head, out, out_row, out_head, n_rows, n_threads):
    """Multiplies the inputs of each head by the head's matrix, for n_rows rows.

    matrix: a table with that of head 0. x, out: addresses of the first row of head 0.
    x_row, x_head, out_row, out_head: bytes from one row, or from one head, to the next.
    """
    jobs, n = np.empty((this.n_head, N_COLUMNS), np.int64), matrix[0, COLUMNS]
    planes, stride = matrix[0, PLANES], this.quantized.strides[0]
    for h in range(this.n_head):
        source, to = x + h * x_head, np.int64(this.quantized[h * n_rows :].ctypes.data)
        if planes:
            quantize_rows(source, x_row, n_rows, n, planes, to, stride)
        inputs = source, x_row, to, stride
        set_jobs(jobs[h : h + 1], matrix, h, inputs, n_rows, out + h * out_head, out_row)
    run_jobs(jobs, n_threads)


@njit(cache=True, nogil=True)
def latent_inputs(at, n_rows, n_threads):
    """Computes q, k, q_nope, k_nope of a layer from ``projected``, for n_rows rows.

    at: of a record of LatentState. ``projected`` has the queries, or the vector that they are
    projected from; then the latent vector and the rotated dims of the token's row.
    """
    this = view(LatentState, at)
    n_nope, n_rot, eps, half = this.n_nope, this.n_rot, np.float32(this.eps), this.n_rot // 2
    n_queries, n_rank, n_rank_q = this.queries.shape[1], this.n_rank, this.q_norm.shape[0]
    n_head, first = this.n_head, n_rank_q if n_rank_q else n_queries
    for b in range(n_rows):
        raw = this.projected[b]
        if n_rank_q:
            rms_norm(raw[:n_rank_q], this.q_norm, eps, this.normed[b, :n_rank_q])
        else:
            put(this.queries[b, :n_queries], raw)
        row, pairs = raw[first : first + n_rank], raw[first + n_rank :]
        rms_norm(row, this.kv_norm, eps, this.k[b, n_rot : n_rot + n_rank])
        put(this.k_nope[b, n_rot:], this.k[b, n_rot:])
        turn_pairs(pairs, this.cos[b, :half], this.sin[b, :half], this.k_nope[b], this.k[b])
    if n_rank_q:
        multiply(this.matrices[2:], this.normed, n_rows, this.quantized, this.queries, n_threads)
    for b in range(n_rows):
        for h in range(n_head):
            pairs = this.queries[b, h * (n_nope + n_rot) + n_nope :]
            turn_pairs(
                pairs, this.cos[b, :half], this.sin[b, :half], this.q_nope[b, h], this.q[b, h]
            )
    _multiply_heads(
        this, this.matrices[:1], np.int64(this.queries.ctypes.data), this.queries.strides[0],
        4 * (n_nope + n_rot), np.int64(this.q.ctypes.data) + 4 * n_rot, this.q.strides[0],
        this.q.strides[1], n_rows, n_threads,
    )  # fmt: skip
    for b in range(n_rows):
        for h in range(n_head):
            put(this.q_nope[b, h, n_rot:], this.q[b, h, n_rot:])


@njit(cache=True, nogil=True)
def latent_values(at, attended, n_rows, n_threads):
    """Computes ``values`` from attended f32 (n_rows H, >= W), for n_rows rows.

    at: of a record of LatentState. The rotated dims of ``attended`` are not read.
    """
    this = view(LatentState, at)
    row = attended.strides[0]
    n_value = this.values.shape[1] // this.n_head
    _multiply_heads(
        this, this.matrices[1:2], np.int64(attended.ctypes.data) + 4 * this.n_rot,
        this.n_head * row, row, np.int64(this.values.ctypes.data), this.values.strides[0],
        4 * n_value, n_rows, n_threads,
    )  # fmt: skip
