"""Causal attention of a prefilled chunk in bf16, for CPUs that multiply bf16 (jit/bf16.py).

Flash attention over the stored rows (attention/rows.py), as in attention/prefill_f32.py. A task is
some tokens of one kv head with all query heads of its group. It converts a block of keys, and of
values transposed, to bf16. The block stays in the task's own scratch, in the L2 cache. All query
rows of the task attend to the block, WIDTH of them at a time, one a lane. The layouts are: q in
pairs, scores (keys, WIDTH), weights in pairs of keys, and sums of values (d_v, WIDTH). So maximum,
exponential and rescaling need nothing across lanes. Both matrix products have the stored rows on
the left.
"""

from __future__ import annotations

import numpy as np
from numba import prange

from sparsekv_cli.cpu.attention.flash import LOG2_E, LOWEST
from sparsekv_cli.cpu.attention.rows import F16 as F16_ROWS
from sparsekv_cli.cpu.attention.rows import K_HEAD, K_KIND, K_ROW, V_HEAD, V_KIND, V_ROW, K, V
from sparsekv_cli.cpu.attention.softmax_bf16 import (
    WIDTH,
    divide,
    hide_and_find_peaks,
    shrink,
    soften,
    weigh,
)
from sparsekv_cli.cpu.attention.tile import widen_row
from sparsekv_cli.cpu.jit import bf16, llvm
from sparsekv_cli.cpu.jit.bf16 import PAIRS, ROWS, multiply, narrowed
from sparsekv_cli.cpu.jit.emitter import LITERAL, emitter
from sparsekv_cli.cpu.jit.kernel import njit
from sparsekv_cli.cpu.jit.llvm import tasks_of
from sparsekv_cli.cpu.jit.pointers import on_lines
from sparsekv_cli.cpu.jit.threads import PRANGE_ONLY
from sparsekv_cli.cpu.jit.value import LANES, VF, VI, load, select, store

# Keys between two updates of the running softmax: a multiple of 32 and of ROWS.
BLOCK = 512 if bf16.HAS_TILES else 192
F32_ROWS = -1  # rows of f32, to which quantised rows are widened; no kind of attention/rows.py
TASK_TILES = 12  # most tiles of a task; fewer tasks read the keys less often
TASKS_A_THREAD = 3  # fewest, if there are enough rows: threads then end together
UNIT = 4 * PAIRS  # bytes of a unit of pairs


# --- a block of keys and values -------------------------------------------------------------------


def wide_lanes(kind, row, c):
    """Returns elements c .. c + 16 of a row of f16 or f32 at an address, as f32."""
    if kind == F16_ROWS:
        return llvm.load_half_lanes(row + c * 2)
    return load(VF, row + c * 4)


@emitter(kind=LITERAL)
def _narrow(kind, row, width, out):
    """Writes out bf16 (width,) = the row of f16 or f32 numbers at the address ``row``.

    kind: the literal F16_ROWS or F32_ROWS. width: a multiple of 16. out: an address.
    """

    @llvm.every(width, LANES)
    def body(c):
        store(narrowed(wide_lanes(kind, row, c)), out + c * 2)


@emitter(kind=LITERAL)
def _narrow_transposed(kind, rows, row_bytes, last, width, out, out_row):
    """Writes out bf16 (width, 32): the transpose of 32 rows of ``width`` f16 or f32 numbers.

    Column j of ``out`` is row j, and row ``last`` if j > last. With last = 4 the columns 5 to 31
    equal column 4.

    kind: the literal F16_ROWS or F32_ROWS. rows, out: addresses. row_bytes, out_row: bytes from one
    row of the input, or of ``out``, to the next. width: a multiple of 16.
    """
    places = []
    for j in range(2 * LANES):
        is_after = j > last
        places.append(rows + row_bytes * select(is_after, last, j))

    @llvm.every(width, LANES)
    def body(c):
        words = [narrowed(wide_lanes(kind, at, c)).unsigned_to(VI) for at in places]
        pairs = [low | high << 16 for low, high in zip(words[::2], words[1::2], strict=True)]
        for i, column in enumerate(llvm.transposed(pairs)):
            store(column, out + (c + i) * out_row)


@njit(cache=True, nogil=True)
def _read_block(layout, head, first, count, widths, keys, values):
    """Reads rows first .. first + count of a kv head as bf16.

    keys (BLOCK, >= d); values (>= d_v, BLOCK). widths: elements of a stored row of K and of V.
    Quantised rows are widened to f32 first.
    """
    wide = np.empty((2 * LANES, max(widths)), np.float32)
    k = layout[K] + head * layout[K_HEAD] + first * layout[K_ROW]
    v = layout[V] + head * layout[V_HEAD] + first * layout[V_ROW]
    v_row = values.strides[0]
    for j in range(count):
        row, to = k + j * layout[K_ROW], keys[j]
        if layout[K_KIND] == F16_ROWS:
            _narrow(F16_ROWS, row, widths[0], to)
        else:
            widen_row(layout[K_KIND], row, wide[0, : widths[0]])
            _narrow(F32_ROWS, wide, widths[0], to)
    for j in range(0, count, 2 * LANES):
        row, to, last = v + j * layout[V_ROW], values[0, j:], count - 1 - j
        if layout[V_KIND] == F16_ROWS:
            _narrow_transposed(F16_ROWS, row, layout[V_ROW], last, widths[1], to, v_row)
        else:
            for i in range(min(last + 1, 2 * LANES)):
                widen_row(layout[V_KIND], row + i * layout[V_ROW], wide[i, : widths[1]])
            _narrow_transposed(F32_ROWS, wide, wide.strides[0], last, widths[1], to, v_row)


# --- tasks ----------------------------------------------------------------------------------------


@njit(cache=True, nogil=True)
def _attend_tiles(layout, head, widths, queries, n_visible, scale, window, cap, scratch, mass, acc):
    """Runs one task: attention of tiles of query rows to all their visible keys.

    queries bf16 in pairs, uint32 (tiles, pairs, WIDTH). n_visible int32 (tiles, WIDTH), ascending:
    a row attends to the last ``window`` of its first n_visible keys. mass f32 (tiles, WIDTH); acc
    f32 (tiles, >= d_v, WIDTH): the sums of weights and of values. scratch: keys, values, scores and
    weights of a block, peaks and a few vectors. At the start, peaks and mass hold the sinks.
    """
    keys, values, scores, weights, peak, small, limits = scratch
    n_tiles, n_units, n_sums = queries.shape[0], queries.shape[1] // PAIRS, acc.shape[1]
    top, old = small
    key_bytes, value_bytes, tile_bytes = keys.strides[0], values.strides[0], 4 * WIDTH
    acc[:] = 0
    for start in range(max(0, n_visible[0, 0] - window), n_visible[-1, -1], BLOCK):
        size = min(BLOCK, n_visible[-1, -1] - start)
        _read_block(layout, head, start, size, widths, keys, values)
        for t in range(n_tiles):
            count = min(size, n_visible[t, -1] - start)
            if count <= 0 or start + size <= n_visible[t, 0] - window:
                continue
            whole = (count + 2 * PAIRS - 1) // (2 * PAIRS) * (2 * PAIRS)
            low = max(0, min(count, n_visible[t, -1] - window - start))
            free = max(low, min(count, n_visible[t, 0] - start))
            for j in range(0, count, ROWS):
                multiply(
                    4, keys[j], key_bytes, UNIT, queries[t], tile_bytes,
                    n_units, scores[j], tile_bytes, 0,
                )  # fmt: skip
            for i in range(WIDTH):
                limits[i] = n_visible[t, i] - start
            top[:] = peak[t]
            if cap:
                top[:] = LOWEST
            hide_and_find_peaks(scores, low, free, whole, limits, window, top)
            if cap:
                soften(scores, whole, cap, peak[t], top)
            moved = weigh(scores, whole, scale, peak[t], top, mass[t], old, weights)
            if moved:
                shrink(acc[t], n_sums, old)
            for c in range(0, n_sums, ROWS):
                multiply(
                    4, values[c], value_bytes, UNIT, weights, tile_bytes,
                    whole // (2 * PAIRS), acc[t, c], tile_bytes, 1,
                )  # fmt: skip


@njit(cache=True, nogil=True)
def _attend_tasks(counter, q, layout, n_kv, ends, scale, window, cap, sinks, scratch, thread, out):
    """Runs tasks until none is left, the long ones first. A task is some tiles of a kv head.

    The rows of a kv head are counted token by token. Row r belongs to token r // group, and to
    query head r % group of the group. scratch: of all threads.
    """
    queries, keys, values, scores, weights, peak, small, limits, mass, acc, narrow = scratch
    queries, mass, acc, narrow = queries[thread], mass[thread], acc[thread], narrow[thread]
    peak, small, limits = peak[thread], small[thread], limits[thread]
    own = keys[thread], values[thread], scores[thread], weights[thread], peak, small, limits
    n_head, n_new, d = q.shape
    group, d_v = n_head // n_kv, out.shape[2]
    n_rows = n_new * group
    n_tiles, most_tiles = (n_rows + WIDTH - 1) // WIDTH, len(queries)
    n_parts = (n_tiles + most_tiles - 1) // most_tiles
    n_visible = np.empty((most_tiles, WIDTH), np.int32)
    bf16.begin()
    for task in tasks_of(counter, n_kv * n_parts):
        head, part = task % n_kv, n_parts - 1 - task // n_kv
        first, last = part * n_tiles // n_parts, (part + 1) * n_tiles // n_parts
        for t in range(last - first):
            for i in range(WIDTH):
                r = min((first + t) * WIDTH + i, n_rows - 1)
                token, h = r // group, head * group + r % group
                n_visible[t, i] = ends[token]
                peak[t, i] = sinks[h] / scale * LOG2_E if len(sinks) else LOWEST
                mass[t, i] = len(sinks) > 0
                for c in range(d // 2):
                    pair = np.uint32(q[h, token, 2 * c + 1]) << np.uint32(16)
                    queries[t, c, i] = pair | np.uint32(q[h, token, 2 * c])
        tiles = last - first
        widths = (d + LANES - 1) // LANES * LANES, narrow.shape[1]
        _attend_tiles(
            layout, head, widths, queries[:tiles], n_visible[:tiles], scale, window, cap, own,
            mass[:tiles], acc[:tiles],
        )  # fmt: skip
        for t in range(tiles):
            divide(acc[t], narrow.shape[1], mass[t], narrow)
            for i in range(min(WIDTH, n_rows - (first + t) * WIDTH)):
                r = (first + t) * WIDTH + i
                target = out[r // group, head * group + r % group]
                for c in range(d_v):
                    target[c] = narrow[i, c]
    bf16.end()


@njit(cache=True, nogil=True, parallel=PRANGE_ONLY)
def _attend(q, layout, n_kv, ends, scale, window, cap, sinks, scratch, out, n_threads):
    counter = np.zeros(1, np.int64)
    for thread in prange(n_threads):
        _attend_tasks(
            counter, q, layout, n_kv, ends, scale, window, cap, sinks, scratch, thread, out
        )


def _rounded_up(n: int, unit: int) -> int:
    return -(-n // unit) * unit


def attend_causal(q, layout, n_kv, ends, scale, window, softcap, sinks, out, n_threads) -> None:
    """Computes attention of T rows: row t to the last ``window`` of the first ends[t] stored rows.

    q bf16 bits, uint16 (H, T, d), d even. layout int64 (8,): addresses of K and V, see
    attention/rows.py. out bf16 bits (T, H, d_v). ends, window, softcap, sinks: as prefill_f32.py.
    """
    (n_head, n_new, d), d_v = q.shape, out.shape[2]
    n_tiles = -(-n_new * (n_head // n_kv) // WIDTH)
    tiles = max(1, min(TASK_TILES, n_kv * n_tiles // (TASKS_A_THREAD * n_threads)))
    n_sums = _rounded_up(_rounded_up(d_v, LANES), ROWS)
    k_width = _rounded_up(d, 2 * PAIRS)
    shapes = (
        ((tiles, k_width // 2, WIDTH), np.uint32),  # queries
        ((BLOCK, k_width), np.uint16),  # keys
        ((n_sums, BLOCK), np.uint16),  # values
        ((BLOCK, WIDTH), np.float32),  # scores
        ((BLOCK // 2, WIDTH), np.uint32),  # weights
        ((tiles, WIDTH), np.float32),  # peaks
        ((2, WIDTH), np.float32),  # new peaks, factors of the old sums
        ((WIDTH,), np.int32),  # limits
        ((tiles, WIDTH), np.float32),  # mass
        ((tiles, n_sums, WIDTH), np.float32),  # acc
        ((WIDTH, _rounded_up(d_v, LANES)), np.uint16),  # narrow
    )
    scratch = tuple(on_lines((n_threads, *shape), dtype, zeros=True) for shape, dtype in shapes)
    cap = np.float32(softcap / scale)  # scores are scaled after the cap
    scale = np.float32(scale) * LOG2_E
    _attend(q, layout, n_kv, ends, scale, window, cap, sinks, scratch, out, n_threads)
