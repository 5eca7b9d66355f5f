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
from sparsekv_cli.cpu.jit.emitter import emitter
from sparsekv_cli.cpu.jit.kernel import njit
from sparsekv_cli.cpu.jit.value import (
    F16,
    F32,
    I8,
    I32,
    LANES,
    VF,
    VI,
    call_named,
    const,
    load,
    select,
    store,
    vec,
)

VD = ir.VectorType(ir.DoubleType(), LANES)
# sin x and cos x for |x| <= pi/4 as polynomials in x^2 (Cephes' sinf, cosf).
SIN_TERMS = (-1.9515295891e-4, 8.3321608736e-3, -1.6666654611e-1)
COS_TERMS = (2.443315711809948e-5, -1.388731625493765e-3, 4.166664568298827e-2)
# Rows of a tile. Two vectors of sums a row fill the registers of AVX-512. One vector a row fills
# those of AVX2 and NEON. BLIS uses 12 x 32 and 6 x 16, too.
IS_WIDE = llvm.has_feature("avx512f")
MAX_ROWS = 12 if IS_WIDE else 6


@emitter(n_vectors=(1, 2), tile=range(1, MAX_ROWS + 1))
def _multiply_tile(n_vectors, tile, a, a_row, a_column, x, x_row, count, out, out_row):
    """``multiply`` of ``tile`` rows."""
    at_once = n_vectors if IS_WIDE else 1
    rows = [a + m * a_row for m in range(tile)]
    for first in range(0, n_vectors, at_once):
        places = [4 * LANES * v for v in range(first, first + at_once)]

        def column(c, sums, places=places):
            lanes = [load(VF, x + c * x_row, place) for place in places]
            step = c * a_column
            factors = [load(F32, row + step).splat() for row in rows]
            pairs = product(factors, lanes)
            return [f.fma(x, s) for (f, x), s in zip(pairs, sums, strict=True)]

        zeros = [const(F32, 0.0)] * (tile * at_once)
        sums = llvm.loop(0, count, 1, zeros, column)
        for value, (m, place) in zip(sums, product(range(tile), places), strict=True):
            store(value, out + m * out_row, place)


@njit(cache=True, nogil=True)
def multiply(n_vectors, n_rows, a, a_row, a_column, x, x_row, count, out, out_row):
    """out[m] = sum over c < count of a[m, c] x[c] for m < n_rows; f32, addresses.

    n_vectors: 1 for 16 columns of x and out, 2 for 32. The rows are in as few tiles as possible.
    """
    while n_rows > 0:
        n_tile = (n_rows - 1) // MAX_ROWS + 1
        tile = (n_rows + n_tile - 1) // n_tile
        _multiply_tile(n_vectors, tile, a, a_row, a_column, x, x_row, count, out, out_row)
        n_rows -= tile
        a += tile * a_row
        out += tile * out_row


def multiply_ref(a, x):
    """numpy reference: a (M, C), x (C, 16) -> (M, 16) in f64."""
    return a.astype(np.float64) @ x.astype(np.float64)


@emitter(factor=types.float64)
def cos_sin(turns, factor, count, cosines, sines):
    """Writes cos, sin of 2 pi turns[i] factor, i < count rounded up to 16; turns f64, results f32.

    Whole circles are removed from turns[i] factor in f64, so large positions lose no precision.
    """
    factors = factor.splat()
    full_turn, one = const(F32, 2 * math.pi), const(I32, 1)

    @llvm.every(count, LANES)
    def body(j):
        t = load(VD, turns + j * 8) * factors
        t = t - call_named("llvm.rint.v16f64", VD, t)
        t = t.to(VF)  # turns, -0.5 to 0.5
        quarter = (t * 4.0).call("rint")
        x = quarter.fma(-0.25, t) * full_turn
        square = x * x
        sine = const(F32, SIN_TERMS[0])
        for term in SIN_TERMS[1:]:
            sine = sine.fma(square, term)
        sine = (sine * square).fma(x, x)
        cosine = const(F32, COS_TERMS[0])
        for term in COS_TERMS[1:]:
            cosine = cosine.fma(square, term)
        cosine = (cosine * square).fma(square, 1.0)
        cosine = square.fma(-0.5, cosine)
        number = quarter.to(VI)
        swapped = number & one == one
        sign = (number & 2) << 30
        other = (number + one & 2) << 30
        for target, plain, swap, flip in (
            (sines, sine, cosine, sign),
            (cosines, cosine, sine, other),
        ):
            value = select(swapped, swap, plain).bitcast(VI)
            store((value ^ flip).bitcast(VF), target + j * 4)


@emitter(a=types.float32, b=types.float32)
def rotate_pair(a, b, cosines, sines, out_a, out_b):
    """out_a = a cos + b sin, out_b = b cos - a sin in 16 lanes: the pair (a, b) rotated back.

    a, b f32 scalars; the rest are addresses of sixteen f32.
    """
    first, second = a.splat(), b.splat()
    cosines, sines = load(VF, cosines), load(VF, sines)
    products = first * cosines, second * cosines
    turned = second.fma(sines, products[0])
    store(turned, out_a)
    turned = (-first).fma(sines, products[1])
    store(turned, out_b)


@emitter(scale=types.float32)
def rotate_row(x, n_pairs, cosines, sines, scale):
    """Rotates pairs (x[i], x[i + n_pairs]) by the angles of ``cosines`` and ``sines``, in place.

    The result is multiplied by ``scale``. All are f32; x, cosines and sines are addresses.
    """
    other = x + n_pairs * 4

    def turn(i, type_, factor):
        at = i * 4
        first, second = (load(type_, part + at) for part in (x, other))
        cosine, sine = (load(type_, table + at) * factor for table in (cosines, sines))
        left = (-second).fma(sine, first * cosine)
        right = second.fma(cosine, first * sine)
        store(left, x + at)
        store(right, other + at)

    whole = n_pairs - n_pairs % LANES
    factors = scale.splat()
    llvm.loop(0, whole, LANES, [], lambda i, _: turn(i, VF, factors))
    llvm.loop(whole, n_pairs, 1, [], lambda i, _: turn(i, F32, scale))


@emitter
def scale_lanes(x, n_rows, factors):
    """x[i, :16] *= factors[:16] for i < n_rows; f32, addresses."""
    lanes = load(VF, factors)

    @llvm.every(n_rows)
    def body(i):
        at = x + i * (4 * LANES)
        store(load(VF, at) * lanes, at)


@emitter
def copy_words(source, source_step, count, target, target_step):
    """Copies the int32 at source + i source_step to target + i target_step, i < count."""

    @llvm.every(count)
    def body(i):
        store(load(I32, source + i * source_step), target + i * target_step)


@emitter(scale=types.float32)
def join_bytes(high, low, scale, count, target):
    """target[i] = scale (high[i] - 128 + low[i] / 256), i < count rounded up to 16.

    high: unsigned bytes, low: signed ones, target f32; addresses.
    """
    lanes, scale = vec(I8), scale / 256.0

    @llvm.every(count, LANES)
    def body(i):
        x = load(lanes, high + i).unsigned_to(VI) << 8
        x = x + load(lanes, low + i).to(VI)
        x = x - (128 << 8)
        x = x.to(VF) * scale.splat()
        store(x, target + i * 4)


@emitter
def scatter_halves(source, count, target, step):
    """The f16 at target + i step = f32 source[i] cut to +-65504, i < count; addresses."""

    @llvm.every(count)
    def body(j):
        value = load(F32, source + j * 4)
        value = value.maxnum(-65504.0)
        value = value.minnum(65504.0)
        store(value.to(F16), target + j * step)


@emitter(returns=types.float32, value=types.float32)
def rounded_to_half(value):
    """Rounds an f32 to the nearest value of f16."""
    return value.to(F16).to(F32)
