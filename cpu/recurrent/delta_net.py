"""The gated delta net: each head has a state matrix, which each row decays and corrects.

Source: "Gated Delta Networks: Improving Mamba2 with Delta Rule" (Yang et al., arXiv:2412.06464):

    S_t = a_t S_{t-1} + k_t d_t^T,   d_t = beta_t (v_t - a_t S_{t-1}^T k_t),   o_t = S_t^T q_t

with a_t = exp(A softplus(alpha_t + dt)), beta_t = sigmoid(beta_t), q and k of length 1 (q times
d^-1/2). q, k and v come from a causal convolution with SiLU. o_t gets an RMS norm and the gate
silu(z_t). Many rows are computed in groups (groups.py). Value head h uses key head h % n_k, or with
``grouped`` h // (n_v / n_k).
"""

import numpy as np
from numba import prange

from sparsekv_cli.cpu.jit.kernel import njit
from sparsekv_cli.cpu.jit.llvm import sum_squares
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


def delta_rule_ref(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    log_decay: np.ndarray,
    beta: np.ndarray,
    state: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    """numpy reference of one head, row by row: returns o (T, d_v) and the new state (d_k, d_v)."""
    out = []
    for t in range(len(q)):
        state = np.exp(log_decay[t]) * state
        state = state + np.outer(k[t], beta[t] * (v[t] - state.T @ k[t]))
        out.append(state.T @ q[t])
    return np.stack(out), state


def delta_net_ref(
    raw: np.ndarray,
    gates: np.ndarray,
    weight: np.ndarray,
    dt: np.ndarray,
    a: np.ndarray,
    norm: np.ndarray,
    eps: float,
    grouped: bool,
    rows: np.ndarray,
    states: np.ndarray,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """numpy reference of ``delta_net``, f64; states (n_v, d_k, d_v).

    Returns the output and the new rows and states.
    """
    n_v, d_k, d_v = states.shape
    n_k = (weight.shape[1] - n_v * d_v) // (2 * d_k)
    n_qkv = weight.shape[1]
    mixed, z = np.split(raw, [n_qkv], axis=1)
    beta, alpha = np.split(gates, 2, axis=1)
    mixed, rows = convolution_ref(mixed, weight, rows)
    mixed = mixed / (1 + np.exp(-mixed))
    q, k, v = np.split(mixed, np.cumsum([n_k * d_k] * 2), axis=1)
    q, k = (x.reshape(len(raw), n_k, d_k) for x in (q, k))
    q, k = (x / np.sqrt((x**2).sum(2, keepdims=True) + eps) for x in (q, k))
    q, v, z = q * d_k**-0.5, v.reshape(-1, n_v, d_v), z.reshape(-1, n_v, d_v)
    log_decay = a * np.logaddexp(0, alpha + dt)
    beta = 1 / (1 + np.exp(-beta))
    out = np.empty_like(v)
    states = states.copy()
    for h in range(n_v):
        g = h // (n_v // n_k) if grouped else h % n_k
        o, states[h] = delta_rule_ref(
            q[:, g], k[:, g], v[:, h], log_decay[:, h], beta[:, h], states[h]
        )
        o = o / np.sqrt((o**2).mean(1, keepdims=True) + eps) * norm
        out[:, h] = o * z[:, h] / (1 + np.exp(-z[:, h]))
    return out.reshape(len(raw), -1), rows, states


@njit(cache=True, nogil=True)
def _unit(x, n_rows, d, eps, scale):
    """Scales the rows x[:n_rows, :d] to length ``scale``. The padding of d to 16 becomes 0."""
    for t in range(n_rows):
        row = x[t]
        factor = scale / np.sqrt(sum_squares(row[:d]) + eps)
        for c in range(d):
            row[c] *= factor
        for c in range(d, (d + LANES - 1) // LANES * LANES):
            row[c] = 0


@njit(cache=True, nogil=True)
def _gated_norm(x, z, norm, eps, gate, out):
    """out (d,) = norm(x) * silu(z); x f32 (ROW,), which is overwritten; gate: scratch (ROW,)."""
    d = norm.shape[0]
    factor = rms_scale(x[:d], eps)
    for c in range(d):
        x[c] *= factor * norm[c]
        gate[c] = widen(z[c])
    gate_lanes(x, SILU, gate, x, x, d)
    for c in range(d):
        out[c] = rounded(out, x[c])


@njit(cache=True, nogil=True, parallel=PRANGE_ONLY)
def delta_net(raw, gates, weight, dt, a, norm, eps, grouped, rows, states, out, n_threads):
    """Computes out (T, n_v d_v) of T rows: convolution, delta rule, norm and gate.

    raw (T, 2 n_k d_k + 2 n_v d_v): the projections q, k, v and z. gates (T, 2 n_v): those of beta
    and alpha. raw, gates and out are all f32 or all bf16. weight f32 (L, 2 n_k d_k + n_v d_v): the
    convolution; dt, a (n_v,), a below 0; norm (d_v,). grouped: whether adjacent value heads use one
    key head. rows f32 (L - 1, as wide as weight) and states (n_v, d_v / 16 rounded up, d_k, 16) are
    updated. d_k, d_v at most MAX_HEAD.
    """
    n_rows, n_v, d_v = raw.shape[0], states.shape[0], norm.shape[0]
    d_k, n_qkv = states.shape[2], weight.shape[1]
    n_k = (n_qkv - n_v * d_v) // (2 * d_k)
    one, most = np.float32(1), min(STRETCH, n_rows)
    for part in prange(n_threads):
        q, k, v, o = np.zeros((4, most, ROW), np.float32)
        recent, none = np.zeros((rows.shape[0] + 2, ROW), np.float32), norm[:0]
        factors, dots = np.zeros(N_FACTORS, np.float32), np.empty((2, most, GROUP**2), np.float32)
        log_decay, beta = np.empty((2, most), np.float32)
        for key_head in range(part * n_k // n_threads, (part + 1) * n_k // n_threads):
            for start in range(0, n_rows, STRETCH):
                n = min(STRETCH, n_rows - start)
                given, at = raw[start : start + n], key_head * d_k
                convolve(given, weight, none, rows, at, at + d_k, recent, q[:n])
                _unit(q, n, d_k, eps, one / np.sqrt(np.float32(d_k)))
                at += n_k * d_k
                convolve(given, weight, none, rows, at, at + d_k, recent, k[:n])
                _unit(k, n, d_k, eps, one)
                dots_of_groups(n, q, k, d_k, dots[0])
                dots_of_groups(n, k, k, d_k, dots[1])
                for j in range(n_v // n_k):
                    h = key_head * (n_v // n_k) + j if grouped else key_head + j * n_k
                    at = 2 * n_k * d_k + h * d_v
                    convolve(given, weight, none, rows, at, at + d_v, recent, v[:n])
                    for t in range(n):
                        log_decay[t] = a[h] * softplus(widen(gates[start + t, n_v + h]) + dt[h])
                        y = widen(gates[start + t, h])
                        beta[t] = one / (one + np.exp(-y))
                    run_groups(n, log_decay, beta, q, k, v, o, dots, states[h], factors, True)
                    for t in range(n):
                        z = raw[start + t, n_qkv + h * d_v : n_qkv + (h + 1) * d_v]
                        to = out[start + t, h * d_v : (h + 1) * d_v]
                        _gated_norm(o[t], z, norm, eps, recent[0], to)
