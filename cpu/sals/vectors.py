"""Matrices with sixteen columns, in vector IR: one column a lane.

The caller decides what the columns are: sixteen tokens, sixteen blocks of tokens or sixteen dims of
a head. No sum runs across lanes, so nothing is shuffled, and any number of rows is fine. All
strides are in bytes, addresses are i64.
"""

from __future__ import annotations

import math

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from sparsekv_cli.cpu.jit import llvm
from sparsekv_cli.cpu.jit.llvm import F16, F32, I32, I64, LANES, VF, VI, const, load, splat

VD = ir.VectorType(ir.DoubleType(), LANES)
# sin x and cos x for |x| <= pi/4 as polynomials in x^2 (Cephes' sinf, cosf).
SIN_TERMS = (-1.9515295891e-4, 8.3321608736e-3, -1.6666654611e-1)
COS_TERMS = (2.443315711809948e-5, -1.388731625493765e-3, 4.166664568298827e-2)
MAX_ROWS = 6  # of a tile: their sums fill the registers of AVX2 and NEON (BLIS takes 6 x 16 too)


@intrinsic
def _multiply_tile(typingctx, tile, a, a_row, a_column, x, x_row, count, out, out_row):
    """``multiply`` of ``tile`` rows, whose sums stay in registers."""
    if not isinstance(tile, types.IntegerLiteral):
        return None

    def codegen(context, b, signature, args):
        tile_ = signature.args[0].literal_value
        _, a, a_row, a_column, x, x_row, count, out, out_row = args
        rows = [b.add(a, b.mul(I64(m), a_row)) for m in range(tile_)]

        def column(c, sums):
            lanes = load(b, VF, b.add(x, b.mul(c, x_row)))
            step = b.mul(c, a_column)
            factors = [splat(b, load(b, F32, b.add(row, step))) for row in rows]
            return [llvm.fma(b, f, lanes, s) for f, s in zip(factors, sums, strict=True)]

        sums = llvm.loop(b, I64(0), count, 1, [const(F32, 0.0)] * tile_, column)
        for m, value in enumerate(sums):
            llvm.store(b, value, b.add(out, b.mul(I64(m), out_row)))
        return context.get_dummy_value()

    i64 = types.int64
    return types.void(tile, i64, i64, i64, i64, i64, i64, i64, i64), codegen


@njit(cache=True, nogil=True)
def multiply(n_rows, a, a_row, a_column, x, x_row, count, out, out_row):
    """out[m, :16] = sum over c < count of a[m, c] x[c, :16] for m < n_rows; f32, addresses."""
    while n_rows > 0:
        n_tile = (n_rows - 1) // MAX_ROWS + 1
        tile = (n_rows + n_tile - 1) // n_tile
        if tile == 6:
            _multiply_tile(6, a, a_row, a_column, x, x_row, count, out, out_row)
        elif tile == 5:
            _multiply_tile(5, a, a_row, a_column, x, x_row, count, out, out_row)
        elif tile == 4:
            _multiply_tile(4, a, a_row, a_column, x, x_row, count, out, out_row)
        elif tile == 3:
            _multiply_tile(3, a, a_row, a_column, x, x_row, count, out, out_row)
        elif tile == 2:
            _multiply_tile(2, a, a_row, a_column, x, x_row, count, out, out_row)
        else:
            _multiply_tile(1, a, a_row, a_column, x, x_row, count, out, out_row)
        n_rows -= tile
        a += tile * a_row
        out += tile * out_row


def multiply_ref(a, x):
    """numpy reference: a (M, C), x (C, 16) -> (M, 16) in f64."""
    return a.astype(np.float64) @ x.astype(np.float64)


@intrinsic
def cos_sin(typingctx, turns, factor, count, cosines, sines):
    """Cosine and sine of 2 pi turns[i] factor, i < count rounded up to 16; turns f64, results f32.

    The product is reduced to a quarter turn in f64, so large positions lose nothing.
    """

    def codegen(context, b, signature, args):
        turns, factor, count, cosines, sines = args
        factors = splat(b, factor)
        full_turn, one = const(F32, 2 * math.pi), const(I32, 1)

        def body(j, carried):
            t = b.fmul(load(b, VD, b.add(turns, b.mul(j, I64(8)))), factors)
            t = b.fsub(t, llvm.call_named(b, "llvm.rint.v16f64", VD, t))
            t = b.fptrunc(t, VF)  # turns, -0.5 to 0.5
            quarter = llvm.call_named(b, "llvm.rint.v16f32", VF, b.fmul(t, const(F32, 4.0)))
            x = b.fmul(llvm.fma(b, quarter, const(F32, -0.25), t), full_turn)
            square = b.fmul(x, x)
            sine = const(F32, SIN_TERMS[0])
            for term in SIN_TERMS[1:]:
                sine = llvm.fma(b, sine, square, const(F32, term))
            sine = llvm.fma(b, b.fmul(sine, square), x, x)
            cosine = const(F32, COS_TERMS[0])
            for term in COS_TERMS[1:]:
                cosine = llvm.fma(b, cosine, square, const(F32, term))
            cosine = llvm.fma(b, b.fmul(cosine, square), square, const(F32, 1.0))
            cosine = llvm.fma(b, square, const(F32, -0.5), cosine)
            number = b.fptosi(quarter, VI)
            swapped = b.icmp_signed("==", b.and_(number, one), one)
            sign = b.shl(b.and_(number, const(I32, 2)), const(I32, 30))
            other = b.shl(b.and_(b.add(number, one), const(I32, 2)), const(I32, 30))
            for target, plain, swap, flip in (
                (sines, sine, cosine, sign),
                (cosines, cosine, sine, other),
            ):
                value = b.bitcast(b.select(swapped, swap, plain), VI)
                llvm.store(b, b.bitcast(b.xor(value, flip), VF), b.add(target, b.mul(j, I64(4))))
            return []

        llvm.loop(b, I64(0), count, LANES, [], body)
        return context.get_dummy_value()

    i64 = types.int64
    return types.void(i64, types.float64, i64, i64, i64), codegen


@intrinsic
def rotate_pair(typingctx, a, b, cosines, sines, out_a, out_b):
    """out_a = a cos + b sin, out_b = b cos - a sin in 16 lanes: the pair (a, b) turned back.

    a, b f32 scalars; the rest are addresses of sixteen f32.
    """

    def codegen(context, builder, signature, args):
        first, second = (splat(builder, value) for value in args[:2])
        cosines, sines = (load(builder, VF, at) for at in args[2:4])
        products = builder.fmul(first, cosines), builder.fmul(second, cosines)
        turned = llvm.fma(builder, second, sines, products[0])
        llvm.store(builder, turned, args[4])
        turned = llvm.fma(builder, builder.fneg(first), sines, products[1])
        llvm.store(builder, turned, args[5])
        return context.get_dummy_value()

    f32, i64 = types.float32, types.int64
    return types.void(f32, f32, i64, i64, i64, i64), codegen


@intrinsic
def rotate_row(typingctx, x, n_pairs, cosines, sines, scale):
    """Pairs (x[i], x[i + n_pairs]) turned by angles of these cosines and sines, times ``scale``.

    In place; f32, addresses.
    """

    def codegen(context, b, signature, args):
        x, n_pairs, cosines, sines, scale = args
        other = b.add(x, b.mul(n_pairs, I64(4)))

        def turn(type_, factor):
            def body(i, carried):
                at = b.mul(i, I64(4))
                first, second = (load(b, type_, b.add(part, at)) for part in (x, other))
                cosine, sine = (
                    b.fmul(load(b, type_, b.add(table, at)), factor) for table in (cosines, sines)
                )
                left = llvm.fma(b, b.fneg(second), sine, b.fmul(first, cosine))
                right = llvm.fma(b, second, cosine, b.fmul(first, sine))
                llvm.store(b, left, b.add(x, at))
                llvm.store(b, right, b.add(other, at))
                return []

            return body

        whole = b.sub(n_pairs, b.srem(n_pairs, I64(LANES)))
        llvm.loop(b, I64(0), whole, LANES, [], turn(VF, splat(b, scale)))
        llvm.loop(b, whole, n_pairs, 1, [], turn(F32, scale))
        return context.get_dummy_value()

    i64 = types.int64
    return types.void(i64, i64, i64, i64, types.float32), codegen


@intrinsic
def widen(typingctx, source, count, target):
    """target[i] = f32 of the f16 source[i], i < count rounded up to 16; addresses."""

    def codegen(context, b, signature, args):
        source, count, target = args

        def body(j, carried):
            lanes = llvm.load_half_lanes(b, b.add(source, b.mul(j, I64(2))))
            llvm.store(b, lanes, b.add(target, b.mul(j, I64(4))))
            return []

        llvm.loop(b, I64(0), count, LANES, [], body)
        return context.get_dummy_value()

    i64 = types.int64
    return types.void(i64, i64, i64), codegen


@intrinsic
def gather_halves(typingctx, source, step, count, target):
    """target[i] = f32 of the f16 at source + i step, i < count rounded up to 16; addresses."""

    def codegen(context, b, signature, args):
        source, step, count, target = args

        def body(j, carried):
            # Converted together: one by one, each waits for the register of the one before.
            lanes = ir.Constant(llvm.vec(F16), ir.Undefined)
            for i in range(LANES):
                value = load(b, F16, b.add(source, b.mul(b.add(j, I64(i)), step)))
                lanes = b.insert_element(lanes, value, I32(i))
            llvm.store(b, b.fpext(lanes, VF), b.add(target, b.mul(j, I64(4))))
            return []

        llvm.loop(b, I64(0), count, LANES, [], body)
        return context.get_dummy_value()

    i64 = types.int64
    return types.void(i64, i64, i64, i64), codegen


@intrinsic
def scatter_halves(typingctx, source, count, target, step):
    """The f16 at target + i step = f32 source[i] cut to +-65504, i < count; addresses."""

    def codegen(context, b, signature, args):
        source, count, target, step = args

        def body(j, carried):
            value = load(b, F32, b.add(source, b.mul(j, I64(4))))
            value = llvm.call_named(b, "llvm.maxnum.f32", F32, value, F32(-65504.0))
            value = llvm.call_named(b, "llvm.minnum.f32", F32, value, F32(65504.0))
            llvm.store(b, b.fptrunc(value, F16), b.add(target, b.mul(j, step)))
            return []

        llvm.loop(b, I64(0), count, 1, [], body)
        return context.get_dummy_value()

    i64 = types.int64
    return types.void(i64, i64, i64, i64), codegen


@intrinsic
def rounded_to_half(typingctx, value):
    """An f32 as f16 can hold it."""

    def codegen(context, b, signature, args):
        return b.fpext(b.fptrunc(args[0], F16), F32)

    return types.float32(types.float32), codegen
