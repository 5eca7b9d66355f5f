"""FFTs of two real sequences at once, in vector IR, for FAEDKV's scores and weights.

One complex FFT carries two query heads, one as its real and one as its imaginary part. It takes
Bailey's four steps: write the sequence as an n1 x n2 matrix, transform its columns, multiply each
element by a root of unity, transpose, and transform the columns again. A vector holds sixteen
columns, so nothing is summed across lanes; the order is natural on both sides. A column FFT is
Stockham's, with radices 2 to 5, from one buffer into the other.

A vector that would reach beyond the end begins earlier and writes some elements twice, with the
same values. Lengths are therefore products of two factors of 16 or more without a prime above 5.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from sparsekv_cli.cpu.jit import llvm
from sparsekv_cli.cpu.jit.llvm import F32, I64, LANES, VF, const, load, splat

MIN_LENGTH = LANES * LANES
# A plan's int64 numbers: how many they are, the factors, passes of each, where the turns begin
# among the twiddles, then (radix, m, step, twiddles) a pass.
SIZE, N1, N2, PASSES1, PASSES2, TURNS, FIRST_PASS = range(7)
PASS_SIZE = 4
Complex = tuple[ir.Value, ir.Value]


class FFTPlan(NamedTuple):
    """How to transform ``n`` elements; plans are shared, and kernels take the arrays' addresses."""

    n: int
    numbers: np.ndarray  # int64, see above
    twiddles: np.ndarray  # f32


# --- lengths and plans ----------------------------------------------------------------------------


def factors(n: int) -> tuple[int, int] | None:
    """n1 <= n2 near the root of n, both 16 or more and without a prime above 5, if there are."""
    rest = n
    for prime in (2, 3, 5):
        while rest % prime == 0:
            rest //= prime
    if rest > 1:
        return None
    pairs = [(i, n // i) for i in range(LANES, int(n**0.5) + 1) if n % i == 0]
    return pairs[-1] if pairs else None


@lru_cache(maxsize=64)
def length_above(n: int) -> int:
    """The smallest length of an FFT of n or more."""
    n = max(n, MIN_LENGTH)
    while not factors(n):
        n += 1
    return n


@lru_cache(maxsize=16)
def make_plan(n: int) -> FFTPlan:
    """ValueError for a length that has no two such factors."""
    pair = factors(n)
    if pair is None:
        raise ValueError(f"n = {n}: no length of an FFT")
    n1, n2 = pair
    numbers, tables, at = [0, n1, n2, 0, 0, 0], [], 0
    for i, (length, step) in enumerate(((n1, n2), (n2, n1))):
        for radix in radices(length):
            m = length // radix
            numbers += [radix, m, step, at]
            numbers[PASSES1 + i] += 1
            # w^(p j), p < m, 1 <= j < radix, re and im
            angles = -2 * np.pi * np.outer(np.arange(m), np.arange(1, radix)) / length
            tables.append(np.stack([np.cos(angles), np.sin(angles)], -1).ravel())
            at += tables[-1].size
            length, step = m, step * radix
    numbers[TURNS], numbers[SIZE] = at, len(numbers)
    angles = -2 * np.pi * (np.outer(np.arange(n1), np.arange(n2)) % n) / n
    tables += [np.cos(angles).ravel(), np.sin(angles).ravel()]
    return FFTPlan(n, np.array(numbers, np.int64), np.concatenate(tables).astype(np.float32))


def radices(n: int) -> list[int]:
    """Factors 4, then 2, 3, 5, whose product is n."""
    found = []
    for radix in (4, 2, 3, 5):
        while n % radix == 0:
            found.append(radix)
            n //= radix
    return found


# --- vector IR ------------------------------------------------------------------------------------


def _add(b: ir.IRBuilder, x: Complex, y: Complex) -> Complex:
    return b.fadd(x[0], y[0]), b.fadd(x[1], y[1])


def _subtract(b: ir.IRBuilder, x: Complex, y: Complex) -> Complex:
    return b.fsub(x[0], y[0]), b.fsub(x[1], y[1])


def _multiply(b: ir.IRBuilder, x: Complex, w: Complex) -> Complex:
    re = llvm.fma(b, x[0], w[0], b.fneg(b.fmul(x[1], w[1])))
    return re, llvm.fma(b, x[0], w[1], b.fmul(x[1], w[0]))


def _minus_i(b: ir.IRBuilder, x: Complex) -> Complex:
    """-i x"""
    return x[1], b.fneg(x[0])


def _combine(b: ir.IRBuilder, terms: list[tuple[Complex, float]]) -> Complex:
    """The sum of x times a real factor."""
    re, im = terms[0][0]
    if terms[0][1] != 1:
        re, im = (b.fmul(part, const(F32, terms[0][1])) for part in (re, im))
    for x, factor in terms[1:]:
        re = llvm.fma(b, x[0], const(F32, factor), re)
        im = llvm.fma(b, x[1], const(F32, factor), im)
    return re, im


def _small_dft(b: ir.IRBuilder, x: list[Complex]) -> list[Complex]:
    """The DFT (e^-) of 2 to 5 complex vectors, lane by lane."""
    if len(x) == 2:
        return [_add(b, *x), _subtract(b, *x)]
    if len(x) == 4:
        evens, odds = _add(b, x[0], x[2]), _add(b, x[1], x[3])
        even = _subtract(b, x[0], x[2])
        odd = _minus_i(b, _subtract(b, x[1], x[3]))
        return [
            _add(b, evens, odds),
            _add(b, even, odd),
            _subtract(b, evens, odds),
            _subtract(b, even, odd),
        ]
    n = len(x)  # 3 or 5: pairs x[i], x[n - i]
    half = range(1, n // 2 + 1)
    sums = {i: _add(b, x[i], x[n - i]) for i in half}
    differences = {i: _minus_i(b, _subtract(b, x[i], x[n - i])) for i in half}
    out = [_combine(b, [(x[0], 1.0), *((sums[i], 1.0) for i in half)])] * n
    for j in half:
        angles = {i: 2 * np.pi * (i * j % n) / n for i in half}
        even = _combine(b, [(x[0], 1.0), *((sums[i], np.cos(angles[i])) for i in half)])
        odd = _combine(b, [(differences[i], np.sin(angles[i])) for i in half])
        out[j], out[n - j] = _add(b, even, odd), _subtract(b, even, odd)
    return out


def _vector_start(b: ir.IRBuilder, at: ir.Value, count: ir.Value) -> ir.Value:
    """``at``, or earlier where sixteen elements from it on would pass ``count``."""
    last = b.sub(count, I64(LANES))
    return b.select(b.icmp_signed("<", at, last), at, last)


@intrinsic
def _butterflies(typingctx, radix, x_re, x_im, x_step, y_re, y_im, y_step, count, twiddles):
    """y[j][q] = w_j sum over i of x[i][q] e^(-2 pi i j / radix), q < count (16 or more).

    Row i of x lies x_step elements behind row i - 1, so for y. twiddles: w_1, w_2, ... as re, im.
    Arrays are f32, given by address.
    """
    if not isinstance(radix, types.IntegerLiteral):
        return None

    def codegen(context, b, signature, args):
        n = signature.args[0].literal_value
        _, x_re, x_im, x_step, y_re, y_im, y_step, count, twiddles = args
        turns = [
            (splat(b, load(b, F32, twiddles, 8 * j)), splat(b, load(b, F32, twiddles, 8 * j + 4)))
            for j in range(n - 1)
        ]

        def body(q, carried):
            q = _vector_start(b, q, count)

            def address(base, step, row):
                return b.add(base, b.shl(b.add(q, b.mul(step, I64(row))), I64(2)))

            x = [
                (load(b, VF, address(x_re, x_step, i)), load(b, VF, address(x_im, x_step, i)))
                for i in range(n)
            ]
            for j, y in enumerate(_small_dft(b, x)):
                re, im = _multiply(b, y, turns[j - 1]) if j else y
                llvm.store(b, re, address(y_re, y_step, j))
                llvm.store(b, im, address(y_im, y_step, j))
            return []

        llvm.loop(b, I64(0), count, LANES, [], body)
        return context.get_dummy_value()

    i64 = types.int64
    return types.void(radix, i64, i64, i64, i64, i64, i64, i64, i64), codegen


@intrinsic
def _turn_and_transpose(typingctx, n1, n2, x_re, x_im, turns, y_re, y_im):
    """y[j, i] = x[i, j] w[i, j]; x, w (n1, n2) and y (n2, n1) f32 by address; im w behind re w."""

    def codegen(context, b, signature, args):
        n1, n2, x_re, x_im, turns, y_re, y_im = args
        turns_im = b.add(turns, b.shl(b.mul(n1, n2), I64(2)))

        def block_row(i, carried):
            i = _vector_start(b, i, n1)

            def block(j, carried):
                j = _vector_start(b, j, n2)
                rows: list[Complex] = []
                for r in range(LANES):
                    at = b.shl(b.add(b.mul(b.add(i, I64(r)), n2), j), I64(2))
                    x, w = (
                        (load(b, VF, b.add(re, at)), load(b, VF, b.add(im, at)))
                        for re, im in ((x_re, x_im), (turns, turns_im))
                    )
                    rows.append(_multiply(b, x, w))
                for part, y in enumerate((y_re, y_im)):
                    for c, column in enumerate(llvm.transposed(b, [row[part] for row in rows])):
                        at = b.shl(b.add(b.mul(b.add(j, I64(c)), n1), i), I64(2))
                        llvm.store(b, column, b.add(y, at))
                return []

            llvm.loop(b, I64(0), n2, LANES, [], block)
            return []

        llvm.loop(b, I64(0), n1, LANES, [], block_row)
        return context.get_dummy_value()

    i64 = types.int64
    return types.void(i64, i64, i64, i64, i64, i64, i64), codegen


@njit(cache=True, nogil=True)
def _column_pass(radix, m, step, twiddles, x_re, x_im, y_re, y_im):
    """One Stockham pass: (radix, m, step) -> (m, radix, step), all by address."""
    for p in range(m):
        x, y = 4 * step * p, 4 * step * radix * p
        w = twiddles + 8 * (radix - 1) * p
        if radix == 4:
            _butterflies(4, x_re + x, x_im + x, step * m, y_re + y, y_im + y, step, step, w)
        elif radix == 2:
            _butterflies(2, x_re + x, x_im + x, step * m, y_re + y, y_im + y, step, step, w)
        elif radix == 3:
            _butterflies(3, x_re + x, x_im + x, step * m, y_re + y, y_im + y, step, step, w)
        else:
            _butterflies(5, x_re + x, x_im + x, step * m, y_re + y, y_im + y, step, step, w)


@njit(cache=True, nogil=True)
def ends_in_y(numbers):
    """Whether ``fft`` leaves its result in y: its steps, passes and a transposition, are odd."""
    return (numbers[PASSES1] + numbers[PASSES2]) % 2 == 0


@njit(cache=True, nogil=True)
def fft(numbers, twiddles, x_re, x_im, y_re, y_im):
    """The DFT (e^-) of x, which ends in x or in y (``ends_in_y``); both are overwritten.

    numbers: a plan's; twiddles: address of a plan's. x, y: addresses of f32, re and im apart. The
    inverse, times n, comes from exchanging re and im.
    """
    at = FIRST_PASS
    for half in range(2):
        for _ in range(numbers[PASSES1 + half]):
            w = twiddles + 4 * numbers[at + 3]
            _column_pass(numbers[at], numbers[at + 1], numbers[at + 2], w, x_re, x_im, y_re, y_im)
            x_re, x_im, y_re, y_im = y_re, y_im, x_re, x_im
            at += PASS_SIZE
        if half == 0:
            turns = twiddles + 4 * numbers[TURNS]
            _turn_and_transpose(numbers[N1], numbers[N2], x_re, x_im, turns, y_re, y_im)
            x_re, x_im, y_re, y_im = y_re, y_im, x_re, x_im


def fft_ref(x: np.ndarray) -> np.ndarray:
    """The DFT of complex x (n,), literally: f64 angles, reduced in integers."""
    n = len(x)
    k = np.arange(n)
    return np.exp(-2j * np.pi * (np.outer(k, k) % n) / n) @ x.astype(np.complex128)
