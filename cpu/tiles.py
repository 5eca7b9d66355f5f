"""Attention on a tile of query heads, in vector IR: scores, exponentials and weighted values.

K and V rows are f16, padded to a multiple of 16 elements. A row is loaded and widened once for a
tile of up to four query heads of its GQA group, and the dot products of a tile are summed across
lanes together (emit.sum_many). Rows are consecutive, or listed by int32 numbers (``gather``).
"""

from __future__ import annotations

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from sparsekv_cli.cpu import emit
from sparsekv_cli.cpu.emit import F32, I32, I64, LANES, VF, VI, const, load, splat

PAD = 32  # floats that a score buffer needs behind its last score
AHEAD_SCAN, AHEAD_GATHER = 96, 40  # rows between a load and its prefetch
NEGATIVE_INFINITY = np.float32(-np.inf)


def _row_address(b, base, row_bytes, idx, j, gather):
    """Address of row j (of row idx[j] when gathering; idx is the address of int32)."""
    if gather:
        j = b.sext(load(b, I32, b.add(idx, b.mul(j, I64(4)))), I64)
    return b.add(base, b.mul(j, row_bytes))


@intrinsic
def tile_scores(typingctx, tile, gather, q, k, row_bytes, idx, count, d, out, out_stride):
    """out[t, j] = q[t] . k[row j], t < tile, j < count; q f32 (tile, d), k f16, out f32.

    Addresses are i64; ``out_stride`` in floats. ``gather`` = 1: row j is idx[j] (int32). Writes up
    to 15 floats behind out[t, count). d is a multiple of 16.
    """
    if not isinstance(tile, types.IntegerLiteral) or not isinstance(gather, types.IntegerLiteral):
        return None

    def codegen(context, b, signature, args):
        tile_, gather_ = (signature.args[i].literal_value for i in (0, 1))
        _, _, q, k, row_bytes, idx, count, d, out, out_stride = args
        n_keys = LANES // tile_
        last = b.sub(count, I64(1))

        def group(j, carried):
            rows = []
            for i in range(n_keys):
                at = b.add(j, I64(i))
                at = b.select(b.icmp_signed("<", at, last), at, last)
                rows.append(_row_address(b, k, row_bytes, idx, at, gather_))

            ahead = _rows_ahead(b, k, row_bytes, idx, j, n_keys, last, gather_)

            def dims(c, sums):
                for row in ahead:
                    emit.prefetch(b, b.add(row, b.mul(c, I64(2))))
                keys = [emit.load_half_lanes(b, b.add(row, b.mul(c, I64(2)))) for row in rows]
                new = []
                for t in range(tile_):
                    at = b.add(q, b.mul(b.add(b.mul(I64(t), d), c), I64(4)))
                    query = load(b, VF, at)
                    for i in range(n_keys):
                        new.append(emit.fma(b, keys[i], query, sums[t * n_keys + i]))
                return new

            zero = const(F32, 0.0)
            sums = emit.loop(b, I64(0), d, LANES, [zero] * (tile_ * n_keys), dims)
            sums += [zero] * (LANES - len(sums))
            dots = emit.sum_many(b, sums)
            for t in range(tile_):
                at = b.add(out, b.mul(b.add(b.mul(I64(t), out_stride), j), I64(4)))
                part = emit.shuffle(b, dots, dots, range(t * n_keys, (t + 1) * n_keys))
                emit.store(b, part, at)
            return []

        emit.loop(b, I64(0), count, n_keys, [], group)
        return context.get_dummy_value()

    i64 = types.int64
    return types.void(tile, gather, i64, i64, i64, i64, i64, i64, i64, i64), codegen


@intrinsic
def tile_values(typingctx, tile, gather, p, p_stride, v, row_bytes, idx, count, d, acc):
    """acc[t] += sum over j < count of p[t, j] v[row j]; acc f32 (tile, d), addresses as i64."""
    if not isinstance(tile, types.IntegerLiteral) or not isinstance(gather, types.IntegerLiteral):
        return None

    def codegen(context, b, signature, args):
        tile_, gather_ = (signature.args[i].literal_value for i in (0, 1))
        _, _, p, p_stride, v, row_bytes, idx, count, d, acc = args

        def chunk(c, n_vectors):
            """Accumulates dims c .. c + 16 n_vectors."""
            unroll = max(1, 8 // (tile_ * n_vectors))
            acc_at = [
                b.add(acc, b.mul(b.add(b.add(b.mul(I64(t), d), c), I64(LANES * i)), I64(4)))
                for t in range(tile_)
                for i in range(n_vectors)
            ]

            def key(j, sums):
                row = _row_address(b, v, row_bytes, idx, j, gather_)
                values = [
                    emit.load_half_lanes(b, b.add(row, b.mul(b.add(c, I64(LANES * i)), I64(2))))
                    for i in range(n_vectors)
                ]
                new = []
                for t in range(tile_):
                    weight_at = b.add(p, b.mul(b.add(b.mul(I64(t), p_stride), j), I64(4)))
                    weight = splat(b, load(b, F32, weight_at))
                    for i in range(n_vectors):
                        new.append(emit.fma(b, values[i], weight, sums[t * n_vectors + i]))
                return new

            size = len(acc_at)

            last = b.sub(count, I64(1))

            def keys(j, sums):
                for row in _rows_ahead(b, v, row_bytes, idx, j, unroll, last, gather_):
                    for line in range(0, 2 * LANES * n_vectors, 64):
                        emit.prefetch(b, b.add(row, b.mul(b.add(c, I64(line // 2)), I64(2))))
                new = []
                for u in range(unroll):
                    new += key(b.add(j, I64(u)), sums[u * size : (u + 1) * size])
                return new

            zero = const(F32, 0.0)
            whole = b.sub(count, b.srem(count, I64(unroll)))
            start = [load(b, VF, at) for at in acc_at] + [zero] * (size * (unroll - 1))
            sums = emit.loop(b, I64(0), whole, unroll, start, keys)
            for u in range(1, unroll):
                sums[:size] = [b.fadd(sums[i], sums[u * size + i]) for i in range(size)]
            sums = emit.loop(b, whole, count, 1, sums[:size], key)
            for at, value in zip(acc_at, sums, strict=True):
                emit.store(b, value, at)

        def wide(c, carried):
            chunk(c, 4)
            return []

        def narrow(c, carried):
            chunk(c, 1)
            return []

        whole = b.sub(d, b.srem(d, I64(64)))
        emit.loop(b, I64(0), whole, 64, [], wide)
        emit.loop(b, whole, d, LANES, [], narrow)
        return context.get_dummy_value()

    i64 = types.int64
    return types.void(tile, gather, i64, i64, i64, i64, i64, i64, i64, i64), codegen


def exp_lanes(b: ir.IRBuilder, x: ir.Value) -> ir.Value:
    """e^x for x <= 0, <16 x float>, within 2 units in the last place; 0 below -87.

    Cody-Waite reduction x = n ln 2 + r and a polynomial of degree 6 in r (Cephes' expf).
    """
    x = emit.call_named(b, "llvm.maxnum.v16f32", VF, x, const(F32, -87.5))
    n = emit.fma(b, x, const(F32, 1.4426950408889634), const(F32, 0.5))
    n = emit.call_named(b, "llvm.floor.v16f32", VF, n)
    r = emit.fma(b, n, const(F32, -0.693359375), x)
    r = emit.fma(b, n, const(F32, 2.12194440e-4), r)
    y = const(F32, 1.9875691500e-4)
    for c in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 0.5):
        y = emit.fma(b, y, r, const(F32, c))
    y = b.fadd(emit.fma(b, y, b.fmul(r, r), r), const(F32, 1.0))
    power = b.shl(b.add(b.fptosi(n, VI), const(I32, 127)), const(I32, 23))
    y = b.fmul(y, b.bitcast(power, VF))
    return b.select(b.fcmp_ordered(">", x, const(F32, -87.0)), y, const(F32, 0.0))


@intrinsic
def exp_in_place(typingctx, scores, count, peak):
    """scores[j] = e^(scores[j] - peak), j < count rounded up to 16; returns their sum (f32)."""

    def codegen(context, b, signature, args):
        scores, count, peak = args
        peak_lanes = splat(b, peak)

        def body(j, sums):
            at = b.add(scores, b.mul(j, I64(4)))
            y = exp_lanes(b, b.fsub(load(b, VF, at), peak_lanes))
            emit.store(b, y, at)
            return [b.fadd(sums[0], y)]

        return emit.sum_lanes(b, emit.loop(b, I64(0), count, LANES, [const(F32, 0.0)], body)[0])

    return types.float32(types.int64, types.int64, types.float32), codegen


@intrinsic
def max_of(typingctx, scores, count):
    """The largest of scores[0 .. count rounded up to 16) (f32)."""

    def codegen(context, b, signature, args):
        scores, count = args

        def body(j, best):
            value = load(b, VF, b.add(scores, b.mul(j, I64(4))))
            return [emit.call_named(b, "llvm.maxnum.v16f32", VF, best[0], value)]

        return emit.max_lanes(b, emit.loop(b, I64(0), count, LANES, [const(F32, -np.inf)], body)[0])

    return types.float32(types.int64, types.int64), codegen


@intrinsic
def store_halves(typingctx, source, target, count):
    """target[i] = f16(source[i]), i < count (a multiple of 16); f32 source, addresses."""

    def codegen(context, b, signature, args):
        source, target, count = args

        def body(j, carried):
            value = load(b, VF, b.add(source, b.mul(j, I64(4))))
            emit.store(b, b.fptrunc(value, emit.vec(emit.F16)), b.add(target, b.mul(j, I64(2))))
            return []

        emit.loop(b, I64(0), count, LANES, [], body)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), codegen


def _rows_ahead(b, base, row_bytes, idx, j, n_rows, last, gather):
    """Addresses of n_rows rows from j + AHEAD on; in a list, of its row ``last`` at most."""
    rows = []
    for i in range(n_rows):
        at = b.add(j, I64((AHEAD_GATHER if gather else AHEAD_SCAN) + i))
        if gather:
            at = b.select(b.icmp_signed("<", at, last), at, last)
        rows.append(_row_address(b, base, row_bytes, idx, at, gather))
    return rows


@njit(cache=True, nogil=True)
def scores_any(tile, gather, q, k, row_bytes, idx, count, d, out, out_stride):
    """``tile_scores`` for a tile of 1 to 4 heads that is known at run time only."""
    if gather:
        if tile == 1:
            tile_scores(1, 1, q, k, row_bytes, idx, count, d, out, out_stride)
        elif tile == 2:
            tile_scores(2, 1, q, k, row_bytes, idx, count, d, out, out_stride)
        elif tile == 3:
            tile_scores(3, 1, q, k, row_bytes, idx, count, d, out, out_stride)
        else:
            tile_scores(4, 1, q, k, row_bytes, idx, count, d, out, out_stride)
    elif tile == 1:
        tile_scores(1, 0, q, k, row_bytes, idx, count, d, out, out_stride)
    elif tile == 2:
        tile_scores(2, 0, q, k, row_bytes, idx, count, d, out, out_stride)
    elif tile == 3:
        tile_scores(3, 0, q, k, row_bytes, idx, count, d, out, out_stride)
    else:
        tile_scores(4, 0, q, k, row_bytes, idx, count, d, out, out_stride)


@njit(cache=True, nogil=True)
def values_any(tile, gather, p, p_stride, v, row_bytes, idx, count, d, acc):
    """``tile_values`` for a tile of 1 to 4 heads that is known at run time only."""
    if gather:
        if tile == 1:
            tile_values(1, 1, p, p_stride, v, row_bytes, idx, count, d, acc)
        elif tile == 2:
            tile_values(2, 1, p, p_stride, v, row_bytes, idx, count, d, acc)
        elif tile == 3:
            tile_values(3, 1, p, p_stride, v, row_bytes, idx, count, d, acc)
        else:
            tile_values(4, 1, p, p_stride, v, row_bytes, idx, count, d, acc)
    elif tile == 1:
        tile_values(1, 0, p, p_stride, v, row_bytes, idx, count, d, acc)
    elif tile == 2:
        tile_values(2, 0, p, p_stride, v, row_bytes, idx, count, d, acc)
    elif tile == 3:
        tile_values(3, 0, p, p_stride, v, row_bytes, idx, count, d, acc)
    else:
        tile_values(4, 0, p, p_stride, v, row_bytes, idx, count, d, acc)
