"""Multiplies a prefilled chunk by the experts of a layer in bf16. Each expert has its own rows.

The tasks are those of layer/matmul_bf16.py, one expert after another. A bf16 is stored as a uint16.
"""

import numpy as np
from numba import prange

from sparsekv_cli.cpu.jit import bf16
from sparsekv_cli.cpu.jit.bf16 import PAIRS, ROWS
from sparsekv_cli.cpu.jit.kernel import njit
from sparsekv_cli.cpu.jit.llvm import next_task
from sparsekv_cli.cpu.jit.pointers import on_lines
from sparsekv_cli.cpu.jit.threads import PRANGE_ONLY
from sparsekv_cli.cpu.layer.matmul_bf16 import (
    COLUMNS,
    MATRIX_ROWS,
    ROW_BYTES,
    WEIGHTS,
    lay_row,
    multiply_panels,
    new_scratch,
)


@njit(cache=True, nogil=True)
def _multiply_tasks(
    counter, table, offsets, starts, tiles, n_columns, step, rows, panel, sums, out
):  # fmt: skip
    """Runs tasks until none is left: an expert and as many panels as ``sums`` holds."""
    n_experts, most = offsets.shape[0] - 1, sums.shape[0]
    own = table.copy()
    for m in range(len(own)):
        own[m, MATRIX_ROWS] //= n_experts
    n_panels = (out.shape[1] + COLUMNS - 1) // COLUMNS
    n_tasks = (n_panels + most - 1) // most
    bf16.begin()
    task = next_task(counter)
    while task < n_experts * n_tasks:
        e, first = task // n_tasks, task % n_tasks * most
        if offsets[e] < offsets[e + 1]:
            for m in range(len(own)):
                own[m, WEIGHTS] = table[m, WEIGHTS] + e * own[m, MATRIX_ROWS] * own[m, ROW_BYTES]
            multiply_panels(
                own, tiles[starts[e] : starts[e + 1]], n_columns, step, rows, panel, sums, first,
                min(n_panels, first + most), out[offsets[e] : offsets[e + 1]],
            )  # fmt: skip
        task = next_task(counter)
    bf16.end()


@njit(cache=True, nogil=True, parallel=PRANGE_ONLY)
def _multiply(
    table, offsets, starts, taken, x, tiles, step, rows, panels, sums, out, n_threads
):  # fmt: skip
    n_experts = offsets.shape[0] - 1
    for part in prange(n_threads):
        for e in range(part * n_experts // n_threads, (part + 1) * n_experts // n_threads):
            if offsets[e] < offsets[e + 1]:
                tiles[starts[e + 1] - 1] = 0  # rows of the last tile may be unused
                for p in range(offsets[e], offsets[e + 1]):
                    lay_row(x[taken[p]], tiles, starts[e] * ROWS + p - offsets[e])
    counter = np.zeros(1, np.int64)
    for thread in prange(n_threads):
        _multiply_tasks(
            counter, table, offsets, starts, tiles, x.shape[1], step, rows[thread], panels[thread],
            sums[thread], out,
        )  # fmt: skip


def multiply_experts(
    table: np.ndarray,
    offsets: np.ndarray,
    rows: np.ndarray,
    x: np.ndarray,
    out: np.ndarray,
    n_threads: int,
) -> None:
    """out[p] = the products of an expert's matrices with x[rows[p]], side by side.

    table: as in layer/matmul_bf16.py; a matrix holds those of all experts, one after another.
    Expert e has the pairs p, offsets[e] <= p < offsets[e + 1]. x, out: bf16.
    """
    n_tiles = -(-np.diff(offsets) // ROWS)
    starts = np.concatenate([[0], np.cumsum(n_tiles)])
    n_units = -(-x.shape[1] // (2 * PAIRS))
    tiles = on_lines((int(starts[-1]), n_units, ROWS, 2 * PAIRS), np.uint16)
    if x.shape[1] != n_units * 2 * PAIRS:
        tiles[:, -1] = 0
    scratch = new_scratch(table, out.shape[1], int(n_tiles.max()), n_threads)
    _multiply(table, offsets, starts, rows, x, tiles, *scratch, out, n_threads)
