"""The softmax of a layer's attention, with a softcap and sinks, and the window of its rows."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from sparsekv_cli.kernels.checks import check


class ScoreSoftmax(NamedTuple):
    """The softmax of one layer's attention.

    scale: the factor of q . k. softcap: c of scores c tanh(score / c); 0: none. sinks: f32 (H,),
    for each head a score without a value, which only adds to the sum; None: none.
    """

    scale: float
    softcap: float = 0.0
    sinks: torch.Tensor | None = None


class RingWindow(NamedTuple):
    """The last ``rows`` rows of a sequence, the new one included. Row i lies in slot i % ``slots``.

    K and V may have fewer slots as long as the sequence has no more rows.
    """

    rows: int
    slots: int


def softmax_of(given: ScoreSoftmax | float, n_head: int, device: torch.device) -> ScoreSoftmax:
    """Returns ``given``, or the plain softmax with that scale. Checks the sinks."""
    softmax = given if isinstance(given, ScoreSoftmax) else ScoreSoftmax(given)
    if softmax.sinks is not None:
        check("sinks", softmax.sinks, torch.float32, (n_head,), device)
    return softmax


@triton.jit
def softened(scores, softcap):
    """Returns softcap tanh(scores / softcap)."""
    e = tl.exp(tl.abs(scores) * (-2.0 / softcap))  # never overflows
    size = softcap * ((1.0 - e) / (1.0 + e))
    return tl.where(scores < 0, -size, size)


@triton.jit
def scaled(products, scale, softcap, CAPPED: tl.constexpr):
    """Returns the scores of products q . k times log2(e), with a softcap if CAPPED."""
    if CAPPED:
        scores = softened(products * scale, softcap) * 1.4426950408889634
    else:
        scores = products * (scale * 1.4426950408889634)
    return scores
