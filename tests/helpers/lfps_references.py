"""Numpy forms of the kernels of LFPS, which tests compare with them."""

from __future__ import annotations

import numpy as np

from sparsekv_cli.cpu.lfps.covariance import BLOCK, EVERY, SAMPLED_FROM


def mean_and_covariance_ref(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns mean (G, d) and covariance (G, d, d) of rows (G, n, d), in f64."""
    rows = rows.astype(np.float64)
    mean, centre = rows.mean(1), rows[:, :BLOCK].mean(1)
    later = rows[:, SAMPLED_FROM::EVERY] - centre[:, None]
    centred = np.concatenate([rows[:, :SAMPLED_FROM] - centre[:, None], 2 * later], axis=1)
    off = mean - centre
    covariance = np.einsum("gni,gnj->gij", centred, centred) / rows.shape[1]
    return mean, covariance - off[:, :, None] * off[:, None]
