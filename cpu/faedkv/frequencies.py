"""The frequencies that FAEDKV keeps: the most important chunks of a spectrum."""

import numpy as np

N_CHUNKS = 22  # paper, section 5.5
LEAST_SHARE = 0.001  # a share of the frequencies that keeps a single bin


def chunk_borders(n_bins: int) -> np.ndarray:
    """Returns int64 (N_CHUNKS + 1,): chunk c holds the bins from borders[c] to borders[c + 1]."""
    return np.arange(N_CHUNKS + 1) * n_bins // N_CHUNKS


def kept_bins(n: int, share: float, importance: np.ndarray) -> np.ndarray:
    """Returns the bins of an rfft over n tokens that are kept: int64, ascending.

    They are the most important chunks. The last of these is cut, so that ``share`` of all bins
    remain. LEAST_SHARE keeps one bin. This is the mean if the lowest chunk is the most important.
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


def is_single(n: int, bins: np.ndarray) -> np.ndarray:
    """Returns whether a bin has one wave: the mean, or the highest bin of an even length."""
    return (bins == 0) | (2 * bins == n)


class FourierBasis:
    """The bins that are kept of a DFT over n tokens."""

    def __init__(self, n: int, bins: np.ndarray) -> None:
        self.n, self.bins = n, bins.astype(np.int64)
        self.is_single = is_single(n, self.bins)
        self.n_rows = 2 * len(bins) - int(self.is_single.sum())  # cosine and sine waves
        self.is_mean = self.bins.tolist() == [0]


def length_above(n: int) -> int:
    """Returns the smallest number from n on without a prime factor above 5: its FFT is fast."""
    while True:
        rest = n
        for prime in (2, 3, 5):
            while rest % prime == 0:
                rest //= prime
        if rest == 1:
            return n
        n += 1


def waves(n: int, bins: np.ndarray) -> np.ndarray:
    """Returns the waves of kept bins over n tokens: f64 (rows, n), orthonormal rows.

    Cosines come first, then the sines of the bins that have one.
    """
    turns = np.multiply.outer(bins, np.arange(n)) % n  # in integers, so that angles stay small
    angles, single = 2 * np.pi / n * turns, is_single(n, bins)
    norm = np.sqrt(np.where(single, 1, 2) / n)[:, None]
    return np.concatenate([norm * np.cos(angles), -(norm * np.sin(angles))[~single]])


def centred_waves(n: int, bins: np.ndarray) -> tuple[np.ndarray, list[int]]:
    """Returns waves of the kept bins, f64 (rows, n), and the number of waves in each of four parts.

    Their origin is the middle of n tokens. They are an orthonormal basis of the space of ``waves``.
    The parts are even waves of even bins, even waves of odd bins, odd waves of odd bins and odd
    waves of even bins. In the first and third part, the second quarter of the tokens is the first
    quarter backwards. In the other parts it also has the opposite sign.
    """
    angles = np.pi / n * (np.multiply.outer(bins, 2 * np.arange(n) + 1) % (2 * n))
    norm = np.sqrt(np.where(is_single(n, bins), 1, 2) / n)[:, None]
    even, odd = bins % 2 == 0, bins % 2 == 1
    has_cosine, has_sine = 2 * bins != n, bins != 0
    cosines, sines = norm * np.cos(angles), norm * np.sin(angles)
    parts = [
        cosines[has_cosine & even],
        cosines[has_cosine & odd],
        sines[has_sine & odd],
        sines[has_sine & even],
    ]
    return np.concatenate(parts), [len(part) for part in parts]
