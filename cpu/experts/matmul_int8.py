"""Multiplies a prefilled chunk by a layer's experts, in integers. Each expert has its own rows.

The tasks are those of layer/matmul_int8.py, one expert after another. A task decodes a few rows of
an expert's weights once, for all inputs of a span of that expert's pairs.
"""

import numpy as np
from numba import prange

from sparsekv_cli.cpu.jit.kernel import njit
from sparsekv_cli.cpu.jit.llvm import next_task
from sparsekv_cli.cpu.jit.threads import PRANGE_ONLY
from sparsekv_cli.cpu.layer.matmul_int8 import (
    ROW_BYTES,
    ROWS,
    TASK_ROWS,
    WEIGHTS,
    multiply_group,
    multiply_ref,
    new_scratch,
    place_of,
    store_sums,
)
from sparsekv_cli.cpu.layer.tiles_int8 import GROUP, TILE, round_input, tile_bytes

MOST_TILES = TASK_ROWS // TILE  # tiles of inputs of a task


@njit(cache=True, nogil=True)
def _list_spans(offsets):
    """Returns spans int64 (n, 5): expert, first pair, end of the pairs, first tile, end of tiles.

    A span has the pairs of one expert, starts with a new tile and has at most MOST_TILES tiles.
    """
    n_experts, size = offsets.shape[0] - 1, MOST_TILES * TILE
    spans = np.empty((n_experts + offsets[n_experts] // size, 5), np.int64)
    n, tile = 0, 0
    for e in range(n_experts):
        for first in range(offsets[e], offsets[e + 1], size):
            last = min(first + size, offsets[e + 1])
            n_tiles = (last - first + TILE - 1) // TILE
            spans[n, 0], spans[n, 1], spans[n, 2] = e, first, last
            spans[n, 3], spans[n, 4] = tile, tile + n_tiles
            tile, n = tile + n_tiles, n + 1
    return spans[:n]


@njit(cache=True, nogil=True)
def _round_pairs(span, begin, end, rows, x, tiles):
    """Rounds the inputs of a span's pairs p, begin <= p < end, into their tiles."""
    for p in range(max(span[1], begin), min(span[2], end)):
        i = p - span[1]
        place = tiles[span[3] + i // TILE, 4 * (i % TILE) :].ctypes.data
        round_input(x, x[rows[p]].ctypes.data, place, x.shape[1])


@njit(cache=True, nogil=True)
def _multiply_tasks(counter, table, n_experts, spans, tiles, n, out):
    """Runs tasks until none is left: a span and GROUP rows of a matrix of its expert.

    A thread takes its next task before it runs the current one, to prefetch the next weights.
    """
    n_groups, n_tiles = 0, 0
    for m in range(table.shape[0]):
        n_groups += (table[m, ROWS] // n_experts + GROUP - 1) // GROUP
    for s in range(spans.shape[0]):
        n_tiles = max(n_tiles, spans[s, 4] - spans[s, 3])
    scratch = new_scratch(n_tiles)
    task, after = next_task(counter), next_task(counter)
    while task < n_groups * spans.shape[0]:
        span = spans[task // n_groups]
        m, first, column = place_of(table, n_experts, task % n_groups)
        size, following = table[m, ROWS] // n_experts, 0
        if after < n_groups * spans.shape[0]:
            next_m, row, _ = place_of(table, n_experts, after % n_groups)
            row += spans[after // n_groups, 0] * (table[next_m, ROWS] // n_experts)
            following = table[next_m, WEIGHTS] + row * table[next_m, ROW_BYTES]
        sums = multiply_group(
            table[m], span[0] * size + first, following, tiles[span[3] : span[4]], n, scratch
        )
        store_sums(sums, min(GROUP, size - first), out, span[1], span[2], column)
        task, after = after, next_task(counter)


@njit(cache=True, nogil=True, parallel=PRANGE_ONLY)
def multiply_experts(table, offsets, rows, x, out, n_threads):
    """out[p] = the products of an expert's matrices with x[rows[p]], side by side.

    table: as in layer/matmul_int8.py; a matrix holds those of all experts, one after another.
    Expert e has the pairs p, offsets[e] <= p < offsets[e + 1]. x, out: f32 or bf16.
    """
    n, n_pairs, n_experts = x.shape[1], offsets[-1], offsets.shape[0] - 1
    spans = _list_spans(offsets)
    tiles = np.empty((spans[-1, 4], tile_bytes(n)), np.uint8)
    for s in range(spans.shape[0]):
        tiles[spans[s, 4] - 1] = 0  # rows of the last tile may be unused
    for part in prange(n_threads):
        begin, end = part * n_pairs // n_threads, (part + 1) * n_pairs // n_threads
        for s in range(spans.shape[0]):
            _round_pairs(spans[s], begin, end, rows, x, tiles)
    counter = np.zeros(1, np.int64)
    for _thread in prange(n_threads):
        _multiply_tasks(counter, table, n_experts, spans, tiles, n, out)


def multiply_experts_ref(
    matrices: list[tuple[int, np.ndarray]], offsets: np.ndarray, rows: np.ndarray, x: np.ndarray
) -> np.ndarray:
    """Reference: f32 (pairs, rows of an expert) from gguf's own dequantisation, summed in f64."""
    n_experts, parts = len(offsets) - 1, []
    for e in range(n_experts):
        own = [(code, np.split(w, n_experts)[e]) for code, w in matrices]
        parts.append(multiply_ref(own, x[rows[offsets[e] : offsets[e + 1]]]))
    return np.concatenate(parts)
