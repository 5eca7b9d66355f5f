"""The softmax of a score buffer, in vector IR: scores are replaced by their exponentials."""

from __future__ import annotations

import numpy as np
from numba import types

from sparsekv_cli.cpu.jit import llvm
from sparsekv_cli.cpu.jit.emitter import emitter
from sparsekv_cli.cpu.jit.kernel import njit
from sparsekv_cli.cpu.jit.value import (
    F32,
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

NEGATIVE_INFINITY = np.float32(-np.inf)


def exp_lanes(x: Value) -> Value:
    """Returns e^x for x <= 0, <16 x float>, within 2 units in the last place; 0 below -87.

    Cody-Waite reduction x = n ln 2 + r and a polynomial of degree 6 in r (Cephes' expf).
    """
    x = x.maxnum(-87.5)
    n = x.fma(1.4426950408889634, 0.5)
    n = n.call("floor")
    r = n.fma(-0.693359375, x)
    r = n.fma(2.12194440e-4, r)
    y = const(F32, 1.9875691500e-4)
    for c in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 0.5):
        y = y.fma(r, c)
    y = y.fma(r * r, r) + 1.0
    power = n.to(VI) + 127 << 23
    y = y * power.bitcast(VF)
    return select(x > -87.0, y, 0.0)


@emitter(returns=types.float32, peak=types.float32)
def exp_in_place(scores, count, peak):
    """scores[j] = e^(scores[j] - peak), j < count rounded up to 16; returns their sum (f32)."""
    peak_lanes = peak.splat()

    def body(j, sums):
        at = scores + j * 4
        y = exp_lanes(load(VF, at) - peak_lanes)
        store(y, at)
        return [sums[0] + y]

    return llvm.sum_lanes(llvm.loop(0, count, LANES, [const(F32, 0.0)], body)[0])


@emitter(cap=types.float32)
def soften(scores, count, cap):
    """Replaces the scores f32 at an address by cap * tanh(score / cap). Infinity and NaN stay.

    It changes the first ``count`` scores, rounded up to a multiple of 16. tanh is computed by
    e^(-2 |x|).
    """
    caps, one = cap.splat(), const(F32, 1.0)
    rate = -2.0 / caps

    @llvm.every(count, LANES)
    def body(j):
        at = scores + j * 4
        x = load(VF, at)
        size = x.call("fabs")
        t = exp_lanes(size * rate)
        y = (one - t) / (one + t) * caps
        y = call_named("llvm.copysign.v16f32", VF, y, x)
        is_number = size < np.inf
        store(select(is_number, y, x), at)


@emitter(returns=types.float32)
def max_of(scores, count):
    """Returns the largest of scores[0 .. count rounded up to 16) (f32)."""

    def body(j, best):
        return [best[0].maxnum(load(VF, scores + j * 4))]

    return llvm.max_lanes(llvm.loop(0, count, LANES, [const(F32, -np.inf)], body)[0])


@njit(cache=True, nogil=True)
def exponentiate(scores, n, softcap, sink):
    """Replaces scores by e^(score - peak) after the softcap; returns the peak and their sum.

    scores f32 (>= n + LANES,): from n to n + LANES they are overwritten. softcap: 0 for none. sink:
    a score without a value, or -inf; the sum is without it.
    """
    scores[n : n + LANES] = NEGATIVE_INFINITY
    if softcap:
        soften(scores, n, softcap)
    peak = max(max_of(scores, n), sink)
    return peak, exp_in_place(scores, n, peak)
