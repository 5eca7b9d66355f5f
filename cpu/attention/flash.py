"""Parts that prefill attention in bf16 and in f32 share: the softcap, constants, the reference."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from sparsekv_cli.cpu.jit import llvm
from sparsekv_cli.cpu.jit.value import F32, Value, call_named, const, load, select, store, vec

ALL_ROWS = 1 << 30  # a window that no context fills
LOWEST = np.float32(-1e30)  # a peak below any score: differences to it are not NaN
LOG2_E = np.float32(1.4426950408889634)  # e^x = 2^(x LOG2_E)


def larger(x: Value, y: Value) -> Value:
    """Returns the larger of x and y, or y if one is NaN. One instruction; maxnum takes more."""
    return select(x > y, x, y)


def soften_rows(
    scores: Value,
    count: Value,
    cap: Value,
    peak: Value,
    top: Value,
    width: int,
    exp2: Callable[[Value], Value],
    stride: int = 0,
) -> None:
    """scores = cap tanh(scores / cap); top = the larger of peak and of the softened top.

    scores f32 (count, width), rows ``stride`` floats apart, 0: width; infinities stay. peak, top
    (width,); top is the scores' largest. Addresses; exp2: 2^x for x <= 0. tanh |x| = (1 - t) / (1 +
    t), t = e^(-2 |x|).
    """
    lanes, one = vec(F32, width), const(F32, 1.0, width)
    caps = cap.splat(width)
    rate = -2.0 * float(LOG2_E) / caps
    name = f"llvm.{{}}.v{width}f32"

    def softened(x: Value) -> Value:
        size = call_named(name.format("fabs"), lanes, x)
        t = exp2(size * rate)
        y = (one - t) / (one + t) * caps
        y = call_named(name.format("copysign"), lanes, y, x)
        is_number = size < -float(LOWEST)
        return select(is_number, y, x)

    @llvm.every(count)
    def row(j: Value) -> None:
        at = scores + j * (4 * (stride or width))
        store(softened(load(lanes, at)), at)

    best = softened(load(lanes, top))
    store(larger(best, load(lanes, peak)), top)


def attend_causal_ref(q, k, v, scale, window=ALL_ROWS, softcap=0.0, sinks=None):
    """Returns f64 (H, T, d_v) for q (H, T, d), k (G, n, d), v (G, n, d_v), all of them floats.

    A row attends to the last ``window`` rows, its own included. Scores become softcap tanh(score /
    softcap). sinks (H,): a score of each head that takes part in the softmax and has no value.
    """
    group, n, n_new = q.shape[0] // k.shape[0], k.shape[1], q.shape[1]
    k, v = (np.repeat(x.astype(np.float64), group, axis=0) for x in (k, v))
    scores = scale * q.astype(np.float64) @ k.transpose(0, 2, 1)
    if softcap:
        scores = softcap * np.tanh(scores / softcap)
    own = np.arange(n - n_new, n)[:, None]
    visible = (np.arange(n) <= own) & (np.arange(n) > own - window)
    scores = np.where(visible, scores, -np.inf)
    peak = scores.max(-1, keepdims=True)
    sink = -np.inf if sinks is None else np.asarray(sinks, np.float64)[:, None, None]
    peak = np.maximum(peak, sink)
    weights = np.exp(scores - peak)
    return weights @ v / (weights.sum(-1, keepdims=True) + np.exp(sink - peak))
