"""Matrix products of a prefilled chunk in bf16, by the CPU's own instructions (jit/bf16.py).

COLUMNS rows of the weights are a panel. A task is some panels of an expert, or of the one that
stands for a layer without experts. It dequantises a block of columns of a panel into its
own scratch. The scratch has pairs of bf16 of one row, with the pairs of all rows side by side. The
task multiplies the chunk's rows by the panel. Then it takes its next panel, and after the last one
the next block of columns.
A block of the chunk stays in the L2 cache and a panel in L1. A thread has at most one panel of the
weights as bf16. A bf16 is stored as a uint16.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numba import prange

from sparsekv_cli.cpu.jit import bf16, llvm
from sparsekv_cli.cpu.jit.bf16 import PAIRS, ROWS, narrowed
from sparsekv_cli.cpu.jit.emitter import emitter
from sparsekv_cli.cpu.jit.kernel import njit
from sparsekv_cli.cpu.jit.llvm import tasks_of
from sparsekv_cli.cpu.jit.pointers import address, on_lines
from sparsekv_cli.cpu.jit.threads import PRANGE_ONLY
from sparsekv_cli.cpu.jit.value import LANES, VF, VI, load, store
from sparsekv_cli.cpu.layer.products import KERNEL, ROW_BYTES, WEIGHTS
from sparsekv_cli.cpu.layer.products import ROWS as MATRIX_ROWS
from sparsekv_cli.cpu.layer.rows import rounded
from sparsekv_cli.cpu.weights import dot
from sparsekv_cli.cpu.weights.dot import call_dequantize
from sparsekv_cli.cpu.weights.formats import FORMAT_OF_CODE

VECTORS = 2 if bf16.HAS_TILES else 4  # vectors of 16 results that a product computes for an input
COLUMNS = VECTORS * LANES  # weight rows of a panel
BLOCK_COLUMNS = 288  # columns of the weights in a block: their panel stays in the L1 cache
TASK_TILES = 16  # tiles of rows at a time
TASK_PANELS = 8  # most panels of a task: their sums for TASK_TILES tiles are half a megabyte
TASKS_A_THREAD = 4  # fewest, if there are enough panels: threads then end together

# Columns of a table after those of all tables (layer/products.py). KERNEL: ``rows_dequantize``.
BLOCK_SIZE, BLOCK_BYTES = range(4, 6)


def product_table(matrices: Sequence[tuple[int, np.ndarray]], n_experts: int = 1) -> np.ndarray:
    """Returns a table int64 (matrices, 6) of (ggml type, uint8 (rows, row bytes)).

    The caller keeps the weights alive. n_experts: the equal matrices that each consists of.
    """
    rows = []
    for code, w in matrices:
        format_, decoder = FORMAT_OF_CODE[code], dot.dequantize_address(code, dot.TO_BF16)
        shape = address(w), w.strides[0], len(w) // n_experts
        rows.append((decoder, *shape, format_.n_elements, format_.n_bytes))
    return np.array(rows, np.int64)


@emitter
def _transpose_pairs(rows, row_bytes, n_pairs, panel):
    """panel uint32 (n_pairs, COLUMNS) = rows^T, uint32 (COLUMNS, n_pairs); addresses.

    n_pairs: a multiple of 16.
    """

    @llvm.every(n_pairs, LANES)
    def body(c):
        for first in range(0, COLUMNS, LANES):
            at = rows + c * 4
            square = [load(VI, at + row_bytes * (first + i)) for i in range(LANES)]
            to = panel + c * (4 * COLUMNS)
            for i, column in enumerate(llvm.transposed(square)):
                store(column, to, 4 * COLUMNS * i + 4 * first)


@emitter
def _store_rows(sums, n_rows, out, out_row):
    """out bf16 (n_rows, COLUMNS), rows out_row bytes apart, = f32 (n_rows, COLUMNS); addresses."""

    @llvm.every(n_rows)
    def body(r):
        at, to = sums + r * (4 * COLUMNS), out + r * out_row
        for i in range(0, COLUMNS, 2 * LANES):  # whole cache lines
            low, high = (narrowed(load(VF, at, 4 * (i + part))) for part in (0, LANES))
            store(low.shuffle(range(2 * LANES), high), to, 2 * i)


@njit(cache=True, nogil=True)
def _fill_panel(table, p, low, n_columns, rows, panel):
    """Fills a panel: columns low to low + n_columns of rows p COLUMNS to (p + 1) COLUMNS.

    The rows are those of the stacked matrices. Panel rows after the last row hold old data. rows:
    scratch uint16 (COLUMNS, > n_columns), with zeros after the matrices' own columns. panel: uint32
    (pairs, COLUMNS).
    """
    row_bytes = rows.strides[0]
    start = -p * COLUMNS  # row of the panel where a matrix starts
    for m in range(table.shape[0]):
        first, last = max(0, -start), min(table[m, MATRIX_ROWS], COLUMNS - start)
        if first < last:
            block = low // table[m, BLOCK_SIZE] * table[m, BLOCK_BYTES]
            call_dequantize(
                table[m, KERNEL], table[m, WEIGHTS] + block, table[m, ROW_BYTES], n_columns,
                rows.ctypes.data + start * row_bytes, row_bytes, first, last,
            )  # fmt: skip
        start += table[m, MATRIX_ROWS]
    n_units = (n_columns + 2 * PAIRS - 1) // (2 * PAIRS)
    _transpose_pairs(rows, row_bytes, PAIRS * n_units, panel)


@njit(cache=True, nogil=True)
def _multiply_panel(panel, x, low, begin, end, sums):
    """Adds x[begin:end, low : low + units] times a panel to sums f32 (tiles, ROWS, COLUMNS).

    If ``low`` is 0, it overwrites the sums.
    """
    n_units, row, unit_bytes = panel.shape[0] // PAIRS, 4 * COLUMNS, x.strides[1]
    for tile in range(begin, end):
        rows, to = x[tile, low], sums[tile - begin]
        bf16.multiply(
            VECTORS, rows, x.strides[2], unit_bytes, panel, row, n_units, to, row, low > 0
        )


@njit(cache=True, nogil=True)
def _store_panel(sums, begin, p, out):
    """Writes sums to out from row ``begin`` on, columns p COLUMNS to (p + 1) COLUMNS."""
    column, row_bytes = p * COLUMNS, out.strides[0]
    n_columns = min(COLUMNS, out.shape[1] - column)
    for tile in range(len(sums)):
        first = begin + tile * ROWS
        count = min(ROWS, len(out) - first)
        if n_columns == COLUMNS:
            _store_rows(sums[tile], count, out[first, column:], row_bytes)
        else:
            for i in range(count):
                for c in range(n_columns):
                    out[first + i, column + c] = rounded(out, sums[tile, i, c])


@njit(cache=True, nogil=True)
def _multiply_panels(table, x, n_columns, step, rows, panel, sums, first, last, out):
    """Writes the columns of out (T, all rows) of panels ``first`` to ``last``, for tiles x.

    step: columns of a block. sums f32 (panels, tiles, ROWS, COLUMNS).
    """
    n_tiles = x.shape[0]
    for begin in range(0, n_tiles, TASK_TILES):
        end = min(n_tiles, begin + TASK_TILES)
        for low in range(0, n_columns, step):
            count = min(step, n_columns - low)
            block = panel[: (count + 2 * PAIRS - 1) // (2 * PAIRS) * PAIRS]
            for p in range(first, last):
                _fill_panel(table, p, low, count, rows, block)
                _multiply_panel(block, x, low // (2 * PAIRS), begin, end, sums[p - first])
        for p in range(first, last):
            _store_panel(sums[p - first, : end - begin], begin * ROWS, p, out)


@njit(cache=True, nogil=True)
def _multiply_tasks(
    counter, table, offsets, starts, tiles, n_columns, step, rows, panel, sums, out
):
    """Runs tasks until none is left: an expert and as many panels as ``sums`` holds."""
    n_experts, most = len(offsets) - 1, sums.shape[0]
    own, n_panels = table.copy(), (out.shape[1] + COLUMNS - 1) // COLUMNS
    n_tasks = (n_panels + most - 1) // most
    bf16.begin()
    for task in tasks_of(counter, n_experts * n_tasks):
        e, first = task // n_tasks, task % n_tasks * most
        if offsets[e] < offsets[e + 1]:
            for m in range(len(own)):
                size = table[m, MATRIX_ROWS] * table[m, ROW_BYTES]
                own[m, WEIGHTS] = table[m, WEIGHTS] + e * size
            _multiply_panels(
                own, tiles[starts[e] : starts[e + 1]], n_columns, step, rows, panel, sums, first,
                min(n_panels, first + most), out[offsets[e] : offsets[e + 1]],
            )  # fmt: skip
    bf16.end()


@njit(cache=True, nogil=True)
def _lay_row(x, tiles, i):
    """Copies x bf16 (n,) to row i of tiles uint16 (tiles, units, ROWS, 2 PAIRS)."""
    tile, row = i // ROWS, i % ROWS
    for unit in range(x.shape[0] // (2 * PAIRS)):
        for c in range(2 * PAIRS):
            tiles[tile, unit, row, c] = x[unit * 2 * PAIRS + c]
    for c in range(x.shape[0] // (2 * PAIRS) * 2 * PAIRS, x.shape[0]):
        tiles[tile, c // (2 * PAIRS), row, c % (2 * PAIRS)] = x[c]


@njit(cache=True, nogil=True, parallel=PRANGE_ONLY)
def _multiply(table, offsets, starts, taken, x, tiles, step, rows, panels, sums, out, n_threads):
    n_pairs = len(taken)
    for part in prange(n_threads):
        begin, end = part * n_pairs // n_threads, (part + 1) * n_pairs // n_threads
        for e in range(len(offsets) - 1):
            for p in range(max(begin, offsets[e]), min(end, offsets[e + 1])):
                _lay_row(x[taken[p]], tiles, starts[e] * ROWS + p - offsets[e])
    counter = np.zeros(1, np.int64)
    for thread in prange(n_threads):
        _multiply_tasks(
            counter, table, offsets, starts, tiles, x.shape[1], step, rows[thread], panels[thread],
            sums[thread], out,
        )  # fmt: skip


def _new_scratch(table: np.ndarray, n_columns: int, n_tiles: int, n_threads: int) -> Any:
    """Returns the columns of a block (step), and rows, panels and sums of each thread.

    They are the scratch of ``_multiply_panels``, for products of a table with n_columns results and
    up to n_tiles of rows.
    """
    unit = max(2 * PAIRS, int(table[:, BLOCK_SIZE].max()))
    step = max(unit, BLOCK_COLUMNS // unit * unit)
    n_panels = -(-n_columns // COLUMNS)
    n_sums = min(TASK_PANELS, -(-n_panels // (TASKS_A_THREAD * n_threads)))
    shape = (n_threads, n_sums, min(n_tiles, TASK_TILES), ROWS, COLUMNS)
    # A row has a line of padding: rows a multiple of 4 KB apart would share sets of the cache.
    rows = on_lines((n_threads, COLUMNS, step + 2 * PAIRS), np.uint16, zeros=True)
    panels = on_lines((n_threads, step // 2, COLUMNS), np.uint32)
    return step, rows, panels, on_lines(shape, np.float32)


def multiply(
    table: np.ndarray,
    offsets: np.ndarray,
    rows: np.ndarray,
    x: np.ndarray,
    out: np.ndarray,
    n_threads: int,
) -> None:
    """out[p] = the products of an expert's matrices with x[rows[p]], side by side; x, out: bf16.

    table: of the first expert's matrices; the same matrices of the others follow it. Expert e has
    the pairs p, offsets[e] <= p < offsets[e + 1]. Without experts there is one, and rows[p] = p.
    """
    n_tiles, n_units = -(-np.diff(offsets) // ROWS), -(-x.shape[1] // (2 * PAIRS))
    starts = np.concatenate([[0], np.cumsum(n_tiles)])
    tiles = on_lines((int(starts[-1]), n_units, ROWS, 2 * PAIRS), np.uint16)
    tiles[starts[1:][n_tiles > 0] - 1] = 0  # rows of the last tile may be unused
    if x.shape[1] != n_units * 2 * PAIRS:
        tiles[:, -1] = 0
    scratch = _new_scratch(table, out.shape[1], int(n_tiles.max()), n_threads)
    _multiply(table, offsets, starts, rows, x, tiles, *scratch, out, n_threads)
