"""Ways to choose the past rows that a chunk of a prompt attends to, in numpy.

A way gives weights of blocks of keys, (H, blocks of queries, blocks of keys), for q (H, T, d) and
past keys (G, n, d). A query attends to the blocks with the largest weights. It attends to the first
and the last rows in any case. A rule says how many blocks these are. RANK takes the same number for
all. MASS goes on until the sum of the weights is a share of all. PEAK takes those above a share of
the largest one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

PAGE, BLOCK = 8, 128  # keys of a block: of ours, and of the others
STRIDE = 8  # XAttention: rows between two that a diagonal takes
N_SAMPLES = 16  # rows of a chunk that score the pages, for one way
RANK, MASS, PEAK = "rank", "mass", "peak"


class Way(NamedTuple):
    """A way to weigh blocks: its function, the keys of a block, its rule."""

    weigh: Callable[[np.ndarray, np.ndarray], np.ndarray]
    block: int
    rule: str


def softmax(x: np.ndarray) -> np.ndarray:
    x = np.exp(x - x.max(-1, keepdims=True))
    return x / x.sum(-1, keepdims=True)


def means(x: np.ndarray, size: int) -> np.ndarray:
    """The means of ``size`` rows: (heads, n, d) -> (heads, n / size, d)."""
    return x.reshape(len(x), -1, size, x.shape[2]).mean(2)


def by_pages(q: np.ndarray, k: np.ndarray, deviation: float = 1.0) -> np.ndarray:
    """Ours: the largest q . mean + |q| . std of the mean queries of all heads of a kv head.

    Each query's best is subtracted. deviation: a factor of the second part.
    """
    return weights_of_pages(means(q, BLOCK), k, deviation)


def by_samples(q: np.ndarray, k: np.ndarray) -> np.ndarray:
    """Returns the weights of pages by N_SAMPLES single queries, without a mean over a block."""
    each = np.arange(1, N_SAMPLES + 1) * q.shape[1] // N_SAMPLES - 1
    return weights_of_pages(q[:, each], k, 1.0)


def weights_of_pages(q: np.ndarray, k: np.ndarray, deviation: float) -> np.ndarray:
    """The weights of pages for queries q (H, R, d)."""
    (n_head, _, d), n_kv = q.shape, len(k)
    rows, pages = q.reshape(n_kv, -1, d), k.reshape(n_kv, -1, PAGE, d)
    scores = rows @ pages.mean(2).swapaxes(1, 2)
    scores += deviation * np.abs(rows) @ pages.std(2).swapaxes(1, 2)
    scores = (scores - scores.max(2, keepdims=True)).max(1) * d**-0.5
    return np.repeat(np.exp(scores)[:, None], n_head // n_kv, axis=0)


def by_softmax(q: np.ndarray, k: np.ndarray) -> np.ndarray:
    """The mean of the softmax of mean query . mean key, over the heads of a kv head."""
    n_kv, d = len(k), q.shape[2]
    rows = means(q, BLOCK).reshape(n_kv, -1, d)
    weights = softmax(rows @ means(k, PAGE).swapaxes(1, 2) * d**-0.5).mean(1)
    return np.repeat(weights[:, None], len(q) // n_kv, axis=0)


def by_means(q: np.ndarray, k: np.ndarray) -> np.ndarray:
    """The softmax of mean query . mean key of blocks: FlexPrefill's query-aware estimate.

    FlashPrefill weighs blocks likewise; its rule is another one.
    """
    keys = np.repeat(means(k, BLOCK), len(q) // len(k), axis=0)
    return softmax(means(q, BLOCK) @ keys.swapaxes(1, 2) * q.shape[2] ** -0.5)


def by_antidiagonals(q: np.ndarray, k: np.ndarray) -> np.ndarray:
    """XAttention: the softmax of antidiagonals' sums in STRIDE x STRIDE products, in blocks."""
    n_head, n_rows, d = q.shape
    k = np.repeat(k, n_head // len(k), axis=0)
    lines = q.reshape(n_head, n_rows // STRIDE, STRIDE * d)
    turned = k.reshape(n_head, -1, STRIDE, d)[:, :, ::-1].reshape(n_head, -1, STRIDE * d)
    weights = softmax(lines @ turned.swapaxes(1, 2) * d**-0.5 / STRIDE)
    each = BLOCK // STRIDE
    return weights.reshape(n_head, -1, each, weights.shape[2] // each, each).mean((2, 4)) * each


def by_last_queries(q: np.ndarray, k: np.ndarray) -> np.ndarray:
    """FlexPrefill's other estimate: the exact attention of the chunk's last BLOCK queries."""
    keys = np.repeat(k, len(q) // len(k), axis=0)
    weights = softmax(q[:, -BLOCK:] @ keys.swapaxes(1, 2) * q.shape[2] ** -0.5).mean(1)
    return weights.reshape(len(q), 1, -1, BLOCK).sum(3)


WAYS = {
    "pages of 8, mean queries (ours)": Way(by_pages, PAGE, RANK),
    "pages of 8, 16 queries": Way(by_samples, PAGE, RANK),
    "pages of 8, without deviations": Way(lambda q, k: by_pages(q, k, 0.0), PAGE, RANK),
    "pages of 8, mean of softmax": Way(by_softmax, PAGE, RANK),
    "FlexPrefill, block means": Way(by_means, BLOCK, MASS),
    "FlexPrefill, last queries": Way(by_last_queries, BLOCK, MASS),
    "XAttention, antidiagonals": Way(by_antidiagonals, BLOCK, MASS),
    "FlashPrefill, block means": Way(by_means, BLOCK, PEAK),
    "pages of 8, a mass for each kv head": Way(by_softmax, PAGE, MASS),
}


def chosen(weights: np.ndarray, way: Way, setting: float, recent: int) -> np.ndarray:
    """Which blocks are attended to, of weights (..., blocks): the rule's with a setting in 0 .. 1.

    The first block and those of the last ``recent`` rows always are. They count in no sum.
    """
    n, last = weights.shape[-1], recent // way.block
    free = weights.copy()
    free[..., 0] = free[..., n - last :] = 0
    order = np.argsort(-free, axis=-1, kind="stable")
    ranked = np.take_along_axis(free, order, -1)
    if way.rule == RANK:
        is_in = np.broadcast_to(np.arange(n) < setting * n, free.shape)
    elif way.rule == PEAK:
        is_in = ranked > setting * weights.max(-1, keepdims=True)
    else:
        before = np.cumsum(ranked, -1) - ranked
        is_in = before < setting * weights.sum(-1, keepdims=True) - (weights - free).sum(
            -1, keepdims=True
        )
    found = np.zeros(free.shape, bool)
    np.put_along_axis(found, order, is_in & (ranked > 0), -1)
    found[..., 0] = found[..., n - last :] = True
    return found


def setting_for(rows: float, weights: list[np.ndarray], way: Way, recent: int) -> float:
    """The setting with which ``rows`` past rows are attended to, on average over all weights."""
    low, high = 0.0, 1.0
    for _ in range(24):
        middle = (low + high) / 2
        sizes = [way.block * chosen(w, way, middle, recent).sum(-1).mean() for w in weights]
        is_many = np.mean(sizes) > rows
        if is_many == (way.rule != PEAK):
            high = middle
        else:
            low = middle
    return (low + high) / 2
