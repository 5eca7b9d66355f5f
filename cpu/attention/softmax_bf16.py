"""The running softmax of prefill attention in bf16, in vector IR: a query row a lane.

A tile has WIDTH query rows; a vector of scores, weights or sums has one number of each of them.
"""

from __future__ import annotations

import numpy as np
from llvmlite import ir
from numba import types

from sparsekv_cli.cpu.attention.flash import larger, soften_rows
from sparsekv_cli.cpu.jit import llvm
from sparsekv_cli.cpu.jit.bf16 import narrowed
from sparsekv_cli.cpu.jit.emitter import emitter
from sparsekv_cli.cpu.jit.llvm import F32, I16, I32, I64, LANES, VF, VI, const, load, splat

WIDTH = 4 * LANES  # query rows of a tile
VECTORS = range(WIDTH // LANES)
# 2^r on [-1/2, 1/2], relative error 7e-6: coefficients of a Chebyshev fit
EXP2 = (1.00000005, 0.693127263, 0.240222117, 0.0558755351, 0.00967076788)


def _load_tile(b: ir.IRBuilder, address: ir.Value) -> list[ir.Value]:
    return [load(b, VF, address, 4 * LANES * i) for i in VECTORS]


def _store_tile(b: ir.IRBuilder, vectors: list[ir.Value], address: ir.Value) -> None:
    for i, vector in enumerate(vectors):
        llvm.store(b, vector, address, 4 * LANES * i)


@emitter
def hide_and_find_peaks(b, scores, low, free, count, n_visible, window, top):
    """Raises top to the largest of scores[j], j < count, over the keys that a lane sees.

    Lane i sees the last ``window`` of the keys j < n_visible[i]. scores f32 (count, WIDTH): those
    that a lane does not see become -inf. All lanes see the keys from ``low`` to ``free``. n_visible
    int32 (WIDTH,), top f32 (WIDTH,). Addresses.
    """
    limits = [load(b, VI, n_visible, 4 * LANES * i) for i in VECTORS]
    firsts = [b.sub(limit, splat(b, b.trunc(window, I32))) for limit in limits]

    def found(best, row):
        return [larger(b, x, value) for x, value in zip(row, best, strict=True)]

    def seen_row(j, best):
        return found(best, _load_tile(b, b.add(scores, b.mul(j, I64(4 * WIDTH)))))

    def hidden_row(j, best):
        at, key = b.add(scores, b.mul(j, I64(4 * WIDTH))), splat(b, b.trunc(j, I32))
        seen = [
            b.and_(b.icmp_signed("<", key, limit), b.icmp_signed(">=", key, first))
            for limit, first in zip(limits, firsts, strict=True)
        ]
        row = [
            b.select(each, x, const(F32, -np.inf))
            for each, x in zip(seen, _load_tile(b, at), strict=True)
        ]
        _store_tile(b, row, at)
        return found(best, row)

    best = llvm.loop(b, I64(0), low, 1, _load_tile(b, top), hidden_row)
    best = llvm.loop(b, low, free, 1, best, seen_row)
    _store_tile(b, llvm.loop(b, free, count, 1, best, hidden_row), top)


def _exp2_lanes(b: ir.IRBuilder, x: ir.Value) -> ir.Value:
    """Returns 2^x for x <= 0, and NaN for NaN."""
    x = larger(b, const(F32, -200.0), x)  # 2^-200 is 0 too
    n = llvm.call_named(b, "llvm.rint.v16f32", VF, x)
    r = b.fsub(x, n)
    power = const(F32, EXP2[-1])
    for c in EXP2[-2::-1]:
        power = llvm.fma(b, power, r, const(F32, c))
    every, rounding = ir.Constant(I16, -1), I32(4)  # all lanes; the CPU's current rounding mode
    name = "llvm.x86.avx512.mask.scalef.ps.512"
    return llvm.call_named(b, name, VF, power, n, power, every, rounding)


@emitter(cap=types.float32)
def soften(b, scores, count, cap, peak, top):
    """scores = cap tanh(scores / cap), f32 (count, WIDTH), but -inf stays; top: see soften_rows."""
    for i in VECTORS:
        part = [b.add(x, I64(4 * LANES * i)) for x in (scores, peak, top)]
        soften_rows(
            b, part[0], count, cap, part[1], part[2], LANES, lambda x: _exp2_lanes(b, x), WIDTH
        )


@emitter(returns=types.int64, scale=types.float32)
def weigh(b, scores, count, scale, peak, top, mass, old, weights):
    """weights[j] = 2^(scale (scores[j] - top)), j < count; old = 2^(scale (peak - top)).

    Then peak = top, and mass = mass old + the weights' sum. scores f32 (count, WIDTH); weights
    bf16 in pairs of keys, (count / 2, 2 WIDTH); the others f32 (WIDTH,); addresses. Returns
    whether any of old is not 1.
    """
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
    olds = [  # exactly 1 if the peak is unchanged: other rows of the tile then change no bit
        _exp2_lanes(b, b.fmul(b.fsub(x, new), scales))
        for x, new in zip(_load_tile(b, peak), tops, strict=True)
    ]
    masses = [llvm.fma(b, *each) for each in zip(_load_tile(b, mass), olds, sums, strict=True)]
    for vectors, place in ((olds, old), (masses, mass), (tops, peak)):
        _store_tile(b, vectors, place)
    moved = [b.fcmp_unordered("!=", x, const(F32, 1.0)) for x in olds]
    while len(moved) > 1:
        moved = [b.or_(*each) for each in zip(moved[::2], moved[1::2], strict=True)]
    return b.zext(b.icmp_unsigned("!=", b.bitcast(moved[0], I16), I16(0)), I64)


@emitter
def shrink(b, acc, n_rows, old):
    """acc[c] *= old, f32 (n_rows, WIDTH) and (WIDTH,); addresses."""
    factors = _load_tile(b, old)

    @llvm.every(b, n_rows)
    def body(c):
        at = b.add(acc, b.mul(c, I64(4 * WIDTH)))
        row = zip(_load_tile(b, at), factors, strict=True)
        _store_tile(b, [b.fmul(x, factor) for x, factor in row], at)


@emitter
def divide(b, acc, d_v, mass, out):
    """out bf16 (WIDTH, d_v) = acc^T / mass, acc f32 (d_v, WIDTH), mass (WIDTH,); addresses.

    d_v: a multiple of 16.
    """
    inverses = [b.fdiv(const(F32, 1.0), x) for x in _load_tile(b, mass)]

    @llvm.every(b, d_v, LANES)
    def body(c):
        for i in VECTORS:
            at = b.add(acc, b.add(b.mul(c, I64(4 * WIDTH)), I64(4 * LANES * i)))
            rows = [load(b, VF, at, 4 * WIDTH * r) for r in range(LANES)]
            rows = [b.fmul(row, inverses[i]) for row in rows]
            for lane, row in enumerate(llvm.transposed(b, rows)):
                element = b.add(b.mul(d_v, I64(LANES * i + lane)), c)
                llvm.store(b, narrowed(b, row), b.add(out, b.mul(element, I64(2))))
