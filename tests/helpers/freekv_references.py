"""Numpy forms of FreeKV's kernels, which tests compare with them."""

from __future__ import annotations

import numpy as np

from sparsekv_cli.cpu.freekv.pages import GROUPED


def choose_pages_ref(q, hi, lo, first, end, n_best, scale, softcap=0.0):
    """numpy reference in f64: q (group, d), hi, lo (n_page, d) floats; also the pooled scores."""
    q, hi, lo = (x.astype(np.float64) for x in (q, hi[first:end], lo[first:end]))
    scores = scale * (np.maximum(q, 0) @ hi.T + np.minimum(q, 0) @ lo.T)
    scores = softcap * np.tanh(scores / softcap) if softcap else scores
    weights = np.exp(scores - scores.max(1, keepdims=True))
    pooled = (weights / weights.sum(1, keepdims=True)).mean(0)
    return first + np.sort(np.argsort(-pooled, kind="stable")[:n_best]), pooled


def group_summaries_ref(hi, lo, meanstd):
    """numpy reference in f64: hi, lo f16 (G, n_page, d) of whole groups -> (G, groups, d) each."""
    hi, lo = (x.astype(np.float64).reshape(x.shape[0], -1, GROUPED, x.shape[2]) for x in (hi, lo))
    if not meanstd:
        return hi.max(2), lo.min(2)
    mean, std = (hi + lo) / 2, (hi - lo) / 2
    middle = mean.mean(2)
    spread = np.sqrt(np.maximum((mean**2 + std**2).mean(2) - middle**2, 0))
    return middle + spread, middle - spread


def mean_cosine_ref(q, previous):
    """numpy reference in f64."""
    q, previous = q.astype(np.float64), previous.astype(np.float64)
    sizes = np.linalg.norm(q, axis=1) * np.linalg.norm(previous, axis=1)
    return ((q * previous).sum(1) / np.where(sizes > 0, sizes, 1)).mean()
