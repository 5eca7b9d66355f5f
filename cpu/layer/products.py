"""Products of matrices with a few rows, by the kernels of weights/dot.py: dense and of experts.

A table has a row for each matrix. A job is a matrix of the table with its inputs and results. Jobs
that do not depend on each other run together, and the threads share their cost evenly. A dense
matrix is one job with all rows of a step.
"""

import numpy as np
from numba import prange

from sparsekv_cli.cpu.jit.kernel import njit
from sparsekv_cli.cpu.jit.llvm import keep
from sparsekv_cli.cpu.jit.pool import N_REGIONS
from sparsekv_cli.cpu.jit.threads import PRANGE_ONLY
from sparsekv_cli.cpu.vector.put import put
from sparsekv_cli.cpu.weights.dot import call_rows
from sparsekv_cli.cpu.weights.integer import quantize_rows, quantized_stride
from sparsekv_cli.cpu.weights.interleaved import GROUP

# Columns of all tables of matrices (int64, one row a matrix), also of those of matmul_int8.py and
# matmul_bf16.py. A matrix may be the first of several that follow each other: ROWS is its own.
KERNEL, WEIGHTS, ROW_BYTES, ROWS = range(4)
# Columns of the tables here. PLANES: bytes of a quantised activation that the kernel takes; 0: it
# takes f32.
COLUMNS, PLANES = range(4, 6)
# Columns of a table of jobs, after those of its matrix.
SOURCE, SOURCE_ROW, N_INPUTS, OUT, OUT_ROW, N_COLUMNS = range(6, 12)
DECODING = 3  # cost of decoding a weight, in products with one input


def matrix_regions(tables) -> np.ndarray:
    """Returns int64 (matrices + N_REGIONS, 2): address and bytes of each matrix of ``tables``.

    They are in the order of their use. The first N_REGIONS are repeated at the end, because
    pool.expect reads N_REGIONS entries from any matrix on.
    """
    assert sum(len(table) for table in tables) >= N_REGIONS
    pairs = [(row[WEIGHTS], row[ROW_BYTES] * row[ROWS]) for table in tables for row in table]
    return np.array(pairs + pairs[:N_REGIONS], np.int64)


@njit(cache=True, nogil=True)
def most_planes(table):
    """Returns PLANES of the matrices that take quantised activations; all have the same number."""
    n_planes = 0
    for m in range(table.shape[0]):
        n_planes = max(n_planes, table[m, PLANES])
    return n_planes


@njit(cache=True, nogil=True)
def set_jobs(jobs, table, e, inputs, count, out, out_row):
    """Sets the jobs of the matrices of a table, for expert e. Their results lie side by side.

    inputs: address and bytes of a row in f32, then both for quantised rows.
    """
    x, x_row, quantized, quantized_row = inputs
    for m in range(table.shape[0]):
        put(jobs[m, : PLANES + 1], table[m])
        jobs[m, WEIGHTS] += e * table[m, ROWS] * table[m, ROW_BYTES]
        is_quantized = table[m, PLANES] > 0
        jobs[m, SOURCE] = quantized if is_quantized else x
        jobs[m, SOURCE_ROW] = quantized_row if is_quantized else x_row
        jobs[m, N_INPUTS], jobs[m, OUT], jobs[m, OUT_ROW] = count, out, out_row
        out += 4 * table[m, ROWS]


@njit(cache=True, nogil=True)
def _run_part(jobs, first, last):
    """Runs the rows whose summed cost lies between ``first`` and ``last``, in whole groups."""
    start = 0
    for j in range(jobs.shape[0]):
        n, cost = jobs[j, ROWS], jobs[j, ROW_BYTES] * (DECODING + jobs[j, N_INPUTS])
        low, high = max(0, first - start) // cost, max(0, last - start) // cost
        low = low // GROUP * GROUP if low < n else n
        high = high // GROUP * GROUP if high < n else n
        if low < high:
            call_rows(
                jobs[j, KERNEL], jobs[j, WEIGHTS], jobs[j, ROW_BYTES], jobs[j, COLUMNS],
                jobs[j, SOURCE], jobs[j, SOURCE_ROW], jobs[j, N_INPUTS], jobs[j, OUT],
                jobs[j, OUT_ROW], low, high,
            )  # fmt: skip
        start += n * cost


@njit(cache=True, nogil=True, parallel=PRANGE_ONLY)
def run_jobs(jobs, n_threads):
    """out[i] = W x[i], f32, for the matrix W and the inputs x[i] of each job."""
    total = 0
    for j in range(jobs.shape[0]):
        total += jobs[j, ROWS] * jobs[j, ROW_BYTES] * (DECODING + jobs[j, N_INPUTS])
    for part in prange(n_threads):
        _run_part(jobs, part * total // n_threads, (part + 1) * total // n_threads)


@njit(cache=True, nogil=True)
def multiply(table, x, n_rows, quantized, out, n_threads):
    """out[b] = the products of all matrices of a table with x[b], b < n_rows, concatenated.

    The matrices have the same number of columns. x, out f32 (>= n_rows, any). quantized uint8:
    scratch, a ``quantized_stride`` a row.
    """
    n, n_planes = table[0, COLUMNS], most_planes(table)
    stride, at, to = quantized_stride(n), x.ctypes.data, quantized.ctypes.data
    if n_planes:
        quantize_rows(at, x.strides[0], n_rows, n, n_planes, to, stride)
    jobs = np.empty((len(table), N_COLUMNS), np.int64)
    inputs = np.int64(at), x.strides[0], np.int64(to), stride
    set_jobs(jobs, table, 0, inputs, n_rows, np.int64(out.ctypes.data), out.strides[0])
    run_jobs(jobs, n_threads)


@njit(cache=True, nogil=True, parallel=PRANGE_ONLY)
def multiply_groups(table, offsets, x, out, n_threads):
    """out[p] = the products of an expert's matrices with x[p], side by side; all f32.

    table: of the first expert's matrices. Expert e has the pairs p, offsets[e] <= p < offsets[e+1].
    """
    n_pairs, n = x.shape
    n_experts, n_matrices, n_planes = offsets.shape[0] - 1, table.shape[0], most_planes(table)
    at, row, stride = x.ctypes.data, x.strides[0], quantized_stride(n)
    quantized = np.empty(n_pairs * stride if n_planes else 0, np.uint8)
    to = quantized.ctypes.data
    if n_planes:
        for part in prange(n_threads):
            first, last = part * n_pairs // n_threads, (part + 1) * n_pairs // n_threads
            places = at + first * row, to + first * stride
            quantize_rows(places[0], row, last - first, n, n_planes, places[1], stride)
    jobs, n_jobs = np.empty((n_experts * n_matrices, N_COLUMNS), np.int64), 0
    for e in range(n_experts):
        first, count = offsets[e], offsets[e + 1] - offsets[e]
        if count:
            inputs = at + first * row, row, to + first * stride, stride
            result = out.ctypes.data + first * out.strides[0]
            part_jobs = jobs[n_jobs : n_jobs + n_matrices]
            set_jobs(part_jobs, table, e, inputs, count, result, out.strides[0])
            n_jobs += n_matrices
    run_jobs(jobs[:n_jobs], n_threads)
    keep(quantized)
