"""Causal attention of a prefilled chunk in f32, for CPUs that do not multiply bf16.

Flash attention over the stored rows (attention/rows.py). A task is some tokens of one kv head with
all query heads of its group. It widens a block of keys and values to f32. The block stays in the
task's own scratch, in the L2 cache. All query rows of the task attend to the block, WIDTH of them
at a time, one a lane. The layouts are: q (d, WIDTH), scores and weights (keys, WIDTH), and sums of
values (d_v, WIDTH). So maximum, exponential and rescaling need nothing across lanes. Both matrix
products are one function: ROWS numbers of K (or V) each multiply a vector of q (or weights).
Windows, softcaps and sinks: see attend_causal_ref.
"""

from __future__ import annotations

from functools import reduce

import numpy as np
from numba import prange, types

from sparsekv_cli.cpu.attention.flash import LOG2_E, LOWEST, larger, soften_rows
from sparsekv_cli.cpu.attention.rows import K_HEAD, K_KIND, K_ROW, V_HEAD, V_KIND, V_ROW, K, V
from sparsekv_cli.cpu.attention.tile import widen_row
from sparsekv_cli.cpu.jit import llvm
from sparsekv_cli.cpu.jit.emitter import emitter
from sparsekv_cli.cpu.jit.kernel import njit
from sparsekv_cli.cpu.jit.llvm import tasks_of
from sparsekv_cli.cpu.jit.threads import PRANGE_ONLY
from sparsekv_cli.cpu.jit.value import F32, I32, LANES, const, load, select, store, vec

# Sums of a product take 12 of AVX2's 16 registers, 24 of AVX-512's 32, and 24 of NEON's 32.
ROWS, WIDTH = (12, 32) if llvm.has_feature("avx512f") else (6, 16)
BLOCK = 192  # keys between two updates of the running softmax, a multiple of ROWS
UNROLL = 8
TASK_FLOATS = 1 << 16  # most floats of q and of sums that a task keeps
TASKS_A_THREAD = 8  # fewest, if there are enough rows: threads then end together
WIDE = vec(F32, WIDTH)
# 2^r on [-1/2, 1/2], relative error 1.6e-7 in f32. It is exact at 0, so that other rows of a tile
# change no bit.
EXP2 = (1.0, 0.693147004, 0.240222424, 0.0555073395, 0.00967151113, 0.00132647087)
ROUND = 1.5 * 2.0**23  # x + ROUND - ROUND is x rounded to a whole number


def _products(count, wide, wide_step, columns):
    """Returns ROWS vectors <WIDTH x f32>. Vector r is the sum of a[i, r] * x[i] over i < count.

    x[i] is the vector <WIDTH x f32> at the address ``wide`` + i wide_step. columns(i) returns the
    addresses of the ROWS f32 numbers a[i, 0], a[i, 1] and so on.
    """

    def steps(n):
        def body(first, sums):
            for i in (first + j for j in range(n)):
                vector = load(WIDE, wide + i * wide_step)
                sums = [
                    vector.fma(load(F32, at).splat(WIDTH), total)
                    for at, total in zip(columns(i), sums, strict=True)
                ]
            return sums

        return body

    whole = count & -UNROLL
    sums = [const(F32, 0.0, WIDTH)] * ROWS
    sums = llvm.loop(0, whole, UNROLL, sums, steps(UNROLL))
    return llvm.loop(whole, count, 1, sums, steps(1))


@emitter
def _score(q, d, k, row_bytes, start, low, free, count, n_visible, window, out, peak):
    """out[j] = sum of k[j, c] q[c] over c < d, j < count rounded up to ROWS.

    q (d, WIDTH), k rows of row_bytes, out (keys, WIDTH), f32. k[j] is key start + j of the context.
    Lane i sees the last ``window`` of the context's first n_visible[i] keys; int32 (WIDTH,). Other
    keys score -inf. All lanes see the rows from ``low`` to ``free`` of k, multiples of ROWS. peak
    (WIDTH,): raised to the largest score. Arrays are addresses.
    """
    limits = load(vec(I32, WIDTH), n_visible)
    firsts = limits - window.to(I32).splat(WIDTH)

    def hide(scores, j):
        first = (start + j).to(I32)
        hidden = const(F32, -np.inf, WIDTH)
        for r, score in enumerate(scores):
            key = (first + r).splat(WIDTH)
            before_end = key < limits
            seen = before_end & (key >= firsts)
            yield select(seen, score, hidden)

    def tile(masked):
        def body(j, carried):
            rows = [k + (j + r) * row_bytes for r in range(ROWS)]
            scores = _products(d, q, 4 * WIDTH, lambda c: [row + c * 4 for row in rows])
            if masked:
                scores = list(hide(scores, j))
            at = out + j * (4 * WIDTH)
            for r, score in enumerate(scores):
                store(score, at, 4 * WIDTH * r)
            top = reduce(larger, scores)
            store(larger(load(WIDE, peak), top), peak)

        return body

    llvm.loop(0, low, ROWS, [], tile(True))
    llvm.loop(low, free, ROWS, [], tile(False))
    llvm.loop(free, count, ROWS, [], tile(True))


def _exp2(x):
    """Returns 2^x for x <= 0; 2^-126 below -126, and NaN for NaN."""
    low, whole = const(F32, -126.0, WIDTH), const(F32, ROUND, WIDTH)
    x = select(x < low, low, x)
    shifted = x + whole
    r = x - (shifted - whole)
    power = const(F32, EXP2[-1], WIDTH)
    for c in EXP2[-2::-1]:
        power = power.fma(r, c)
    integers = vec(I32, WIDTH)  # the whole number is in the low bits of ``shifted``
    exponent = shifted.bitcast(integers) << 23
    return (power.bitcast(integers) + exponent).bitcast(WIDE)


@emitter(cap=types.float32)
def _soften(scores, count, cap, peak, top):
    """scores = cap tanh(scores / cap), f32 (count, WIDTH), but -inf stays; top: see soften_rows."""
    soften_rows(scores, count, cap, peak, top, WIDTH, _exp2)


@emitter
def _weigh(scores, count, peak, top, old):
    """scores[j] = 2^(scores[j] - top), j < count; old = 2^(peak - top), peak = top.

    scores (count, WIDTH), the others f32 (WIDTH,); addresses. The caller multiplies its earlier
    sums by ``old``.
    """
    new = load(WIDE, top)

    @llvm.every(count)
    def key(j):
        at = scores + j * (4 * WIDTH)
        store(_exp2(load(WIDE, at) - new), at)

    store(_exp2(load(WIDE, peak) - new), old)
    store(new, peak)


@emitter
def _add_values(weights, count, values, panel_bytes, n_panels, old, acc):
    """acc[c] = acc[c] old + sum of values[j, c] weights[j] over j < count; c < ROWS n_panels.

    values: panels of ROWS dims, (keys, ROWS) each, panel_bytes apart; acc (ROWS n_panels, WIDTH).
    """

    @llvm.every(n_panels)
    def panel(p):
        first = values + p * panel_bytes

        def columns(j):
            row = first + j * (4 * ROWS)
            return [row + 4 * r for r in range(ROWS)]

        sums = _products(count, weights, 4 * WIDTH, columns)
        shrink = load(WIDE, old)
        at = acc + p * (4 * WIDTH * ROWS)
        for r, total in enumerate(sums):
            before = load(WIDE, at, 4 * WIDTH * r)
            store(before.fma(shrink, total), at, 4 * WIDTH * r)


@emitter
def _spread(row, n_panels, out, panel_bytes):
    """out[p] = row[p ROWS .. (p + 1) ROWS), f32, p < n_panels, panel_bytes apart; addresses."""

    @llvm.every(n_panels)
    def panel(p):
        store(load(vec(F32, ROWS), row + p * (4 * ROWS)), out + p * panel_bytes)


@njit(cache=True, nogil=True)
def _read_block(layout, head, first, count, d_v, row, keys, values):
    """Reads rows first .. first + count of a kv head as f32, in the layout of the products.

    keys (BLOCK, width); values (panels, BLOCK, ROWS), element d_v of a row is a 1; row f32
    (>= ROWS panels,): scratch.
    """
    v_width = (d_v + LANES - 1) // LANES * LANES
    k = layout[K] + head * layout[K_HEAD] + first * layout[K_ROW]
    v = layout[V] + head * layout[V_HEAD] + first * layout[V_ROW]
    for j in range(count):
        widen_row(layout[K_KIND], k + j * layout[K_ROW], keys[j])
        widen_row(layout[V_KIND], v + j * layout[V_ROW], row[:v_width])
        _spread(row, values.shape[0], values[0, j], 4 * ROWS * BLOCK)
        values[d_v // ROWS, j, d_v % ROWS] = 1


@njit(cache=True, nogil=True)
def _attend_tiles(
    layout, head, d_v, queries, n_visible, window, cap, row, keys, values, scores, peak, acc
):
    """Runs one task: attention of tiles of query rows to all their visible keys.

    queries f32 (tiles, d, WIDTH) and cap are scaled by log2(e). n_visible int32 (tiles, WIDTH),
    ascending: a row attends to the last ``window`` of its first n_visible keys. peak f32 (tiles,
    WIDTH). acc f32 (tiles, ROWS panels, WIDTH): sums of values, then the sum of weights, whose
    values are ones. At the start, peak and acc hold the sinks.
    """
    n_tiles, d = queries.shape[:2]
    top, old = np.empty(WIDTH, np.float32), np.empty(WIDTH, np.float32)
    for start in range(max(0, n_visible[0, 0] - window), n_visible[-1, -1], BLOCK):
        size = min(BLOCK, n_visible[-1, -1] - start)
        _read_block(layout, head, start, size, d_v, row, keys, values)
        for t in range(n_tiles):
            count = min(size, n_visible[t, -1] - start)
            if count <= 0 or start + size <= n_visible[t, 0] - window:
                continue
            hidden = max(0, min(count, n_visible[t, -1] - window - start))
            low = (hidden + ROWS - 1) // ROWS * ROWS
            free = max(low, max(0, min(count, n_visible[t, 0] - start)) // ROWS * ROWS)
            top[:] = peak[t]
            if cap:
                top[:] = LOWEST
            _score(
                queries[t], d, keys, 4 * keys.shape[1], start, low, free,
                count, n_visible[t], window, scores, top,
            )  # fmt: skip
            if cap:
                _soften(scores, count, cap, peak[t], top)
            _weigh(scores, count, peak[t], top, old)
            _add_values(scores, count, values, 4 * ROWS * BLOCK, values.shape[0], old, acc[t])


@njit(cache=True, nogil=True)
def _attend_tasks(counter, q, layout, n_kv, ends, scale, window, cap, sinks, most_tiles, out):
    """Runs tasks until none is left, the long ones first. A task is some tiles of a kv head.

    The rows of a kv head are counted token by token. Row r belongs to token r // group, and to
    query head r % group of the group.
    """
    n_head, n_new, d = q.shape
    group, d_v = n_head // n_kv, out.shape[2]
    n_rows = n_new * group
    n_tiles = (n_rows + WIDTH - 1) // WIDTH
    n_parts = (n_tiles + most_tiles - 1) // most_tiles
    n_panels = d_v // ROWS + 1  # one element more than d_v: the ones that sum the weights
    row = np.zeros(ROWS * n_panels + LANES, np.float32)
    keys = np.empty((BLOCK, (d + LANES - 1) // LANES * LANES), np.float32)
    values = np.empty((n_panels, BLOCK, ROWS), np.float32)
    scores = np.empty((BLOCK, WIDTH), np.float32)
    queries = np.empty((most_tiles, d, WIDTH), np.float32)
    acc = np.empty((most_tiles, n_panels * ROWS, WIDTH), np.float32)
    peak = np.empty((most_tiles, WIDTH), np.float32)
    n_visible = np.empty((most_tiles, WIDTH), np.int32)
    for task in tasks_of(counter, n_kv * n_parts):
        head, part = task % n_kv, n_parts - 1 - task // n_kv
        first, last = part * n_tiles // n_parts, (part + 1) * n_tiles // n_parts
        for t in range(last - first):
            for i in range(WIDTH):
                r = min((first + t) * WIDTH + i, n_rows - 1)
                token, h = r // group, head * group + r % group
                n_visible[t, i] = ends[token]
                for c in range(d):
                    queries[t, c, i] = q[h, token, c] * scale
                peak[t, i] = sinks[h] * LOG2_E if len(sinks) else LOWEST
                acc[t, :, i] = 0
                acc[t, d_v, i] = len(sinks) > 0
        _attend_tiles(
            layout, head, d_v, queries[: last - first], n_visible[: last - first], window, cap, row,
            keys, values, scores, peak, acc,
        )  # fmt: skip
        for t in range(last - first):
            for i in range(min(WIDTH, n_rows - (first + t) * WIDTH)):
                r = (first + t) * WIDTH + i
                token, h = r // group, head * group + r % group
                inverse = np.float32(1) / acc[t, d_v, i]
                for c in range(d_v):
                    out[token, h, c] = acc[t, c, i] * inverse


@njit(cache=True, nogil=True, parallel=PRANGE_ONLY)
def attend_causal(q, layout, n_kv, ends, scale, window, softcap, sinks, out, n_threads):
    """Computes attention of T rows: row t to the last ``window`` of the first ends[t] stored rows.

    q f32 (H, T, d); layout int64 (8,): where K and V lie, see attention/rows.py; ends int64 (T,),
    ascending; out f32 (T, H, d_v). window: flash.ALL_ROWS for all; softcap: 0 for none; sinks f32
    (H,), or empty.
    """
    n_head, n_new, d = q.shape
    n_tiles = (n_new * (n_head // n_kv) + WIDTH - 1) // WIDTH
    fitting = TASK_FLOATS // (WIDTH * (d + out.shape[2]))
    wanted = n_kv * n_tiles // (TASKS_A_THREAD * n_threads)
    most_tiles = max(1, min(fitting, wanted))
    counter = np.zeros(1, np.int64)
    scale *= LOG2_E  # weights are powers of 2
    cap = softcap * LOG2_E
    for _thread in prange(n_threads):
        _attend_tasks(counter, q, layout, n_kv, ends, scale, window, cap, sinks, most_tiles, out)
