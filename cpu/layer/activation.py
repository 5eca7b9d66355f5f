"""Activations of gated feed-forward layers: act(gate) * up, on vectors of f32 or bf16.

All are gate' sigmoid(s(gate')) up'. SiLU has s(x) = x. GELU in its tanh form has s(x) = 2
sqrt(2/pi) (x + 0.044715 x^3). gpt-oss's clamped SwiGLU has s(x) = 1.702 x and gates of at most 7.
Its up' is up, clamped to 7 on both sides, plus 1. Output gates of heads are sigmoid(gate) up.
A squared ReLU has no up: it is max(gate, 0)^2.
"""

import math

import numpy as np
from numba import types

from sparsekv_cli.cpu.attention.softmax import exp_lanes
from sparsekv_cli.cpu.jit import llvm
from sparsekv_cli.cpu.jit.bf16 import narrowed, widened
from sparsekv_cli.cpu.jit.emitter import TYPE, emitter
from sparsekv_cli.cpu.jit.kernel import njit
from sparsekv_cli.cpu.jit.value import I16, LANES, VF, Value, load, select, store, vec

SILU, GELU, CLAMPED, SIGMOID, SQUARED = range(5)
ACTIVATIONS = {
    "silu": SILU, "gelu": GELU, "clamped": CLAMPED, "sigmoid": SIGMOID, "squared_relu": SQUARED,
}  # fmt: skip
SLOPE, CUBIC = 2 * math.sqrt(2 / math.pi), 2 * math.sqrt(2 / math.pi) * 0.044715  # of GELU
CLAMPED_SLOPE, CLAMP = 1.702, 7.0


def _bound(x: Value, low: float | None, high: float) -> Value:
    """Clamps x to at most ``high`` and at least ``low``; NaN stays NaN."""
    x = select(x > high, high, x)
    if low is None:
        return x
    return select(x < low, low, x)


def _gated(activation: int, g: Value, u: Value) -> Value:
    s = g
    if activation == SQUARED:
        positive = select(g < 0.0, 0.0, g)
        return positive * positive
    if activation == CLAMPED:
        g = _bound(g, None, CLAMP)
        u = _bound(u, -CLAMP, CLAMP) + 1.0
        s = g * CLAMPED_SLOPE
    elif activation == GELU:
        s = g * (g * g).fma(CUBIC, SLOPE)
    e = exp_lanes(-s.call("fabs"))
    top = select(s >= 0.0, 1.0, e)
    sigmoid = top / (1.0 + e)
    return (sigmoid if activation == SIGMOID else g * sigmoid) * u


@emitter(rows=TYPE, activation=range(len(ACTIVATIONS)))
def gate_lanes(rows, activation, gate, up, out, count):
    """out[i] = act(gate[i]) up[i], i < count rounded up to 16; addresses.

    rows: any array with the type of the elements, f32 or the bits of bf16.
    """
    in_bf16 = rows.dtype == types.uint16

    def wide(address, at):
        place = address + at
        return widened(load(vec(I16), place)) if in_bf16 else load(VF, place)

    @llvm.every(count, LANES)
    def lanes(j):
        at = j * (2 if in_bf16 else 4)
        result = _gated(activation, wide(gate, at), wide(up, at))
        store(narrowed(result) if in_bf16 else result, out + at)


@njit(cache=True, nogil=True)
def gate_one(activation, g, u):
    """Returns act(g) u of two f32."""
    s = g
    if activation == CLAMPED:
        g = min(g, np.float32(CLAMP))
        u = max(min(u, np.float32(CLAMP)), np.float32(-CLAMP)) + np.float32(1)
        s = np.float32(CLAMPED_SLOPE) * g
    elif activation == GELU:
        s = g * (np.float32(SLOPE) + np.float32(CUBIC) * g * g)
    elif activation == SIGMOID:
        return u / (np.float32(1) + np.exp(-g))
    elif activation == SQUARED:
        return max(g, np.float32(0)) ** 2
    return g / (np.float32(1) + np.exp(-s)) * u


def gate_ref(activation: int, gate: np.ndarray, up: np.ndarray) -> np.ndarray:
    """numpy reference of ``gate_lanes`` in the type of its arguments."""
    if activation == CLAMPED:
        gate, up = np.minimum(gate, CLAMP), np.clip(up, -CLAMP, CLAMP) + 1
        return gate / (1 + np.exp(-CLAMPED_SLOPE * gate)) * up
    if activation == GELU:
        return gate / (1 + np.exp(-gate * (SLOPE + CUBIC * gate**2))) * up
    if activation == SIGMOID:
        return up / (1 + np.exp(-gate))
    if activation == SQUARED:
        return np.maximum(gate, 0) ** 2
    return gate / (1 + np.exp(-gate)) * up
