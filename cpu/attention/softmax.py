"""The softmax of a score buffer, in vector IR: scores are replaced by their exponentials."""

from __future__ import annotations

import numpy as np
from llvmlite import ir
from numba import types

from sparsekv_cli.cpu.jit import llvm
from sparsekv_cli.cpu.jit.emitter import emitter
from sparsekv_cli.cpu.jit.kernel import njit
from sparsekv_cli.cpu.jit.llvm import F32, I32, I64, LANES, VF, VI, const, keep, load, splat

NEGATIVE_INFINITY = np.float32(-np.inf)


def exp_lanes(b: ir.IRBuilder, x: ir.Value) -> ir.Value:
    """Returns e^x for x <= 0, <16 x float>, within 2 units in the last place; 0 below -87.

    Cody-Waite reduction x = n ln 2 + r and a polynomial of degree 6 in r (Cephes' expf).
    """
    x = llvm.call_named(b, "llvm.maxnum.v16f32", VF, x, const(F32, -87.5))
    n = llvm.fma(b, x, const(F32, 1.4426950408889634), const(F32, 0.5))
    n = llvm.call_named(b, "llvm.floor.v16f32", VF, n)
    r = llvm.fma(b, n, const(F32, -0.693359375), x)
    r = llvm.fma(b, n, const(F32, 2.12194440e-4), r)
    y = const(F32, 1.9875691500e-4)
    for c in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 0.5):
        y = llvm.fma(b, y, r, const(F32, c))
    y = b.fadd(llvm.fma(b, y, b.fmul(r, r), r), const(F32, 1.0))
    power = b.shl(b.add(b.fptosi(n, VI), const(I32, 127)), const(I32, 23))
    y = b.fmul(y, b.bitcast(power, VF))
    return b.select(b.fcmp_ordered(">", x, const(F32, -87.0)), y, const(F32, 0.0))


@emitter(returns=types.float32, peak=types.float32)
def exp_in_place(b, scores, count, peak):
    """scores[j] = e^(scores[j] - peak), j < count rounded up to 16; returns their sum (f32)."""
    peak_lanes = splat(b, peak)

    def body(j, sums):
        at = b.add(scores, b.mul(j, I64(4)))
        y = exp_lanes(b, b.fsub(load(b, VF, at), peak_lanes))
        llvm.store(b, y, at)
        return [b.fadd(sums[0], y)]

    return llvm.sum_lanes(b, llvm.loop(b, I64(0), count, LANES, [const(F32, 0.0)], body)[0])


@emitter(cap=types.float32)
def soften(b, scores, count, cap):
    """Replaces the scores f32 at an address by cap * tanh(score / cap). Infinity and NaN stay.

    It changes the first ``count`` scores, rounded up to a multiple of 16. tanh is computed by
    e^(-2 |x|).
    """
    caps, one = splat(b, cap), const(F32, 1.0)
    rate = b.fdiv(const(F32, -2.0), caps)

    @llvm.every(b, count, LANES)
    def body(j):
        at = b.add(scores, b.mul(j, I64(4)))
        x = load(b, VF, at)
        size = llvm.call_named(b, "llvm.fabs.v16f32", VF, x)
        t = exp_lanes(b, b.fmul(size, rate))
        y = b.fmul(b.fdiv(b.fsub(one, t), b.fadd(one, t)), caps)
        y = llvm.call_named(b, "llvm.copysign.v16f32", VF, y, x)
        is_number = b.fcmp_ordered("<", size, const(F32, np.inf))
        llvm.store(b, b.select(is_number, y, x), at)


@emitter(returns=types.float32)
def max_of(b, scores, count):
    """Returns the largest of scores[0 .. count rounded up to 16) (f32)."""

    def body(j, best):
        value = load(b, VF, b.add(scores, b.mul(j, I64(4))))
        return [llvm.call_named(b, "llvm.maxnum.v16f32", VF, best[0], value)]

    return llvm.max_lanes(b, llvm.loop(b, I64(0), count, LANES, [const(F32, -np.inf)], body)[0])


@njit(cache=True, nogil=True)
def exponentiate(scores, n, softcap, sink):
    """Replaces scores by e^(score - peak) after the softcap; returns the peak and their sum.

    scores f32 (>= n + LANES,): from n to n + LANES they are overwritten. softcap: 0 for none. sink:
    a score without a value, or -inf; the sum is without it.
    """
    scores[n : n + LANES] = NEGATIVE_INFINITY
    at = scores.ctypes.data
    if softcap:
        soften(at, n, softcap)
    peak = max(max_of(at, n), sink)
    mass = exp_in_place(at, n, peak)
    keep(scores)
    return peak, mass
