"""Matrix products of a prefilled chunk in bf16, by the CPU's own instructions (jit/bf16.py).

COLUMNS rows of the weights are a panel. A task dequantises a block of columns of a panel into its
own scratch. The scratch has pairs of bf16 of one row, with the pairs of all rows side by side. The
task multiplies the chunk's rows by the panel. Then it takes its next panel, and after the last one
the next block of columns.
A block of the chunk stays in the L2 cache and a panel in L1. A thread has at most one panel of the
weights as bf16. A bf16 is stored as a uint16.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numba import prange

from sparsekv_cli.cpu.jit import bf16, llvm
from sparsekv_cli.cpu.jit.bf16 import PAIRS, ROWS, multiply, narrowed
from sparsekv_cli.cpu.jit.emitter import emitter
from sparsekv_cli.cpu.jit.kernel import njit
from sparsekv_cli.cpu.jit.llvm import I64, LANES, VF, VI, load, next_task
from sparsekv_cli.cpu.jit.pointers import address, on_lines
from sparsekv_cli.cpu.jit.threads import PRANGE_ONLY
from sparsekv_cli.cpu.layer.prefill import rounded
from sparsekv_cli.cpu.weights import dot
from sparsekv_cli.cpu.weights.dot import call_dequantize
from sparsekv_cli.cpu.weights.formats import FORMAT_OF_CODE

VECTORS = 2 if bf16.HAS_TILES else 4  # vectors of 16 results that a product computes for an input
COLUMNS = VECTORS * LANES  # weight rows of a panel
BLOCK_COLUMNS = 288  # columns of the weights in a block: their panel stays in the L1 cache
TASK_TILES = 16  # tiles of rows at a time
TASK_PANELS = 8  # most panels of a task: their sums for TASK_TILES tiles are half a megabyte
TASKS_A_THREAD = 4  # fewest, if there are enough panels: threads then end together

# Columns of a table, one row a matrix.
DECODER, WEIGHTS, ROW_BYTES, MATRIX_ROWS, ELEMENTS, BLOCK_BYTES = range(6)


def product_table(matrices: Sequence[tuple[int, np.ndarray]]) -> np.ndarray:
    """Returns a table int64 (matrices, 6) of (ggml type, uint8 (rows, row bytes)).

    The caller keeps the weights alive.
    """
    table = np.empty((len(matrices), 6), np.int64)
    for row, (code, w) in zip(table, matrices, strict=True):
        format_, decoder = FORMAT_OF_CODE[code], dot.dequantize_address(code, dot.TO_BF16)
        row[:4] = decoder, address(w), w.strides[0], len(w)
        row[4:] = format_.n_elements, format_.n_bytes
    return table


@emitter
def _transpose_pairs(b, rows, row_bytes, n_pairs, panel):
    """panel uint32 (n_pairs, COLUMNS) = rows^T, uint32 (COLUMNS, n_pairs); addresses.

    n_pairs: a multiple of 16.
    """

    def body(c, carried):
        for first in range(0, COLUMNS, LANES):
            at = b.add(rows, b.mul(c, I64(4)))
            square = [
                load(b, VI, b.add(at, b.mul(row_bytes, I64(first + i)))) for i in range(LANES)
            ]
            to = b.add(panel, b.mul(c, I64(4 * COLUMNS)))
            for i, column in enumerate(llvm.transposed(b, square)):
                llvm.store(b, column, to, 4 * COLUMNS * i + 4 * first)

    llvm.loop(b, I64(0), n_pairs, LANES, [], body)


@emitter
def _store_rows(b, sums, n_rows, out, out_row):
    """out bf16 (n_rows, COLUMNS), rows out_row bytes apart, = f32 (n_rows, COLUMNS); addresses."""

    def body(r, carried):
        at, to = b.add(sums, b.mul(r, I64(4 * COLUMNS))), b.add(out, b.mul(r, out_row))
        for i in range(0, COLUMNS, 2 * LANES):  # whole cache lines
            low, high = (narrowed(b, load(b, VF, at, 4 * (i + part))) for part in (0, LANES))
            llvm.store(b, llvm.shuffle(b, low, high, range(2 * LANES)), to, 2 * i)

    llvm.loop(b, I64(0), n_rows, 1, [], body)


@njit(cache=True, nogil=True)
def _fill_panel(table, p, low, n_columns, rows, panel):
    """Fills a panel: columns low to low + n_columns of rows p COLUMNS to (p + 1) COLUMNS.

    The rows are those of the stacked matrices. Panel rows after the last row hold old data. rows:
    scratch uint16 (COLUMNS, > n_columns), with zeros after the matrices' own columns. panel: uint32
    (pairs, COLUMNS).
    """
    at, row_bytes = rows.ctypes.data, rows.strides[0]
    start = -p * COLUMNS  # row of the panel where a matrix starts
    for m in range(table.shape[0]):
        first, last = max(0, -start), min(table[m, MATRIX_ROWS], COLUMNS - start)
        if first < last:
            block = low // table[m, ELEMENTS] * table[m, BLOCK_BYTES]
            call_dequantize(
                table[m, DECODER], table[m, WEIGHTS] + block, table[m, ROW_BYTES], n_columns,
                at + start * row_bytes, row_bytes, first, last,
            )  # fmt: skip
        start += table[m, MATRIX_ROWS]
    n_units = (n_columns + 2 * PAIRS - 1) // (2 * PAIRS)
    _transpose_pairs(at, row_bytes, PAIRS * n_units, panel.ctypes.data)


@njit(cache=True, nogil=True)
def _multiply_panel(panel, x, low, begin, end, sums):
    """Adds x[begin:end, low : low + units] times a panel to sums f32 (tiles, ROWS, COLUMNS).

    If ``low`` is 0, it overwrites the sums.
    """
    n_units, panel_row = panel.shape[0] // PAIRS, 4 * COLUMNS
    unit_bytes, row_bytes, at = x.strides[1], x.strides[2], panel.ctypes.data
    for tile in range(begin, end):
        rows, to = x[tile, low].ctypes.data, sums[tile - begin].ctypes.data
        adds = low > 0
        multiply(VECTORS, rows, row_bytes, unit_bytes, at, panel_row, n_units, to, panel_row, adds)


@njit(cache=True, nogil=True)
def _store_panel(sums, begin, p, out):
    """Writes sums to out from row ``begin`` on, columns p COLUMNS to (p + 1) COLUMNS."""
    column, row_bytes = p * COLUMNS, out.strides[0]
    n_columns = min(COLUMNS, out.shape[1] - column)
    for tile in range(len(sums)):
        first = begin + tile * ROWS
        count = min(ROWS, len(out) - first)
        if n_columns == COLUMNS:
            _store_rows(sums[tile].ctypes.data, count, out[first, column:].ctypes.data, row_bytes)
        else:
            for i in range(count):
                for c in range(n_columns):
                    out[first + i, column + c] = rounded(out, sums[tile, i, c])


@njit(cache=True, nogil=True)
def multiply_panels(table, x, n_columns, step, rows, panel, sums, first, last, out):
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
def _multiply_tasks(counter, table, x, n_columns, step, rows, panel, sums, out):
    """Runs tasks until none is left. A task is as many panels as ``sums`` holds."""
    most = sums.shape[0]
    n_panels = (out.shape[1] + COLUMNS - 1) // COLUMNS
    bf16.begin()
    first = next_task(counter) * most
    while first < n_panels:
        last = min(n_panels, first + most)
        multiply_panels(table, x, n_columns, step, rows, panel, sums, first, last, out)
        first = next_task(counter) * most
    bf16.end()


@njit(cache=True, nogil=True)
def lay_row(x, tiles, i):
    """Copies x bf16 (n,) to row i of tiles uint16 (tiles, units, ROWS, 2 PAIRS)."""
    tile, row = i // ROWS, i % ROWS
    for unit in range(x.shape[0] // (2 * PAIRS)):
        for c in range(2 * PAIRS):
            tiles[tile, unit, row, c] = x[unit * 2 * PAIRS + c]
    for c in range(x.shape[0] // (2 * PAIRS) * 2 * PAIRS, x.shape[0]):
        tiles[tile, c // (2 * PAIRS), row, c % (2 * PAIRS)] = x[c]


@njit(cache=True, nogil=True, parallel=PRANGE_ONLY)
def _multiply(table, x, tiles, step, rows, panels, sums, out, n_threads):
    n_inputs = len(x)
    for part in prange(n_threads):
        for i in range(part * n_inputs // n_threads, (part + 1) * n_inputs // n_threads):
            lay_row(x[i], tiles, i)
    counter = np.zeros(1, np.int64)
    for thread in prange(n_threads):
        _multiply_tasks(
            counter, table, tiles, x.shape[1], step, rows[thread], panels[thread], sums[thread], out
        )


class PanelScratch(NamedTuple):
    """The columns of a block (step), and for each thread the scratch of ``multiply_panels``."""

    step: int
    rows: np.ndarray
    panels: np.ndarray
    sums: np.ndarray


def new_scratch(table: np.ndarray, n_columns: int, n_tiles: int, n_threads: int) -> PanelScratch:
    """Returns scratch for products of a table with n_columns results and up to n_tiles of rows."""
    unit = max(2 * PAIRS, int(table[:, ELEMENTS].max()))
    step = max(unit, BLOCK_COLUMNS // unit * unit)
    n_panels = -(-n_columns // COLUMNS)
    n_sums = min(TASK_PANELS, -(-n_panels // (TASKS_A_THREAD * n_threads)))
    shape = (n_threads, n_sums, min(n_tiles, TASK_TILES), ROWS, COLUMNS)
    return PanelScratch(
        step,
        # A row has a line of padding: rows a multiple of 4 KB apart would share sets of the cache.
        rows=on_lines((n_threads, COLUMNS, step + 2 * PAIRS), np.uint16, zeros=True),
        panels=on_lines((n_threads, step // 2, COLUMNS), np.uint32),
        sums=on_lines(shape, np.float32),
    )


def multiply_rows(table: np.ndarray, x: np.ndarray, out: np.ndarray, n_threads: int) -> None:
    """out bf16 (T, all rows) = the products of the matrices of a table with x bf16 (T, n)."""
    n_tiles, n_units = -(-len(x) // ROWS), -(-x.shape[1] // (2 * PAIRS))
    tiles = on_lines((n_tiles, n_units, ROWS, 2 * PAIRS), np.uint16)
    if x.shape != (n_tiles * ROWS, n_units * 2 * PAIRS):
        tiles[-1], tiles[:, -1] = 0, 0
    scratch = new_scratch(table, out.shape[1], n_tiles, n_threads)
    _multiply(table, x, tiles, *scratch, out, n_threads)
