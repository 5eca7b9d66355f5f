"""LFPS' high-sparsity test: a head that attends almost only to its sinks needs no search (eq 5, 6).

Its output is then the weighted mean of the sinks' values, the local values and the mean value. The
masses of the test are the weights. The sinks are the first rows and, in models that have it, the
head's sink, a score without a value. Scores are those after the model's softcap.
"""

from typing import NamedTuple

import numpy as np

from sparsekv_cli.cpu.attention.tile import tile_values
from sparsekv_cli.cpu.jit.kernel import njit
from sparsekv_cli.cpu.jit.llvm import sum_squares
from sparsekv_cli.cpu.lfps.history import SINKS
from sparsekv_cli.cpu.vector.declared import f32

REACH, PER_DEVIATION = 8, 2  # standard deviations on either side; points in each deviation


class Constants(NamedTuple):
    """The bypass test's statistics of the keys and values of the last prefill (eq 5, 6)."""

    mean_k: np.ndarray = f32("n_kv", "k_width")
    mean_v: np.ndarray = f32("n_kv", "v_width")
    # (G, d, d), or (G, 0, 0) if ``ratio`` is used
    covariance: np.ndarray = f32("n_kv", "n_covariance", "n_covariance")
    ratio: np.ndarray = f32("n_head")  # variance of a score over |q|^2


@njit(cache=True, nogil=True)
def _half_variance(q, covariance, ratio):
    """Returns half the variance of q . k (q scaled): q^T C q / 2, or |q|^2 ratio / 2 without C."""
    if covariance.shape[0] == 0:
        return 0.5 * sum_squares(q) * ratio
    weighted = np.zeros(q.shape[0], np.float32)  # q^T C; this order is fast without fastmath
    for i in range(covariance.shape[0]):
        for j in range(covariance.shape[0]):
            weighted[j] += q[i] * covariance[i, j]
    total = np.float32(0)
    for j in range(covariance.shape[0]):
        total += weighted[j] * q[j]
    return 0.5 * total


@njit(cache=True, nogil=True)
def log_mean_exp(mean, half_variance, softcap):
    """Returns ln of the mean of e^x for scores x that are normal before the softcap (0: none)."""
    if not softcap:
        return mean + half_variance
    deviation = np.sqrt(2 * max(half_variance, 0.0))
    exponents = np.empty(2 * REACH * PER_DEVIATION + 1)
    top = -np.inf
    for i in range(len(exponents)):
        z = i / PER_DEVIATION - REACH
        exponents[i] = softcap * np.tanh((mean + z * deviation) / softcap) - 0.5 * z * z
        top = max(top, exponents[i])
    total = 0.0
    for i in range(len(exponents)):
        total += np.exp(exponents[i] - top)
    return top + np.log(total / PER_DEVIATION) - 0.5 * np.log(2 * np.pi)


@njit(cache=True, nogil=True)
def may_bypass(near, n_near, sink, epsilon):
    """Returns whether the test could hold for a global mass of 0. For most heads it cannot.

    near, sink: see ``bypass``.
    """
    peak = np.float64(sink)
    for j in range(n_near):
        peak = max(peak, np.float64(near[j]))
    sinks, local = np.exp(sink - peak), 0.0
    for j in range(n_near - 1):
        weight = np.exp(near[j] - peak)
        if j < SINKS:
            sinks += weight
        else:
            local += weight
    return sinks > epsilon * (sinks + local)


@njit(cache=True, nogil=True)
def bypass(
    q, near, n_near, sink, softcap, constants, kv_head, ratio, v, v_row, v_kind, first_local, n,
    epsilon, lse, out
):  # fmt: skip
    """Runs the high-sparsity test (eq 6). If it holds, writes the head's output to out f32 (d_v,).

    q: the scaled query. near: scores of the sinks (4), then of the keys first_local..n-1. sink: the
    score without a value, or -inf. v: address of rows of v_kind, v_row bytes apart. lse: f32 (1,)
    if the sinks are left out of the output (see ``LFPSStep.exclude_sinks``), else (0,). Returns
    whether the head was bypassed.
    """
    mean_k, mean_v = constants.mean_k[kv_head], constants.mean_v[kv_head]
    mean = 0.0
    for c in range(mean_k.shape[0]):
        mean += q[c] * mean_k[c]
    half_variance = np.float64(_half_variance(q, constants.covariance[kv_head], ratio))
    log_global = log_mean_exp(mean, half_variance, softcap) + np.log(n - SINKS)
    peak = max(log_global, np.float64(sink))
    for j in range(n_near):
        peak = max(peak, np.float64(near[j]))
    weights = np.empty(n_near, np.float32)
    sinks, local = np.exp(sink - peak), 0.0
    for j in range(n_near):
        weight = np.exp(near[j] - peak)
        weights[j] = weight
        if j < SINKS:
            sinks += weight
        elif j < n_near - 1:
            local += weight
    wide = np.exp(log_global - peak)
    if sinks <= epsilon * (sinks + wide + local):
        return False
    total = sinks + wide + local + weights[n_near - 1]
    for c in range(out.shape[0]):
        out[c] = wide * mean_v[c]
    d_v = out.shape[0]
    if lse.shape[0]:
        total = max(wide + local + weights[n_near - 1], 1e-300)  # never 0: it is a divisor
        lse[0] = peak + np.log(total)
    else:
        tile_values(1, v_kind, weights, 0, v, v_row, 0, SINKS, d_v, out)
    v_local = v + first_local * v_row
    tile_values(1, v_kind, weights[SINKS:], 0, v_local, v_row, 0, n_near - SINKS, d_v, out)
    for c in range(out.shape[0]):
        out[c] /= total
    return True
