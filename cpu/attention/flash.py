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
