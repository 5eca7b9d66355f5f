"""Mamba-2: each head has a state matrix, which each row decays and to which it adds a product.

Source: "Transformers are SSMs" (Dao and Gu, arXiv:2405.21060):

    S_t = exp(A dt_t) S_{t-1} + dt_t B_t x_t^T,   y_t = S_t^T C_t + D x_t

with dt_t = softplus(dt_t + bias). x, B and C come from a causal convolution with a bias and SiLU.
Adjacent heads of a group share B and C. y_t is multiplied by silu(z_t). Then each group of its
elements gets an RMS norm. Many rows are computed in groups (groups.py).
"""

import numpy as np
from numba import prange

from sparsekv_cli.cpu.jit.kernel import njit
from sparsekv_cli.cpu.jit.threads import PRANGE_ONLY
from sparsekv_cli.cpu.jit.value import LANES
from sparsekv_cli.cpu.layer.activation import SILU, gate_lanes
from sparsekv_cli.cpu.layer.rows import rms_scale, rounded, widen
from sparsekv_cli.cpu.recurrent.convolution import convolution_ref
from sparsekv_cli.cpu.recurrent.groups import (
    GROUP,
    N_FACTORS,
    ROW,
    STRETCH,
    convolve,
    dots_of_groups,
    run_groups,
    softplus,
)


def mamba2_ref(
    raw: np.ndarray,
    weight: np.ndarray,
    bias: np.ndarray,
    heads: np.ndarray,
    norm: np.ndarray,
    eps: float,
    rows: np.ndarray,
    states: np.ndarray,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """numpy reference of ``mamba2``, f64, row by row; states (H, d_k, d_v).

    Returns the output and the new rows and states.
    """
    n_head, d_k, d_v = states.shape
    n_out, n_rows = n_head * d_v, len(raw)
    n_group = (weight.shape[1] - n_out) // (2 * d_k)
    z, mixed, dt = np.split(raw, [n_out, n_out + weight.shape[1]], axis=1)
    mixed, rows = convolution_ref(mixed, weight, rows)
    mixed = mixed + bias
    mixed = mixed / (1 + np.exp(-mixed))
    x, k, q = np.split(mixed, [n_out, n_out + n_group * d_k], axis=1)
    x = x.reshape(n_rows, n_head, d_v)
    k, q = (np.repeat(y.reshape(n_rows, n_group, d_k), n_head // n_group, axis=1) for y in (k, q))
    dt_bias, a, skip = heads
    dt = np.logaddexp(0, dt + dt_bias)
    out, states = np.empty_like(x), states.copy()
    for t in range(n_rows):
        states *= np.exp(a * dt[t])[:, None, None]
        states += np.einsum("h,hk,hv->hkv", dt[t], k[t], x[t])
        out[t] = np.einsum("hkv,hk->hv", states, q[t]) + skip[:, None] * x[t]
    out = out.reshape(n_rows, n_out) * z / (1 + np.exp(-z))
    if norm.size:
        parts = out.reshape(n_rows, n_group, -1)
        parts /= np.sqrt((parts**2).mean(2, keepdims=True) + eps)
        out *= norm
    return out, rows, states


@njit(cache=True, nogil=True)
def _finish_row(sums, x, z, skip, norm, eps, n_group, gate, out):
    """out (n,) = norm(silu(z) (sums + D x)); each of n_group parts has its RMS norm, if any.

    sums f32 (n rounded up to 16,), which is overwritten; x f32 (>= n,); z (n,). skip f32 (H,): D.
    Scratch: gate f32 (n rounded up to 16,).
    """
    n, d_v = out.shape[0], out.shape[0] // skip.shape[0]
    for h in range(skip.shape[0]):
        of_head, values, factor = sums[h * d_v :], x[h * d_v :], skip[h]
        for c in range(d_v):
            of_head[c] += factor * values[c]
    for c in range(n):
        gate[c] = widen(z[c])
    gate_lanes(sums, SILU, gate, sums, sums, n)
    size = n // n_group
    for g in range(n_group if norm.shape[0] else 0):
        part, weight = sums[g * size : (g + 1) * size], norm[g * size : (g + 1) * size]
        factor = rms_scale(part, eps)
        for c in range(size):
            part[c] *= factor * weight[c]
    for c in range(n):
        out[c] = rounded(out, sums[c])


@njit(cache=True, nogil=True)
def _copy_head(source, d, out):
    """Copies source f32 (n, >= d) to out (>= n, ROW)."""
    for t in range(source.shape[0]):
        row, to = source[t], out[t]
        for c in range(d):
            to[c] = row[c]


@njit(cache=True, nogil=True, parallel=PRANGE_ONLY)
def mamba2(raw, weight, bias, heads, norm, eps, rows, states, out, n_threads):
    """Computes out (T, H d_v) of T rows: convolution, state, gate and norm.

    raw (T, 2 H d_v + 2 G d_k + H): the projections z, x, B, C and dt. raw and out are both f32 or
    both bf16. weight f32 (L, H d_v + 2 G d_k), bias: the convolution. heads f32 (3, H): the bias of
    dt, A and D. norm f32 (H d_v,) or empty. rows f32 (L - 1, as wide as weight) and states (H, d_v
    / 16 rounded up, d_k, 16) are updated. d_k, d_v at most MAX_HEAD.
    """
    n_rows, n_out = out.shape
    n_head, d_k, n_mixed = states.shape[0], states.shape[2], weight.shape[1]
    d_v, n_group, most = n_out // n_head, (n_mixed - n_out) // (2 * d_k), min(STRETCH, n_rows)
    n_blocks = (n_mixed + LANES - 1) // LANES  # of channels
    shared = np.zeros((2 * n_group, most, ROW), np.float32)  # B of each group, then C
    dots = np.empty((n_group, 2, most, GROUP**2), np.float32)
    mixed = np.empty((most, n_blocks * LANES), np.float32)
    sums = np.empty((most, n_out + LANES), np.float32)
    recent = np.empty((n_threads, weight.shape[0] + 1, n_blocks * LANES), np.float32)
    values = np.zeros((n_threads, 2, most, ROW), np.float32)
    factors = np.zeros((n_threads, N_FACTORS), np.float32)
    steps = np.empty((n_threads, 2, most), np.float32)  # A dt and dt
    for start in range(0, n_rows, STRETCH):
        n = min(STRETCH, n_rows - start)
        given = raw[start : start + n]
        for part in prange(n_threads):
            first = part * n_blocks // n_threads * LANES
            last = min((part + 1) * n_blocks // n_threads * LANES, n_mixed)
            own = given[:, n_out : n_out + n_mixed]
            convolve(own, weight, bias, rows, first, last, recent[part], mixed[:n, first:])
        for part in prange(n_threads):
            for g in range(part * n_group // n_threads, (part + 1) * n_group // n_threads):
                for j in (g, n_group + g):
                    _copy_head(mixed[:n, n_out + j * d_k :], d_k, shared[j])
                dots_of_groups(n, shared[n_group + g], shared[g], d_k, dots[g, 0])
        for part in prange(n_threads):
            v, o = values[part]
            log_decay, dt = steps[part]
            for h in range(part * n_head // n_threads, (part + 1) * n_head // n_threads):
                g, at = h // (n_head // n_group), h * d_v
                _copy_head(mixed[:n, at:], d_v, v)
                for t in range(n):
                    dt[t] = softplus(widen(given[t, n_out + n_mixed + h]) + heads[0, h])
                    log_decay[t] = heads[1, h] * dt[t]
                run_groups(
                    n, log_decay, dt, shared[n_group + g], shared[g], v, o, dots[g], states[h],
                    factors[part], False,
                )  # fmt: skip
                _copy_head(o[:n], d_v, sums[:, at:])
        for part in prange(n_threads):
            for t in range(part * n // n_threads, (part + 1) * n // n_threads):
                _finish_row(
                    sums[t], mixed[t], given[t, :n_out], heads[2], norm, eps, n_group,
                    recent[part, 0], out[start + t],
                )  # fmt: skip
