"""Causal attention of a prefilled chunk in bf16, for CPUs that multiply bf16 (jit/bf16.py).

Flash attention over the rows as they are stored (attention/rows.py), as attention/prefill_f32.py
has it. A task is some tokens of one kv head with all query heads of its group. It reads a block of
keys, and of values transposed, as bf16 into its own scratch, in the L2 cache, and all its query
rows attend to that, WIDTH of them at a time. These lie across the lanes of vectors: q in pairs,
scores (keys, WIDTH), weights in pairs of keys, and sums of values (d_v, WIDTH). So maximum,
exponential and rescaling need nothing across lanes, and both matrix products have the stored rows
on the left.
"""

from __future__ import annotations

import numpy as np
from llvmlite import ir
from numba import njit, prange, types
from numba.extending import intrinsic

from sparsekv_cli.cpu.attention.rows import F16 as F16_ROWS
from sparsekv_cli.cpu.attention.rows import K_HEAD, K_KIND, K_ROW, Q8_0, V_HEAD, V_KIND, V_ROW, K, V
from sparsekv_cli.cpu.attention.tile import NEGATIVE_INFINITY, row_scale, row_vector
from sparsekv_cli.cpu.jit import bf16, llvm
from sparsekv_cli.cpu.jit.bf16 import PAIRS, ROWS, multiply, narrowed
from sparsekv_cli.cpu.jit.llvm import (
    F32,
    I16,
    I32,
    I64,
    LANES,
    VF,
    VI,
    const,
    load,
    next_task,
    splat,
)
from sparsekv_cli.cpu.jit.pointers import on_lines
from sparsekv_cli.cpu.jit.threads import PRANGE_ONLY

WIDTH = 4 * LANES  # query rows of a tile
# Keys between two updates of the running softmax: a multiple of 32 and of ROWS.
BLOCK = 512 if bf16.HAS_TILES else 192
TASK_TILES = 12  # at most; a task reads all its keys anew
TASKS_A_THREAD = 3  # at least, where there are enough rows: threads end together
UNIT = 4 * PAIRS  # bytes
LOG2_E = np.float32(1.4426950408889634)
# 2^r on [-1/2, 1/2], relative error 7e-6: coefficients of a Chebyshev fit
EXP2 = (1.00000005, 0.693127263, 0.240222117, 0.0558755351, 0.00967076788)


def larger(b: ir.IRBuilder, x: ir.Value, y: ir.Value) -> ir.Value:
    """The larger of two numbers, or y if one is NaN: one instruction, where maxnum takes more."""
    return b.select(b.fcmp_ordered(">", x, y), x, y)


# --- a block of keys and values -------------------------------------------------------------------


@intrinsic
def _narrow(typingctx, kind, row, width, out):
    """out bf16 (width,) = a row of ``kind``, a literal; addresses. width: a multiple of 16."""
    if not isinstance(kind, types.IntegerLiteral):
        return None

    def codegen(context, b, signature, args):
        mode = signature.args[0].literal_value
        _, row, width, out = args

        def body(c, carried):
            lanes = row_vector(b, mode, row, c, row_scale(b, mode, row, width, c))
            llvm.store(b, narrowed(b, lanes), b.add(out, b.mul(c, I64(2))))
            return []

        llvm.loop(b, I64(0), width, LANES, [], body)
        return context.get_dummy_value()

    i64 = types.int64
    return types.void(kind, i64, i64, i64), codegen


@intrinsic
def _narrow_transposed(typingctx, kind, rows, row_bytes, last, width, out, out_row):
    """out bf16 (width, 32) = 32 rows of ``kind``, a literal, those behind ``last`` like it.

    Addresses; out_row: bytes from one row of ``out`` to the next.
    """
    if not isinstance(kind, types.IntegerLiteral):
        return None

    def codegen(context, b, signature, args):
        mode = signature.args[0].literal_value
        _, rows, row_bytes, last, width, out, out_row = args
        places = []
        for j in range(2 * LANES):
            behind = b.icmp_signed(">", I64(j), last)
            places.append(b.add(rows, b.mul(row_bytes, b.select(behind, last, I64(j)))))

        def body(c, carried):
            words = [
                b.zext(
                    narrowed(b, row_vector(b, mode, at, c, row_scale(b, mode, at, width, c))), VI
                )
                for at in places
            ]
            pairs = [
                b.or_(low, b.shl(high, const(I32, 16)))
                for low, high in zip(words[::2], words[1::2], strict=True)
            ]
            for i, column in enumerate(llvm.transposed(b, pairs)):
                llvm.store(b, column, b.add(out, b.mul(b.add(c, I64(i)), out_row)))
            return []

        llvm.loop(b, I64(0), width, LANES, [], body)
        return context.get_dummy_value()

    return types.void(kind, *[types.int64] * 6), codegen


@njit(cache=True, nogil=True)
def _read_block(layout, head, first, count, widths, keys, values):
    """Rows first .. first + count of a kv head: keys bf16 (BLOCK, >= d), values (>= d_v, BLOCK).

    widths: elements of a stored row of K and of V.
    """
    k = layout[K] + head * layout[K_HEAD] + first * layout[K_ROW]
    v = layout[V] + head * layout[V_HEAD] + first * layout[V_ROW]
    k_at, k_row = keys.ctypes.data, keys.strides[0]
    v_at, v_row = values.ctypes.data, values.strides[0]
    for j in range(count):
        row, to = k + j * layout[K_ROW], k_at + j * k_row
        if layout[K_KIND] == Q8_0:
            _narrow(Q8_0, row, widths[0], to)
        else:
            _narrow(F16_ROWS, row, widths[0], to)
    for j in range(0, count, 2 * LANES):
        row, to, last = v + j * layout[V_ROW], v_at + 2 * j, count - 1 - j
        if layout[V_KIND] == Q8_0:
            _narrow_transposed(Q8_0, row, layout[V_ROW], last, widths[1], to, v_row)
        else:
            _narrow_transposed(F16_ROWS, row, layout[V_ROW], last, widths[1], to, v_row)


# --- softmax --------------------------------------------------------------------------------------

VECTORS = range(WIDTH // LANES)


def _load_tile(b: ir.IRBuilder, address: ir.Value) -> list[ir.Value]:
    return [load(b, VF, address, 4 * LANES * i) for i in VECTORS]


def _store_tile(b: ir.IRBuilder, vectors: list[ir.Value], address: ir.Value) -> None:
    for i, vector in enumerate(vectors):
        llvm.store(b, vector, address, 4 * LANES * i)


@intrinsic
def _hide_and_find_peaks(typingctx, scores, free, count, seen, top):
    """top = the largest of top and of scores[j], j < count; lane i sees keys j < seen[i] only.

    scores f32 (count, WIDTH), of which those that a lane does not see become -inf; all lanes see
    the first ``free``. seen int32 (WIDTH,), top f32 (WIDTH,). Addresses.
    """

    def codegen(context, b, signature, args):
        scores, free, count, seen, top = args
        limits = [load(b, VI, seen, 4 * LANES * i) for i in VECTORS]

        def found(best, row):
            return [larger(b, x, value) for x, value in zip(row, best, strict=True)]

        def seen_row(j, best):
            return found(best, _load_tile(b, b.add(scores, b.mul(j, I64(4 * WIDTH)))))

        def hidden_row(j, best):
            at, key = b.add(scores, b.mul(j, I64(4 * WIDTH))), splat(b, b.trunc(j, I32))
            row = [
                b.select(b.icmp_signed("<", key, limit), x, const(F32, -np.inf))
                for x, limit in zip(_load_tile(b, at), limits, strict=True)
            ]
            _store_tile(b, row, at)
            return found(best, row)

        best = llvm.loop(b, I64(0), free, 1, _load_tile(b, top), seen_row)
        _store_tile(b, llvm.loop(b, free, count, 1, best, hidden_row), top)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 5), codegen


def _exp2_lanes(b: ir.IRBuilder, x: ir.Value) -> ir.Value:
    """2^x for x <= 0, NaN of NaN."""
    x = larger(b, const(F32, -200.0), x)  # its power is 0 too
    n = llvm.call_named(b, "llvm.rint.v16f32", VF, x)
    r = b.fsub(x, n)
    power = const(F32, EXP2[-1])
    for c in EXP2[-2::-1]:
        power = llvm.fma(b, power, r, const(F32, c))
    every, rounding = ir.Constant(I16, -1), I32(4)  # as the CPU is set to
    name = "llvm.x86.avx512.mask.scalef.ps.512"
    return llvm.call_named(b, name, VF, power, n, power, every, rounding)


@intrinsic
def _weigh(typingctx, scores, count, scale, peak, top, mass, old, weights):
    """weights[j] = 2^(scale (scores[j] - top)), j < count; old = 2^(scale (peak - top)).

    Then peak = top, and mass = mass old + the weights' sum. scores f32 (count, WIDTH); weights
    bf16 in pairs of keys, (count / 2, 2 WIDTH); the others f32 (WIDTH,); addresses. Returns
    whether any of old is not 1.
    """

    def codegen(context, b, signature, args):
        scores, count, scale, peak, top, mass, old, weights = args
        scales, tops = splat(b, scale), _load_tile(b, top)
        lifts = [b.fneg(b.fmul(x, scales)) for x in tops]
        half, high = const(I32, 0x8000), const(I32, -0x10000)

        def pair(j, sums):
            at = b.add(scores, b.mul(j, I64(4 * WIDTH)))
            to = b.add(weights, b.mul(j, I64(2 * WIDTH)))
            new = []
            for i, (lift, total) in enumerate(zip(lifts, sums, strict=True)):
                rounded = []
                for key in range(2):
                    x = load(b, VF, at, 4 * WIDTH * key + 4 * LANES * i)
                    weight = _exp2_lanes(b, llvm.fma(b, x, scales, lift))
                    total = b.fadd(total, weight)
                    rounded.append(b.add(b.bitcast(weight, VI), half))
                low = b.lshr(rounded[0], const(I32, 16))
                llvm.store(b, b.or_(low, b.and_(rounded[1], high)), to, 4 * LANES * i)
                new.append(total)
            return new

        sums = llvm.loop(b, I64(0), count, 2, [const(F32, 0.0)] * len(VECTORS), pair)
        olds = [
            _exp2_lanes(b, llvm.fma(b, x, scales, lift))
            for x, lift in zip(_load_tile(b, peak), lifts, strict=True)
        ]
        masses = [llvm.fma(b, *each) for each in zip(_load_tile(b, mass), olds, sums, strict=True)]
        for vectors, place in ((olds, old), (masses, mass), (tops, peak)):
            _store_tile(b, vectors, place)
        moved = [b.fcmp_unordered("!=", x, const(F32, 1.0)) for x in olds]
        while len(moved) > 1:
            moved = [b.or_(*each) for each in zip(moved[::2], moved[1::2], strict=True)]
        return b.zext(b.icmp_unsigned("!=", b.bitcast(moved[0], I16), I16(0)), I64)

    i64 = types.int64
    return i64(i64, i64, types.float32, *[i64] * 5), codegen


@intrinsic
def _shrink(typingctx, acc, n_rows, old):
    """acc[c] *= old, f32 (n_rows, WIDTH) and (WIDTH,); addresses."""

    def codegen(context, b, signature, args):
        acc, n_rows, old = args
        factors = _load_tile(b, old)

        def body(c, carried):
            at = b.add(acc, b.mul(c, I64(4 * WIDTH)))
            row = zip(_load_tile(b, at), factors, strict=True)
            _store_tile(b, [b.fmul(x, factor) for x, factor in row], at)
            return []

        llvm.loop(b, I64(0), n_rows, 1, [], body)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 3), codegen


@intrinsic
def _divide(typingctx, acc, d_v, mass, out):
    """out bf16 (WIDTH, d_v) = acc^T / mass, acc f32 (d_v, WIDTH), mass (WIDTH,); addresses.

    d_v: a multiple of 16.
    """

    def codegen(context, b, signature, args):
        acc, d_v, mass, out = args
        inverses = [b.fdiv(const(F32, 1.0), x) for x in _load_tile(b, mass)]

        def body(c, carried):
            for i in VECTORS:
                at = b.add(acc, b.add(b.mul(c, I64(4 * WIDTH)), I64(4 * LANES * i)))
                rows = [load(b, VF, at, 4 * WIDTH * r) for r in range(LANES)]
                rows = [b.fmul(row, inverses[i]) for row in rows]
                for lane, row in enumerate(llvm.transposed(b, rows)):
                    element = b.add(b.mul(d_v, I64(LANES * i + lane)), c)
                    llvm.store(b, narrowed(b, row), b.add(out, b.mul(element, I64(2))))
            return []

        llvm.loop(b, I64(0), d_v, LANES, [], body)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 4), codegen


# --- tasks ----------------------------------------------------------------------------------------


@njit(cache=True, nogil=True)
def _attend_tiles(layout, head, widths, queries, seen, scale, scratch, mass, acc):
    """One task: tiles of query rows over all the keys that they see.

    queries bf16 in pairs, uint32 (tiles, pairs, WIDTH); seen int32 (tiles, WIDTH): keys that a row
    sees, ascending; mass f32 (tiles, WIDTH); acc f32 (tiles, >= d_v, WIDTH): the sums of weights
    and of values. scratch: keys, values, scores and weights of a block, peaks and a few vectors.
    """
    keys, values, scores, weights, peak, small, limits = scratch
    n_tiles, n_units, n_sums = queries.shape[0], queries.shape[1] // PAIRS, acc.shape[1]
    top, old = small[0].ctypes.data, small[1].ctypes.data
    key_bytes, value_bytes, tile_bytes = keys.strides[0], values.strides[0], 4 * WIDTH
    peak[:n_tiles] = NEGATIVE_INFINITY
    mass[:] = 0
    acc[:] = 0
    for start in range(0, seen[-1, -1], BLOCK):
        size = min(BLOCK, seen[-1, -1] - start)
        _read_block(layout, head, start, size, widths, keys, values)
        for t in range(n_tiles):
            count = min(size, seen[t, -1] - start)
            if count <= 0:
                continue
            whole = (count + 2 * PAIRS - 1) // (2 * PAIRS) * (2 * PAIRS)
            free = max(0, min(count, seen[t, 0] - start))
            for j in range(0, count, ROWS):
                multiply(
                    4, keys[j].ctypes.data, key_bytes, UNIT, queries[t].ctypes.data, tile_bytes,
                    n_units, scores[j].ctypes.data, tile_bytes, 0,
                )  # fmt: skip
            for i in range(WIDTH):
                limits[i] = seen[t, i] - start
            small[0] = peak[t]
            scores_at, weights_at = scores.ctypes.data, weights.ctypes.data
            _hide_and_find_peaks(scores_at, free, whole, limits.ctypes.data, top)
            moved = _weigh(
                scores_at, whole, scale, peak[t].ctypes.data, top, mass[t].ctypes.data, old,
                weights_at,
            )  # fmt: skip
            if moved:
                _shrink(acc[t].ctypes.data, n_sums, old)
            for c in range(0, n_sums, ROWS):
                multiply(
                    4, values[c].ctypes.data, value_bytes, UNIT, weights_at, tile_bytes,
                    whole // (2 * PAIRS), acc[t, c].ctypes.data, tile_bytes, 1,
                )  # fmt: skip


@njit(cache=True, nogil=True)
def _attend_tasks(counter, q, layout, n_kv, n, scale, queries, scratch, mass, acc, narrow, out):
    """Takes tasks, (kv head, some tiles of its rows), until there are none, the long ones first.

    The rows of a kv head are counted token by token: row r is of token r // group and of query head
    r % group of its group.
    """
    n_head, n_new, d = q.shape
    group, d_v = n_head // n_kv, out.shape[2]
    n_rows = n_new * group
    n_tiles, most_tiles = (n_rows + WIDTH - 1) // WIDTH, len(queries)
    n_parts = (n_tiles + most_tiles - 1) // most_tiles
    seen = np.empty((most_tiles, WIDTH), np.int32)
    bf16.begin()
    task = next_task(counter)
    while task < n_kv * n_parts:
        head, part = task % n_kv, n_parts - 1 - task // n_kv
        first, last = part * n_tiles // n_parts, (part + 1) * n_tiles // n_parts
        for t in range(last - first):
            for i in range(WIDTH):
                r = min((first + t) * WIDTH + i, n_rows - 1)
                token, h = r // group, head * group + r % group
                seen[t, i] = n - n_new + token + 1
                for c in range(d // 2):
                    pair = np.uint32(q[h, token, 2 * c + 1]) << np.uint32(16)
                    queries[t, c, i] = pair | np.uint32(q[h, token, 2 * c])
        tiles = last - first
        widths = (d + LANES - 1) // LANES * LANES, narrow.shape[1]
        _attend_tiles(
            layout, head, widths, queries[:tiles], seen[:tiles], scale, scratch, mass[:tiles],
            acc[:tiles],
        )  # fmt: skip
        for t in range(tiles):
            _divide(acc[t].ctypes.data, narrow.shape[1], mass[t].ctypes.data, narrow.ctypes.data)
            for i in range(min(WIDTH, n_rows - (first + t) * WIDTH)):
                r = (first + t) * WIDTH + i
                target = out[r // group, head * group + r % group]
                for c in range(d_v):
                    target[c] = narrow[i, c]
        task = next_task(counter)
    bf16.end()


@njit(cache=True, nogil=True, parallel=PRANGE_ONLY)
def _attend(q, layout, n_kv, n, scale, scratch, out, n_threads):
    queries, keys, values, scores, weights, peak, small, limits, mass, acc, narrow = scratch
    counter = np.zeros(1, np.int64)
    for thread in prange(n_threads):
        own = (
            keys[thread], values[thread], scores[thread], weights[thread], peak[thread],
            small[thread], limits[thread],
        )  # fmt: skip
        _attend_tasks(
            counter, q, layout, n_kv, n, scale, queries[thread], own, mass[thread], acc[thread],
            narrow[thread], out,
        )  # fmt: skip


def _rounded_up(n: int, unit: int) -> int:
    return -(-n // unit) * unit


def attend_causal(q, layout, n_kv, n, scale, out, n_threads) -> None:
    """Attention of the last T of n stored rows, each over the rows up to its own.

    q bf16 bits, uint16 (H, T, d), d even; layout int64 (8,): where K and V lie, see
    attention/rows.py; out bf16 bits (T, H, d_v).
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
        ((2, WIDTH), np.float32),  # new peaks, what old sums shrink by
        ((WIDTH,), np.int32),  # limits
        ((tiles, WIDTH), np.float32),  # mass
        ((tiles, n_sums, WIDTH), np.float32),  # acc
        ((WIDTH, _rounded_up(d_v, LANES)), np.uint16),  # narrow
    )
    scratch = tuple(on_lines((n_threads, *shape), dtype, zeros=True) for shape, dtype in shapes)
    _attend(q, layout, n_kv, n, np.float32(scale) * LOG2_E, scratch, out, n_threads)


def attend_causal_ref(q, k, v, scale):
    """f64 (H, T, d_v) of q (H, T, d), k (G, n, d), v (G, n, d_v), all of them floats."""
    group, n, n_new = q.shape[0] // k.shape[0], k.shape[1], q.shape[1]
    k, v = (np.repeat(x.astype(np.float64), group, axis=0) for x in (k, v))
    scores = scale * q.astype(np.float64) @ k.transpose(0, 2, 1)
    seen = np.arange(n) <= np.arange(n - n_new, n)[:, None]
    scores = np.where(seen, scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return weights @ v / weights.sum(-1, keepdims=True)
