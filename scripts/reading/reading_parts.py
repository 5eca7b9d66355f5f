"""The parts of a prefill's attention, each alone: the kernels' own steps on tiles as they have."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
from numba import njit, prange

from sparsekv_cli.cpu.attention import prefill_bf16, prefill_f32, softmax_bf16
from sparsekv_cli.cpu.jit import bf16
from sparsekv_cli.cpu.jit.bf16 import PAIRS, multiply
from sparsekv_cli.cpu.jit.pointers import on_lines
from sparsekv_cli.cpu.jit.threads import PRANGE_ONLY

N_RUNS = 40  # passes over the tiles of a task
SCORES, WEIGHTS, VALUES = range(3)
NAMES = ("q.k", "exponentials", "p.v")
BYTES, NARROW = prefill_bf16.UNIT, prefill_bf16.WIDTH


@njit(cache=True, nogil=True, parallel=PRANGE_ONLY)
def _run_bf16(part, keys, values, queries, scores, weights, acc, small, limits, n_runs):
    """Runs a part for every tile of a task, n_runs times in each thread."""
    for thread in prange(len(keys)):
        own, row = keys[thread], 4 * NARROW
        scores_at, weights_at = scores[thread].ctypes.data, weights[thread].ctypes.data
        at = small[thread].ctypes.data
        block, n_units = own.shape[0], queries.shape[2] // PAIRS
        bf16.begin()
        for _run in range(n_runs):
            for t in range(queries.shape[1]):
                if part == SCORES:
                    for j in range(0, block, bf16.ROWS):
                        multiply(
                            4, own[j].ctypes.data, own.strides[0], BYTES,
                            queries[thread, t].ctypes.data, row, n_units,
                            scores[thread, j].ctypes.data, row, 0,
                        )  # fmt: skip
                elif part == WEIGHTS:
                    softmax_bf16.hide_and_find_peaks(
                        scores_at, 0, block, block, limits[thread].ctypes.data, 1 << 30, at
                    )
                    softmax_bf16.weigh(
                        scores_at, block, np.float32(0.1), at + row, at, at + 2 * row,
                        at + 3 * row, weights_at,
                    )  # fmt: skip
                else:
                    for c in range(0, acc.shape[2], bf16.ROWS):
                        multiply(
                            4, values[thread, c].ctypes.data, values.strides[1], BYTES, weights_at,
                            row, block // (2 * PAIRS), acc[thread, t, c].ctypes.data, row, 1,
                        )  # fmt: skip
        bf16.end()


@njit(cache=True, nogil=True, parallel=PRANGE_ONLY)
def _run_f32(part, keys, values, queries, scores, acc, small, limits, n_runs):
    """Runs a part for every tile of a task, n_runs times in each thread."""
    for thread in prange(len(keys)):
        own, at = keys[thread], small[thread].ctypes.data
        scores_at, block, row = scores[thread].ctypes.data, keys.shape[1], 4 * prefill_f32.WIDTH
        for _run in range(n_runs):
            for t in range(queries.shape[1]):
                if part == SCORES:
                    prefill_f32._score(
                        queries[thread, t].ctypes.data, queries.shape[2], own.ctypes.data,
                        own.strides[0], 0, 0, block, block, limits[thread].ctypes.data, 1 << 30,
                        scores_at, at,
                    )  # fmt: skip
                elif part == WEIGHTS:
                    prefill_f32._weigh(scores_at, block, at + row, at, at + 3 * row)
                else:
                    prefill_f32._add_values(
                        scores_at, block, values[thread].ctypes.data, values.strides[1],
                        values.shape[1], at + 3 * row, acc[thread, t].ctypes.data,
                    )  # fmt: skip


def _bf16_case(d: int, n_threads: int) -> tuple[Callable, int]:
    block, width, tiles = prefill_bf16.BLOCK, prefill_bf16.WIDTH, prefill_bf16.TASK_TILES
    n_sums = -(-d // bf16.ROWS) * bf16.ROWS
    shapes = (
        ((block, d), np.uint16), ((n_sums, block), np.uint16), ((tiles, d // 2, width), np.uint32),
        ((block, width), np.float32), ((block // 2, width), np.uint32),
        ((tiles, n_sums, width), np.float32), ((4, width), np.float32), ((width,), np.int32),
    )  # fmt: skip
    arrays = [on_lines((n_threads, *shape), dtype, zeros=True) for shape, dtype in shapes]
    arrays[3][:] = np.random.default_rng(0).standard_normal(arrays[3].shape)
    return lambda part, n: _run_bf16(part, *arrays, n), tiles * block * width


def _f32_case(d: int, n_threads: int) -> tuple[Callable, int]:
    block, width, rows = prefill_f32.BLOCK, prefill_f32.WIDTH, prefill_f32.ROWS
    panels, tiles = d // rows + 1, prefill_f32.TASK_FLOATS // (2 * d * width)
    shapes = (
        ((block, d), np.float32), ((panels, block, rows), np.float32),
        ((tiles, d, width), np.float32), ((block, width), np.float32),
        ((tiles, panels * rows, width), np.float32), ((4, width), np.float32),
        ((width,), np.int32),
    )  # fmt: skip
    arrays = [on_lines((n_threads, *shape), dtype, zeros=True) for shape, dtype in shapes]
    return lambda part, n: _run_f32(part, *arrays, n), tiles * block * width


def seconds_a_pair(d: int, is_bf16: bool, n_threads: int) -> dict[str, float]:
    """Seconds of each part for a query row and a key of d elements, all threads together."""
    run, n_pairs = (_bf16_case if is_bf16 else _f32_case)(d, n_threads)
    seconds = {}
    for part, name in enumerate(NAMES):
        run(part, 1)
        found = []
        for _ in range(5):
            started = time.perf_counter()
            run(part, N_RUNS)
            found.append(time.perf_counter() - started)
        seconds[name] = min(found) / (N_RUNS * n_pairs * n_threads)
    return seconds
