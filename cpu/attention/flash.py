"""What the prefill attention of all types shares: softmax by powers of 2, and the reference."""

from __future__ import annotations

import numpy as np
from llvmlite import ir

LOG2_E = np.float32(1.4426950408889634)  # e^x = 2^(x LOG2_E)


def larger(b: ir.IRBuilder, x: ir.Value, y: ir.Value) -> ir.Value:
    """The larger of two numbers, or y if one is NaN: one instruction, where maxnum takes more."""
    return b.select(b.fcmp_ordered(">", x, y), x, y)


def attend_causal_ref(q, k, v, scale):
    """f64 (H, T, d_v) of q (H, T, d), k (G, n, d), v (G, n, d_v), all of them floats."""
    group, n, n_new = q.shape[0] // k.shape[0], k.shape[1], q.shape[1]
    k, v = (np.repeat(x.astype(np.float64), group, axis=0) for x in (k, v))
    scores = scale * q.astype(np.float64) @ k.transpose(0, 2, 1)
    visible = np.arange(n) <= np.arange(n - n_new, n)[:, None]
    scores = np.where(visible, scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return weights @ v / weights.sum(-1, keepdims=True)
