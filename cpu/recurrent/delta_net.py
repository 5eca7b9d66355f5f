"""The gated delta net: each head has a state matrix, which each row decays and corrects.

Source: "Gated Delta Networks: Improving Mamba2 with Delta Rule" (Yang et al., arXiv:2412.06464):

    S_t = a_t S_{t-1} + k_t d_t^T,   d_t = beta_t (v_t - a_t S_{t-1}^T k_t),   o_t = S_t^T q_t

with a_t = exp(A softplus(alpha_t + dt)), beta_t = sigmoid(beta_t), q and k of length 1 (q times
d^-1/2). q, k and v come from a causal convolution with SiLU. o_t gets an RMS norm and the gate
silu(z_t). Many rows are computed in groups. With G_c = a_1 ... a_c, within a group

    d_c = beta_c (v_c - G_c S_0^T k_c - sum_{s<c} (G_c / G_s) (k_c . k_s) d_s)
    o_c = G_c S_0^T q_c + sum_{s<=c} (G_c / G_s) (q_c . k_s) d_s
    S   = G_C S_0 + sum_s (G_C / G_s) k_s d_s^T

so that the state is read and written once a group. 16 columns of the state stay in L1, the sums of
a group in registers. Value head h uses key head h % n_k, or with ``grouped`` h // (n_v / n_k).
"""

from typing import Any

import numpy as np
from llvmlite import ir
from numba import prange, types
from numba.extending import intrinsic

from sparsekv_cli.cpu.jit import llvm
from sparsekv_cli.cpu.jit.kernel import njit
from sparsekv_cli.cpu.jit.llvm import F32, I64, LANES, VF, const, load, splat, sum_squares
from sparsekv_cli.cpu.jit.threads import PRANGE_ONLY
from sparsekv_cli.cpu.layer.activation import SILU, gate_lanes
from sparsekv_cli.cpu.layer.prefill import rounded, widen
from sparsekv_cli.cpu.recurrent import MAX_HEAD
from sparsekv_cli.cpu.recurrent.convolution import convolution_ref

ROW = MAX_HEAD + LANES  # floats from a row of scratch to the next; no power of two, for L1's sets
STRETCH = 64  # rows for which the steps of a head are run at a time
# Rows of a group. A row has two sums and a correction; AVX-512's 32 registers hold those of eight.
GROUP = 8 if llvm.has_feature("avx512f") else 2


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


def _group_codegen(n: int) -> Any:
    """Returns the IR of a group of n rows on all columns of a head; see ``_group_of``."""

    def codegen(context, b, signature, args):
        state, n_blocks, n_keys, q, k, v, out, factors = args

        def factor(place: int) -> ir.Value:
            return splat(b, load(b, F32, factors, 4 * place))

        def element(rows: ir.Value, at: ir.Value, c: int) -> ir.Value:
            return splat(b, load(b, F32, b.add(rows, at), 4 * ROW * c))

        def block(j, carried):
            columns = b.add(state, b.mul(j, b.mul(n_keys, I64(4 * LANES))))
            lanes = b.mul(j, I64(4 * LANES))

            def products(i, sums):
                row = load(b, VF, b.add(columns, b.mul(i, I64(4 * LANES))))
                at = b.mul(i, I64(4))
                new = [llvm.fma(b, element(k, at, c), row, sums[c]) for c in range(n)]
                return new + [llvm.fma(b, element(q, at, c), row, sums[n + c]) for c in range(n)]

            zeros = [const(F32, 0.0)] * (2 * n)
            sums = llvm.loop(b, I64(0), n_keys, 1, zeros, products)
            deltas: list[ir.Value] = []
            for c in range(n):
                decay, pairs = factor(c), 3 * n + c * n
                seen = b.fmul(decay, sums[c])
                for s in range(c):
                    seen = llvm.fma(b, factor(pairs + s), deltas[s], seen)
                value = load(b, VF, b.add(v, lanes), 4 * ROW * c)
                deltas.append(b.fmul(factor(n + c), b.fsub(value, seen)))
                result = b.fmul(decay, sums[n + c])
                for s in range(c + 1):
                    result = llvm.fma(b, factor(n * n + pairs + s), deltas[s], result)
                llvm.store(b, result, b.add(out, lanes), 4 * ROW * c)
            weights = [b.fmul(factor(2 * n + s), deltas[s]) for s in range(n)]
            decay = factor(n - 1)

            def update(i, carried):
                place = b.add(columns, b.mul(i, I64(4 * LANES)))
                row, at = b.fmul(load(b, VF, place), decay), b.mul(i, I64(4))
                for s in range(n):
                    row = llvm.fma(b, element(k, at, s), weights[s], row)
                llvm.store(b, row, place)
                return []

            llvm.loop(b, I64(0), n_keys, 1, [], update)
            return []

        llvm.loop(b, I64(0), n_blocks, 1, [], block)
        return context.get_dummy_value()

    return codegen


def _group_of(n: int) -> Any:
    """Returns an intrinsic that runs the delta rule on n rows of one head.

    It takes (state, n_blocks, n_keys, q, k, v, out, factors), addresses of f32. state (n_blocks,
    n_keys, 16) is read and written. Rows of q, k, v and out are ROW floats apart. factors: from
    ``_group_factors``.
    """

    @intrinsic
    def group(typingctx, state, n_blocks, n_keys, q, k, v, out, factors):
        return types.void(*[types.int64] * 8), _group_codegen(n)

    return group


_rule_of_group = _group_of(GROUP)
_rule_of_one = _group_of(1)


@intrinsic
def _dot(typingctx, x, y, count):
    """Returns x . y of f32 at addresses; count: a multiple of 16."""

    def codegen(context, b, signature, args):
        def body(j, sums):
            at = b.mul(j, I64(4))
            lanes = load(b, VF, b.add(args[0], at)), load(b, VF, b.add(args[1], at))
            return [llvm.fma(b, *lanes, sums[0])]

        return llvm.sum_lanes(b, llvm.loop(b, I64(0), args[2], LANES, [const(F32, 0.0)], body)[0])

    return types.float32(*[types.int64] * 3), codegen


@njit(cache=True, nogil=True)
def _group_factors(n, log_decay, beta, q, k, width, factors):
    """Sets the factors of a group of n rows: G_c, beta_c and G_n / G_s (n each), two matrices.

    The matrices (n, n) are (G_c / G_s) (k_c . k_s) for s < c and (G_c / G_s) (q_c . k_s) for
    s <= c. q, k: addresses of rows of ``width`` elements, a multiple of 16, ROW floats apart.
    """
    total = np.float32(1)
    for c in range(n):
        decay = np.exp(log_decay[c])
        total *= decay
        factors[c], factors[n + c] = total, beta[c]
        for s in range(c):
            factors[2 * n + s] *= decay
        factors[2 * n + c] = 1
        pairs, row = 3 * n + c * n, 4 * ROW * c
        for s in range(c + 1):
            ratio, other = factors[2 * n + s], k + 4 * ROW * s
            if s < c:
                factors[pairs + s] = ratio * _dot(k + row, other, width)
            factors[n * n + pairs + s] = ratio * _dot(q + row, other, width)


@njit(cache=True, nogil=True)
def _convolved_head(raw, start, n_rows, first, d, weight, rows, recent, out):
    """Writes silu(conv(raw)) of one head's d channels, from ``first`` on, to out (>= n_rows, ROW).

    rows f32 (L - 1, channels): the rows before row ``start``; set to the last rows. Scratch: recent
    f32 (L - 1 + rows, ROW).
    """
    before, last = rows.shape[0], first + d
    for j in range(before):
        for c in range(d):
            recent[j, c] = rows[j, first + c]
    for t in range(n_rows):
        source, target = raw[start + t, first:last], recent[before + t]
        for c in range(d):
            target[c] = widen(source[c])
    for t in range(n_rows):
        total, row, factor = out[t], recent[t + before], weight[before, first:last]
        for c in range(d):
            total[c] = factor[c] * row[c]
        for j in range(before):
            row, factor = recent[t + j], weight[j, first:last]
            for c in range(d):
                total[c] += factor[c] * row[c]
    for j in range(before):
        for c in range(d):
            rows[j, first + c] = recent[n_rows + j, c]
    recent[0] = np.float32(1)
    for t in range(n_rows):
        at = out[t].ctypes.data
        gate_lanes(out, SILU, at, recent[0].ctypes.data, at, d)


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
    factor = np.float32(1) / np.sqrt(sum_squares(x[:d]) / np.float32(d) + eps)
    for c in range(d):
        x[c] *= factor * norm[c]
        gate[c] = widen(z[c])
    gate_lanes(x, SILU, gate.ctypes.data, x.ctypes.data, x.ctypes.data, d)
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
    n_blocks, d_k, n_qkv = states.shape[1], states.shape[2], weight.shape[1]
    n_k = (n_qkv - n_v * d_v) // (2 * d_k)
    width = (d_k + LANES - 1) // LANES * LANES
    one, most = np.float32(1), min(STRETCH, n_rows)
    for part in prange(n_threads):
        q, k, v, o = np.zeros((4, most, ROW), np.float32)
        recent = np.zeros((rows.shape[0] + most, ROW), np.float32)
        factors = np.zeros(3 * GROUP + 2 * GROUP * GROUP, np.float32)
        log_decay, beta = np.empty(most, np.float32), np.empty(most, np.float32)
        for key_head in range(part * n_k // n_threads, (part + 1) * n_k // n_threads):
            for start in range(0, n_rows, STRETCH):
                n = min(STRETCH, n_rows - start)
                at = key_head * d_k
                _convolved_head(raw, start, n, at, d_k, weight, rows, recent, q)
                _unit(q, n, d_k, eps, one / np.sqrt(np.float32(d_k)))
                at += n_k * d_k
                _convolved_head(raw, start, n, at, d_k, weight, rows, recent, k)
                _unit(k, n, d_k, eps, one)
                for j in range(n_v // n_k):
                    h = key_head * (n_v // n_k) + j if grouped else key_head + j * n_k
                    at = 2 * n_k * d_k + h * d_v
                    _convolved_head(raw, start, n, at, d_v, weight, rows, recent, v)
                    for t in range(n):
                        x = widen(gates[start + t, n_v + h]) + dt[h]
                        log_decay[t] = a[h] * (x if x > 20 else np.log1p(np.exp(x)))
                        y = widen(gates[start + t, h])
                        beta[t] = one / (one + np.exp(-y))
                    state, t = states[h].ctypes.data, 0
                    while t < n:
                        size = GROUP if n - t >= GROUP else 1
                        places = (
                            q[t].ctypes.data, k[t].ctypes.data, v[t].ctypes.data, o[t].ctypes.data
                        )  # fmt: skip
                        _group_factors(
                            size, log_decay[t:], beta[t:], places[0], places[1], width, factors
                        )  # fmt: skip
                        if size == 1:
                            _rule_of_one(state, n_blocks, d_k, *places, factors.ctypes.data)
                        else:
                            _rule_of_group(state, n_blocks, d_k, *places, factors.ctypes.data)
                        t += size
                    for t in range(n):
                        z = raw[start + t, n_qkv + h * d_v : n_qkv + (h + 1) * d_v]
                        to = out[start + t, h * d_v : (h + 1) * d_v]
                        _gated_norm(o[t], z, norm, eps, recent[0], to)
        llvm.keep(q)
        llvm.keep(factors)
