"""Which frequencies FAEDKV keeps: the chunks of a spectrum by their importance."""

from __future__ import annotations

import numpy as np

N_CHUNKS = 22  # paper, section 5.5
LEAST_SHARE = 0.001  # of the frequencies: a single bin


def chunk_borders(n_bins: int) -> np.ndarray:
    """int64 (N_CHUNKS + 1,): chunk c holds the bins from borders[c] to borders[c + 1]."""
    return np.arange(N_CHUNKS + 1) * n_bins // N_CHUNKS


def kept_bins(n: int, share: float, importance: np.ndarray) -> np.ndarray:
    """The bins of an rfft over n tokens that are kept: int64, ascending.

    The most important chunks, the last of them cut so that ``share`` of all bins remain. The least
    share keeps one bin, which is the mean if the lowest chunk is the most important.
    """
    n_bins = n // 2 + 1
    borders = chunk_borders(n_bins)
    left = 1 if share <= LEAST_SHARE else max(1, round(share * n_bins))
    kept: list[np.ndarray] = []
    for c in np.argsort(-importance, kind="stable"):
        bins = np.arange(borders[c], borders[c + 1])[:left]
        kept.append(bins)
        left -= len(bins)
    return np.sort(np.concatenate(kept))


def runs(bins: np.ndarray) -> np.ndarray:
    """Ascending bins as (first, number) pairs of neighbours: int64 (runs, 2)."""
    starts = np.flatnonzero(np.diff(bins, prepend=-2) != 1)
    return np.stack([bins[starts], np.diff(starts, append=len(bins))], axis=1).astype(np.int64)
