"""Operations in vector IR on matrices with 16 or 32 columns, one column a lane.

The columns are tokens, blocks of tokens or dims of a head. No sum runs across lanes, so nothing is
shuffled. Any number of rows is allowed. All strides are in bytes, addresses are i64.
"""

import math
from itertools import product

import numpy as np
from llvmlite import ir
from numba import types

from sparsekv_cli.cpu.jit import llvm
from sparsekv_cli.cpu.jit.emitter import LITERAL, emitter
from sparsekv_cli.cpu.jit.kernel import njit
from sparsekv_cli.cpu.jit.llvm import F16, F32, I32, I64, LANES, VF, VI, const, load, splat

VD = ir.VectorType(ir.DoubleType(), LANES)
# sin x and cos x for |x| <= pi/4 as polynomials in x^2 (Cephes' sinf, cosf).
SIN_TERMS = (-1.9515295891e-4, 8.3321608736e-3, -1.6666654611e-1)
COS_TERMS = (2.443315711809948e-5, -1.388731625493765e-3, 4.166664568298827e-2)
# Rows of a tile. Two vectors of sums a row fill the registers of AVX-512. One vector a row fills
# those of AVX2 and NEON. BLIS uses 12 x 32 and 6 x 16, too.
IS_WIDE = llvm.has_feature("avx512f")
MAX_ROWS = 12 if IS_WIDE else 6


@emitter(n_vectors=LITERAL, tile=range(1, MAX_ROWS + 1))
def _multiply_tile(b, n_vectors, tile, a, a_row, a_column, x, x_row, count, out, out_row):
    """``multiply``, or with n_vectors = 2 ``multiply_pair``, of ``tile`` rows."""
    at_once = n_vectors if IS_WIDE else 1
    rows = [b.add(a, b.mul(I64(m), a_row)) for m in range(tile)]
    for first in range(0, n_vectors, at_once):
        places = [4 * LANES * v for v in range(first, first + at_once)]

        def column(c, sums, places=places):
            lanes = [load(b, VF, b.add(x, b.mul(c, x_row)), place) for place in places]
            step = b.mul(c, a_column)
            factors = [splat(b, load(b, F32, b.add(row, step))) for row in rows]
            pairs = product(factors, lanes)
            return [llvm.fma(b, f, x, s) for (f, x), s in zip(pairs, sums, strict=True)]

        zeros = [const(F32, 0.0)] * (tile * at_once)
        sums = llvm.loop(b, I64(0), count, 1, zeros, column)
        for value, (m, place) in zip(sums, product(range(tile), places), strict=True):
            llvm.store(b, value, b.add(out, b.mul(I64(m), out_row)), place)


@njit(cache=True, nogil=True)
def _tile_of(n_rows):
    """Returns the rows of the next tile, if as few tiles as possible share ``n_rows`` evenly."""
    n_tile = (n_rows - 1) // MAX_ROWS + 1
    return (n_rows + n_tile - 1) // n_tile


@njit(cache=True, nogil=True)
def multiply(n_rows, a, a_row, a_column, x, x_row, count, out, out_row):
    """out[m, :16] = sum over c < count of a[m, c] x[c, :16] for m < n_rows; f32, addresses."""
    while n_rows > 0:
        tile = _tile_of(n_rows)
        _multiply_tile(1, tile, a, a_row, a_column, x, x_row, count, out, out_row)
        n_rows -= tile
        a += tile * a_row
        out += tile * out_row


@njit(cache=True, nogil=True)
def multiply_pair(n_rows, a, a_row, a_column, x, x_row, count, out, out_row):
    """``multiply`` for 32 columns: out[m, :32] from x[c, :32]."""
    while n_rows > 0:
        tile = _tile_of(n_rows)
        _multiply_tile(2, tile, a, a_row, a_column, x, x_row, count, out, out_row)
        n_rows -= tile
        a += tile * a_row
        out += tile * out_row


def multiply_ref(a, x):
    """numpy reference: a (M, C), x (C, 16) -> (M, 16) in f64."""
    return a.astype(np.float64) @ x.astype(np.float64)


@emitter(factor=types.float64)
def cos_sin(b, turns, factor, count, cosines, sines):
    """Writes cos, sin of 2 pi turns[i] factor, i < count rounded up to 16; turns f64, results f32.

    Whole circles are removed from turns[i] factor in f64, so large positions lose no precision.
    """
    factors = splat(b, factor)
    full_turn, one = const(F32, 2 * math.pi), const(I32, 1)

    @llvm.every(b, count, LANES)
    def body(j):
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


@emitter(a=types.float32, b=types.float32)
def rotate_pair(builder, a, b, cosines, sines, out_a, out_b):
    """out_a = a cos + b sin, out_b = b cos - a sin in 16 lanes: the pair (a, b) rotated back.

    a, b f32 scalars; the rest are addresses of sixteen f32.
    """
    first, second = splat(builder, a), splat(builder, b)
    cosines, sines = load(builder, VF, cosines), load(builder, VF, sines)
    products = builder.fmul(first, cosines), builder.fmul(second, cosines)
    turned = llvm.fma(builder, second, sines, products[0])
    llvm.store(builder, turned, out_a)
    turned = llvm.fma(builder, builder.fneg(first), sines, products[1])
    llvm.store(builder, turned, out_b)


@emitter(scale=types.float32)
def rotate_row(b, x, n_pairs, cosines, sines, scale):
    """Rotates pairs (x[i], x[i + n_pairs]) by the angles of ``cosines`` and ``sines``, in place.

    The result is multiplied by ``scale``. All are f32; x, cosines and sines are addresses.
    """
    other = b.add(x, b.mul(n_pairs, I64(4)))

    def turn(i, type_, factor):
        at = b.mul(i, I64(4))
        first, second = (load(b, type_, b.add(part, at)) for part in (x, other))
        cosine, sine = (
            b.fmul(load(b, type_, b.add(table, at)), factor) for table in (cosines, sines)
        )
        left = llvm.fma(b, b.fneg(second), sine, b.fmul(first, cosine))
        right = llvm.fma(b, second, cosine, b.fmul(first, sine))
        llvm.store(b, left, b.add(x, at))
        llvm.store(b, right, b.add(other, at))

    whole = b.sub(n_pairs, b.srem(n_pairs, I64(LANES)))
    factors = splat(b, scale)
    llvm.loop(b, I64(0), whole, LANES, [], lambda i, _: turn(i, VF, factors))
    llvm.loop(b, whole, n_pairs, 1, [], lambda i, _: turn(i, F32, scale))


@emitter
def scale_lanes(b, x, n_rows, factors):
    """x[i, :16] *= factors[:16] for i < n_rows; f32, addresses."""
    lanes = load(b, VF, factors)

    @llvm.every(b, n_rows)
    def body(i):
        at = b.add(x, b.mul(i, I64(4 * LANES)))
        llvm.store(b, b.fmul(load(b, VF, at), lanes), at)


@emitter
def gather_words(b, source, step, count, target):
    """target[i] = the int32 at source + i step, i < count; addresses."""

    @llvm.every(b, count)
    def body(i):
        value = load(b, I32, b.add(source, b.mul(i, step)))
        llvm.store(b, value, b.add(target, b.mul(i, I64(4))))


@emitter(scale=types.float32)
def join_bytes(b, high, low, scale, count, target):
    """target[i] = scale (high[i] - 128 + low[i] / 256), i < count rounded up to 16.

    high: unsigned bytes, low: signed ones, target f32; addresses.
    """
    lanes, scale = llvm.vec(llvm.I8), b.fdiv(scale, F32(256.0))

    @llvm.every(b, count, LANES)
    def body(i):
        x = b.shl(b.zext(load(b, lanes, b.add(high, i)), VI), const(I32, 8))
        x = b.add(x, b.sext(load(b, lanes, b.add(low, i)), VI))
        x = b.sub(x, const(I32, 128 << 8))
        x = b.fmul(b.sitofp(x, VF), splat(b, scale))
        llvm.store(b, x, b.add(target, b.mul(i, I64(4))))


@emitter
def scatter_words(b, source, count, target, step):
    """The int32 at target + i step = source[i], i < count; addresses."""

    @llvm.every(b, count)
    def body(i):
        value = load(b, I32, b.add(source, b.mul(i, I64(4))))
        llvm.store(b, value, b.add(target, b.mul(i, step)))


@emitter
def scatter_halves(b, source, count, target, step):
    """The f16 at target + i step = f32 source[i] cut to +-65504, i < count; addresses."""

    @llvm.every(b, count)
    def body(j):
        value = load(b, F32, b.add(source, b.mul(j, I64(4))))
        value = llvm.call_named(b, "llvm.maxnum.f32", F32, value, F32(-65504.0))
        value = llvm.call_named(b, "llvm.minnum.f32", F32, value, F32(65504.0))
        llvm.store(b, b.fptrunc(value, F16), b.add(target, b.mul(j, step)))


@emitter(returns=types.float32, value=types.float32)
def rounded_to_half(b, value):
    """Rounds an f32 to the nearest value of f16."""
    return b.fpext(b.fptrunc(value, F16), F32)
