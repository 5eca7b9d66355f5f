"""Products of matrices with a few rows, by the kernels of weights/dot.py: dense and of experts.

A table has a row for each matrix. A job is a matrix of the table with its inputs and results. Jobs
that do not depend on each other run together, and the threads share their cost evenly. A dense
matrix is one job with all rows of a step.
"""

import numpy as np
from numba import prange

from sparsekv_cli.cpu.jit.kernel import njit
from sparsekv_cli.cpu.jit.llvm import keep
from sparsekv_cli.cpu.jit.pointers import address
from sparsekv_cli.cpu.jit.pool import N_REGIONS
from sparsekv_cli.cpu.jit.threads import PRANGE_ONLY
from sparsekv_cli.cpu.vector.put import put
from sparsekv_cli.cpu.weights.dot import call_rows, kernel_address
from sparsekv_cli.cpu.weights.formats import FORMAT_OF_CODE
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


def matrix_table(linears, n_planes, n_matrices=1) -> np.ndarray:
    """Returns the kernels' matrix table int64 (matrices, 6); the caller keeps the weights alive.

    linears: objects with code, data uint8 (rows, row bytes), n_columns and repacked. Block formats
    get integer kernels, which take activations of ``n_planes`` bytes. With two bytes they are 1.3
    (Q5_1) to 1.7 (Q4_K) times as fast as f32 kernels on an AVX-512 thread. n_matrices: the equal
    matrices that each of ``linears`` consists of.
    """
    rows = []
    for w in linears:
        planes = n_planes if FORMAT_OF_CODE[w.code].decode is not None else 0
        kernel = kernel_address(w.code, planes, w.repacked)
        n_rows, row_bytes = len(w.data) // n_matrices, w.data.strides[0]
        rows.append((kernel, address(w.data), row_bytes, n_rows, w.n_columns, planes))
    return np.array(rows, np.int64)


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
def multiply(table, x, x_row, n_rows, quantized, out, out_row, n_threads):
    """out[b] = the products of all matrices of a table with x[b], b < n_rows, concatenated.

    The matrices have the same number of columns. x, out: addresses of f32 rows, x_row and out_row
    bytes apart. quantized: address of scratch, a ``quantized_stride`` a row.
    """
    n = table[0, COLUMNS]
    n_planes, stride = most_planes(table), quantized_stride(n)
    if n_planes:
        quantize_rows(x, x_row, n_rows, n, n_planes, quantized, stride)
    jobs = np.empty((len(table), N_COLUMNS), np.int64)
    inputs = np.int64(x), x_row, np.int64(quantized), stride
    set_jobs(jobs, table, 0, inputs, n_rows, np.int64(out), out_row)
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
