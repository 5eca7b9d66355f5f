"""Attention on a tile of query heads, in vector IR: scores, exponentials and weighted values.

K and V rows are f16 or q8_0 (rows.py), padded to a multiple of 16 elements. A row is loaded and
widened once for a tile of up to four query heads of its GQA group, and the dot products of a tile
are summed across lanes together (emit.sum_many). Rows are consecutive, or listed by int32 numbers.
A ``mode`` says both: the kind of the rows, + GATHER for listed ones; so 0 and 1 are modes of f16.
"""

from __future__ import annotations

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from sparsekv_cli.cpu import emit
from sparsekv_cli.cpu.emit import F16, F32, I8, I32, I64, LANES, VF, VI, const, load, splat, vec
from sparsekv_cli.cpu.rows import GATHER, Q8_0, QUANT_BLOCK

PAD = 32  # floats that a score buffer needs behind its last score
AHEAD_SCAN, AHEAD_GATHER = 96, 40  # rows between a load and its prefetch
NEGATIVE_INFINITY = np.float32(-np.inf)


def _row_address(b, base, row_bytes, idx, j, mode):
    """Address of row j (of row idx[j] when gathering; idx is the address of int32)."""
    if mode & GATHER:
        j = b.sext(load(b, I32, b.add(idx, b.mul(j, I64(4)))), I64)
    return b.add(base, b.mul(j, row_bytes))


def _row_lanes(b, mode, row, d, c, n_vectors):
    """Elements c .. c + 16 n_vectors of the row at an address, as <16 x float> each.

    c is a multiple of 16; of 32 where several vectors of a q8_0 row are taken. d: of the row.
    """
    if not mode & Q8_0:
        return [
            emit.load_half_lanes(b, b.add(row, b.mul(b.add(c, I64(LANES * i)), I64(2))))
            for i in range(n_vectors)
        ]
    scales = b.add(b.add(row, d), b.mul(b.udiv(c, I64(QUANT_BLOCK)), I64(2)))
    lanes, a_block = [], QUANT_BLOCK // LANES
    for i in range(n_vectors):
        if i % a_block == 0:
            scale = splat(b, b.fpext(load(b, F16, scales, 2 * (i // a_block)), F32))
        quants = load(b, vec(I8), b.add(row, c), LANES * i)
        lanes.append(b.fmul(b.sitofp(b.sext(quants, VI), VF), scale))
    return lanes


def _element_bytes(mode):
    """Bytes between the elements of a row."""
    return 1 if mode & Q8_0 else 2


@intrinsic
def tile_scores(typingctx, tile, mode, q, k, row_bytes, idx, count, d, out, out_stride):
    """out[t, j] = q[t] . k[row j], t < tile, j < count; q f32 (tile, d), k rows, out f32.

    Addresses are i64; ``out_stride`` in floats. ``mode``: see above; with GATHER, row j is idx[j]
    (int32). Writes up to 15 floats behind out[t, count). d is a multiple of 16.
    """
    if not isinstance(tile, types.IntegerLiteral) or not isinstance(mode, types.IntegerLiteral):
        return None

    def codegen(context, b, signature, args):
        tile_, mode_ = (signature.args[i].literal_value for i in (0, 1))
        _, _, q, k, row_bytes, idx, count, d, out, out_stride = args
        n_keys = LANES // tile_
        last = b.sub(count, I64(1))

        def group(j, carried):
            rows = []
            for i in range(n_keys):
                at = b.add(j, I64(i))
                at = b.select(b.icmp_signed("<", at, last), at, last)
                rows.append(_row_address(b, k, row_bytes, idx, at, mode_))

            ahead = _rows_ahead(b, k, row_bytes, idx, j, n_keys, last, mode_)

            if mode_ & Q8_0:
                for row in ahead:
                    emit.prefetch(b, b.add(row, d))  # the scales

            def dims(n_vectors):
                """Adds the products of 16 n_vectors dims from c on."""

                def body(c, sums):
                    for row in ahead:
                        emit.prefetch(b, b.add(row, b.mul(c, I64(_element_bytes(mode_)))))
                    keys = [_row_lanes(b, mode_, row, d, c, n_vectors) for row in rows]
                    for vector in range(n_vectors):
                        new = []
                        for t in range(tile_):
                            at = b.add(b.add(b.mul(I64(t), d), c), I64(LANES * vector))
                            query = load(b, VF, b.add(q, b.mul(at, I64(4))))
                            for i in range(n_keys):
                                dot = sums[t * n_keys + i]
                                new.append(emit.fma(b, keys[i][vector], query, dot))
                        sums = new
                    return sums

                return body

            zero = const(F32, 0.0)
            sums = [zero] * (tile_ * n_keys)
            if mode_ & Q8_0:
                whole = b.sub(d, b.urem(d, I64(QUANT_BLOCK)))
                sums = emit.loop(b, I64(0), whole, QUANT_BLOCK, sums, dims(QUANT_BLOCK // LANES))
                sums = emit.loop(b, whole, d, LANES, sums, dims(1))
            else:
                sums = emit.loop(b, I64(0), d, LANES, sums, dims(1))
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
    return types.void(tile, mode, i64, i64, i64, i64, i64, i64, i64, i64), codegen


@intrinsic
def tile_values(typingctx, tile, mode, p, p_stride, v, row_bytes, idx, count, d, acc):
    """acc[t] += sum over j < count of p[t, j] v[row j]; acc f32 (tile, d), addresses as i64."""
    if not isinstance(tile, types.IntegerLiteral) or not isinstance(mode, types.IntegerLiteral):
        return None

    def codegen(context, b, signature, args):
        tile_, mode_ = (signature.args[i].literal_value for i in (0, 1))
        _, _, p, p_stride, v, row_bytes, idx, count, d, acc = args
        size = _element_bytes(mode_)

        def chunk(c, n_vectors):
            """Accumulates dims c .. c + 16 n_vectors."""
            unroll = max(1, 8 // (tile_ * n_vectors))
            acc_at = [
                b.add(acc, b.mul(b.add(b.add(b.mul(I64(t), d), c), I64(LANES * i)), I64(4)))
                for t in range(tile_)
                for i in range(n_vectors)
            ]

            def key(j, sums):
                row = _row_address(b, v, row_bytes, idx, j, mode_)
                values = _row_lanes(b, mode_, row, d, c, n_vectors)
                new = []
                for t in range(tile_):
                    weight_at = b.add(p, b.mul(b.add(b.mul(I64(t), p_stride), j), I64(4)))
                    weight = splat(b, load(b, F32, weight_at))
                    for i in range(n_vectors):
                        new.append(emit.fma(b, values[i], weight, sums[t * n_vectors + i]))
                return new

            n_sums = len(acc_at)
            last = b.sub(count, I64(1))

            def keys(j, sums):
                for row in _rows_ahead(b, v, row_bytes, idx, j, unroll, last, mode_):
                    first = b.add(row, b.mul(c, I64(size)))
                    for line in range(0, size * LANES * n_vectors, 64):
                        emit.prefetch(b, b.add(first, I64(line)))
                    if mode_ & Q8_0:
                        emit.prefetch(b, b.add(row, d))  # the scales
                new = []
                for u in range(unroll):
                    new += key(b.add(j, I64(u)), sums[u * n_sums : (u + 1) * n_sums])
                return new

            zero = const(F32, 0.0)
            whole = b.sub(count, b.srem(count, I64(unroll)))
            start = [load(b, VF, at) for at in acc_at] + [zero] * (n_sums * (unroll - 1))
            sums = emit.loop(b, I64(0), whole, unroll, start, keys)
            for u in range(1, unroll):
                sums[:n_sums] = [b.fadd(sums[i], sums[u * n_sums + i]) for i in range(n_sums)]
            sums = emit.loop(b, whole, count, 1, sums[:n_sums], key)
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
    return types.void(tile, mode, i64, i64, i64, i64, i64, i64, i64, i64), codegen


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


@intrinsic
def store_quantized(typingctx, source, target, count):
    """target = q8_0 of f32 source, count elements (a multiple of 16); see quantize_rows_ref."""

    def codegen(context, b, signature, args):
        source, target, count = args

        def block(n_vectors):
            """Quantises 16 n_vectors elements from c on, which share a scale."""

            def body(c, carried):
                at = b.add(source, b.mul(c, I64(4)))
                x = [load(b, VF, at, 4 * LANES * i) for i in range(n_vectors)]
                peak = const(F32, 0.0)
                for each in x:
                    size = emit.call_named(b, "llvm.fabs.v16f32", VF, each)
                    peak = emit.call_named(b, "llvm.maxnum.v16f32", VF, peak, size)
                scale = b.fdiv(emit.max_lanes(b, peak), F32(127.0))
                for each in x:  # maxnum drops what is no number; a sum keeps it
                    zeros = b.fmul(each, const(F32, 0.0))
                    scale = b.fadd(scale, emit.sum_lanes(b, zeros))
                half = b.fptrunc(scale, F16)
                empty = b.fcmp_ordered("==", half, F16(0.0))
                inverse = b.select(empty, F32(0.0), b.fdiv(F32(1.0), scale))
                for i, each in enumerate(x):
                    nearest = b.fmul(each, splat(b, inverse))
                    nearest = emit.call_named(b, "llvm.rint.v16f32", VF, nearest)
                    quants = b.trunc(b.fptosi(nearest, VI), vec(I8))
                    emit.store(b, quants, b.add(target, c), LANES * i)
                scales = b.add(b.add(target, count), b.mul(b.udiv(c, I64(QUANT_BLOCK)), I64(2)))
                emit.store(b, half, scales)
                return []

            return body

        whole = b.sub(count, b.urem(count, I64(QUANT_BLOCK)))
        emit.loop(b, I64(0), whole, QUANT_BLOCK, [], block(QUANT_BLOCK // LANES))
        emit.loop(b, whole, count, LANES, [], block(1))
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), codegen


@njit(cache=True, nogil=True)
def store_row(kind, source, target, count):
    """Stores f32 at an address as a row of ``kind``; count elements, a multiple of 16."""
    if kind == Q8_0:
        store_quantized(source, target, count)
    else:
        store_halves(source, target, count)


def _rows_ahead(b, base, row_bytes, idx, j, n_rows, last, mode):
    """Addresses of n_rows rows from j + AHEAD on; in a list, of its row ``last`` at most."""
    rows = []
    for i in range(n_rows):
        at = b.add(j, I64((AHEAD_GATHER if mode & GATHER else AHEAD_SCAN) + i))
        if mode & GATHER:
            at = b.select(b.icmp_signed("<", at, last), at, last)
        rows.append(_row_address(b, base, row_bytes, idx, at, mode))
    return rows


@njit(cache=True, nogil=True)
def scores_any(tile, gather, q, k, row_bytes, idx, count, d, out, out_stride):
    """``tile_scores`` of f16 rows for a tile of 1 to 4 heads that is known at run time only."""
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
    """``tile_values`` of f16 rows for a tile of 1 to 4 heads that is known at run time only."""
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


@njit(cache=True, nogil=True)
def scores_quantized(tile, gather, q, k, row_bytes, idx, count, d, out, out_stride):
    """``tile_scores`` of q8_0 rows for a tile of 1 to 4 heads that is known at run time only."""
    if gather:
        if tile == 1:
            tile_scores(1, 3, q, k, row_bytes, idx, count, d, out, out_stride)
        elif tile == 2:
            tile_scores(2, 3, q, k, row_bytes, idx, count, d, out, out_stride)
        elif tile == 3:
            tile_scores(3, 3, q, k, row_bytes, idx, count, d, out, out_stride)
        else:
            tile_scores(4, 3, q, k, row_bytes, idx, count, d, out, out_stride)
    elif tile == 1:
        tile_scores(1, 2, q, k, row_bytes, idx, count, d, out, out_stride)
    elif tile == 2:
        tile_scores(2, 2, q, k, row_bytes, idx, count, d, out, out_stride)
    elif tile == 3:
        tile_scores(3, 2, q, k, row_bytes, idx, count, d, out, out_stride)
    else:
        tile_scores(4, 2, q, k, row_bytes, idx, count, d, out, out_stride)


@njit(cache=True, nogil=True)
def values_quantized(tile, gather, p, p_stride, v, row_bytes, idx, count, d, acc):
    """``tile_values`` of q8_0 rows for a tile of 1 to 4 heads that is known at run time only."""
    if gather:
        if tile == 1:
            tile_values(1, 3, p, p_stride, v, row_bytes, idx, count, d, acc)
        elif tile == 2:
            tile_values(2, 3, p, p_stride, v, row_bytes, idx, count, d, acc)
        elif tile == 3:
            tile_values(3, 3, p, p_stride, v, row_bytes, idx, count, d, acc)
        else:
            tile_values(4, 3, p, p_stride, v, row_bytes, idx, count, d, acc)
    elif tile == 1:
        tile_values(1, 2, p, p_stride, v, row_bytes, idx, count, d, acc)
    elif tile == 2:
        tile_values(2, 2, p, p_stride, v, row_bytes, idx, count, d, acc)
    elif tile == 3:
        tile_values(3, 2, p, p_stride, v, row_bytes, idx, count, d, acc)
    else:
        tile_values(4, 2, p, p_stride, v, row_bytes, idx, count, d, acc)


@njit(cache=True, nogil=True)
def scores_of(tile, mode, q, k, row_bytes, idx, count, d, out, out_stride):
    """``tile_scores`` for a tile and a mode that are known at run time only.

    Kernels that read f16 alone call ``scores_any``, so as not to be compiled for other rows too.
    """
    if mode & Q8_0:
        scores_quantized(tile, mode & GATHER, q, k, row_bytes, idx, count, d, out, out_stride)
    else:
        scores_any(tile, mode & GATHER, q, k, row_bytes, idx, count, d, out, out_stride)


@njit(cache=True, nogil=True)
def values_of(tile, mode, p, p_stride, v, row_bytes, idx, count, d, acc):
    """``tile_values`` for a tile and a mode that are known at run time only."""
    if mode & Q8_0:
        values_quantized(tile, mode & GATHER, p, p_stride, v, row_bytes, idx, count, d, acc)
    else:
        values_any(tile, mode & GATHER, p, p_stride, v, row_bytes, idx, count, d, acc)


@njit(cache=True, nogil=True)
def scores_of_head(mode, q, k, row_bytes, idx, count, d, out):
    """``scores_of`` for a tile of one head, in a quarter of the code: q f32 (d,), out f32."""
    if mode == GATHER:
        tile_scores(1, 1, q, k, row_bytes, idx, count, d, out, 0)
    elif mode == Q8_0:
        tile_scores(1, 2, q, k, row_bytes, idx, count, d, out, 0)
    elif mode == Q8_0 | GATHER:
        tile_scores(1, 3, q, k, row_bytes, idx, count, d, out, 0)
    else:
        tile_scores(1, 0, q, k, row_bytes, idx, count, d, out, 0)


@njit(cache=True, nogil=True)
def values_of_head(mode, p, v, row_bytes, idx, count, d, acc):
    """``values_of`` for a tile of one head: p f32 (count,), acc f32 (d,)."""
    if mode == GATHER:
        tile_values(1, 1, p, 0, v, row_bytes, idx, count, d, acc)
    elif mode == Q8_0:
        tile_values(1, 2, p, 0, v, row_bytes, idx, count, d, acc)
    elif mode == Q8_0 | GATHER:
        tile_values(1, 3, p, 0, v, row_bytes, idx, count, d, acc)
    else:
        tile_values(1, 0, p, 0, v, row_bytes, idx, count, d, acc)
