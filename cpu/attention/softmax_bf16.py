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
from sparsekv_cli.cpu.jit.value import (
    F32,
    I16,
    I32,
    I64,
    LANES,
    VF,
    VI,
    Value,
    call_named,
    const,
    load,
    select,
    store,
)

WIDTH = 4 * LANES  # query rows of a tile
VECTORS = range(WIDTH // LANES)
# 2^r on [-1/2, 1/2], relative error 7e-6: coefficients of a Chebyshev fit
EXP2 = (1.00000005, 0.693127263, 0.240222117, 0.0558755351, 0.00967076788)


def _load_tile(address: Value) -> list[Value]:
    return [load(VF, address, 4 * LANES * i) for i in VECTORS]


def _store_tile(vectors: list[Value], address: Value) -> None:
    for i, vector in enumerate(vectors):
        store(vector, address, 4 * LANES * i)


@emitter
def hide_and_find_peaks(scores, low, free, count, n_visible, window, top):
    """Raises top to the largest of scores[j], j < count, over the keys that a lane sees.

    Lane i sees the last ``window`` of the keys j < n_visible[i]. scores f32 (count, WIDTH): those
    that a lane does not see become -inf. All lanes see the keys from ``low`` to ``free``. n_visible
    int32 (WIDTH,), top f32 (WIDTH,). Addresses.
    """
    limits = [load(VI, n_visible, 4 * LANES * i) for i in VECTORS]
    firsts = [limit - window.to(I32).splat() for limit in limits]

    def found(best, row):
        return [larger(x, value) for x, value in zip(row, best, strict=True)]

    def seen_row(j, best):
        return found(best, _load_tile(scores + j * (4 * WIDTH)))

    def hidden_row(j, best):
        at, key = scores + j * (4 * WIDTH), j.to(I32).splat()
        seen = [(key < limit) & (key >= first) for limit, first in zip(limits, firsts, strict=True)]
        row = [select(each, x, -np.inf) for each, x in zip(seen, _load_tile(at), strict=True)]
        _store_tile(row, at)
        return found(best, row)

    best = llvm.loop(0, low, 1, _load_tile(top), hidden_row)
    best = llvm.loop(low, free, 1, best, seen_row)
    _store_tile(llvm.loop(free, count, 1, best, hidden_row), top)


def _exp2_lanes(x: Value) -> Value:
    """Returns 2^x for x <= 0, and NaN for NaN."""
    x = larger(const(F32, -200.0), x)  # 2^-200 is 0 too
    n = x.call("rint")
    r = x - n
    power = const(F32, EXP2[-1])
    for c in EXP2[-2::-1]:
        power = power.fma(r, c)
    every, rounding = ir.Constant(I16, -1), I32(4)  # all lanes; the CPU's current rounding mode
    name = "llvm.x86.avx512.mask.scalef.ps.512"
    return call_named(name, VF, power, n, power, every, rounding)


@emitter(cap=types.float32)
def soften(scores, count, cap, peak, top):
    """scores = cap tanh(scores / cap), f32 (count, WIDTH), but -inf stays; top: see soften_rows."""
    for i in VECTORS:
        part = [x + 4 * LANES * i for x in (scores, peak, top)]
        soften_rows(part[0], count, cap, part[1], part[2], LANES, _exp2_lanes, WIDTH)


@emitter(returns=types.int64, scale=types.float32)
def weigh(scores, count, scale, peak, top, mass, old, weights):
    """weights[j] = 2^(scale (scores[j] - top)), j < count; old = 2^(scale (peak - top)).

    Then peak = top, and mass = mass old + the weights' sum. scores f32 (count, WIDTH); weights
    bf16 in pairs of keys, (count / 2, 2 WIDTH); the others f32 (WIDTH,); addresses. Returns
    whether any of old is not 1.
    """
    scales, tops = scale.splat(), _load_tile(top)
    lifts = [-(x * scales) for x in tops]
    half, high = const(I32, 0x8000), const(I32, -0x10000)

    def pair(j, sums):
        at = scores + j * (4 * WIDTH)
        to = weights + j * (2 * WIDTH)
        new = []
        for i, (lift, total) in enumerate(zip(lifts, sums, strict=True)):
            rounded = []
            for key in range(2):
                x = load(VF, at, 4 * WIDTH * key + 4 * LANES * i)
                weight = _exp2_lanes(x.fma(scales, lift))
                total = total + weight
                rounded.append(weight.bitcast(VI) + half)
            low = rounded[0] >> 16
            store(low | rounded[1] & high, to, 4 * LANES * i)
            new.append(total)
        return new

    sums = llvm.loop(0, count, 2, [const(F32, 0.0)] * len(VECTORS), pair)
    olds = [  # exactly 1 if the peak is unchanged: other rows of the tile then change no bit
        _exp2_lanes((x - new) * scales) for x, new in zip(_load_tile(peak), tops, strict=True)
    ]
    masses = [x.fma(y, z) for x, y, z in zip(_load_tile(mass), olds, sums, strict=True)]
    for vectors, place in ((olds, old), (masses, mass), (tops, peak)):
        _store_tile(vectors, place)
    moved = [x != 1.0 for x in olds]
    while len(moved) > 1:
        moved = [x | y for x, y in zip(moved[::2], moved[1::2], strict=True)]
    return (moved[0].bitcast(I16) != 0).unsigned_to(I64)


@emitter
def shrink(acc, n_rows, old):
    """acc[c] *= old, f32 (n_rows, WIDTH) and (WIDTH,); addresses."""
    factors = _load_tile(old)

    @llvm.every(n_rows)
    def body(c):
        at = acc + c * (4 * WIDTH)
        row = zip(_load_tile(at), factors, strict=True)
        _store_tile([x * factor for x, factor in row], at)


@emitter
def divide(acc, d_v, mass, out):
    """out bf16 (WIDTH, d_v) = acc^T / mass, acc f32 (d_v, WIDTH), mass (WIDTH,); addresses.

    d_v: a multiple of 16.
    """
    inverses = [1.0 / x for x in _load_tile(mass)]

    @llvm.every(d_v, LANES)
    def body(c):
        for i in VECTORS:
            at = acc + (c * (4 * WIDTH) + 4 * LANES * i)
            rows = [load(VF, at, 4 * WIDTH * r) for r in range(LANES)]
            rows = [row * inverses[i] for row in rows]
            for lane, row in enumerate(llvm.transposed(rows)):
                element = d_v * (LANES * i + lane) + c
                store(narrowed(row), out + element * 2)
