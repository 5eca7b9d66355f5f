"""Rows of a recurrent layer in groups: a state matrix is read and written once a group.

The delta net and Mamba-2 share these parts. A head has a state S (d_k, d_v). A row c has a query
q_c, a key k_c and a value v_c. With G_c = a_1 ... a_c, the decays of the group's rows until c:

    o_c = G_c S_0^T q_c + sum_{s<=c} (G_c / G_s) (q_c . k_s) d_s
    S   = G_C S_0 + sum_s (G_C / G_s) k_s d_s^T

In Mamba-2 d_c = beta_c v_c. The delta rule also corrects what the state has for the key:

    d_c = beta_c (v_c - G_c S_0^T k_c - sum_{s<c} (G_c / G_s) (k_c . k_s) d_s)

16 columns of the state stay in L1, the sums of a group in registers.
"""

import numpy as np

from sparsekv_cli.cpu.jit import llvm
from sparsekv_cli.cpu.jit.emitter import emitter
from sparsekv_cli.cpu.jit.kernel import njit
from sparsekv_cli.cpu.jit.value import F32, LANES, VF, Value, const, load, store
from sparsekv_cli.cpu.layer.activation import SILU, gate_lanes
from sparsekv_cli.cpu.layer.rows import widen
from sparsekv_cli.cpu.recurrent import MAX_HEAD

ROW = MAX_HEAD + LANES  # floats from a row of scratch to the next; no power of two, for L1's sets
STRETCH = 64  # rows for which the steps of a head are run at a time
# Rows of a group. A row has two sums and a correction; AVX-512's 32 registers hold those of eight.
GROUP = 8 if llvm.has_feature("avx512f") else 2
N_FACTORS = 3 * GROUP + 2 * GROUP**2


@emitter(n=(1, GROUP), corrects=(0, 1))
def _run_group(n, corrects, state, n_blocks, n_keys, q, k, v, out, factors):
    """Runs n rows of one head on all its columns; addresses of f32.

    corrects: by the delta rule. state (n_blocks, n_keys, 16) is read and written. Rows of q, k, v
    and out are ROW floats apart. factors: from ``_group_factors``.
    """

    def factor(place: int) -> Value:
        return load(F32, factors, 4 * place).splat()

    def element(rows: Value, at: Value, c: int) -> Value:
        return load(F32, rows + at, 4 * ROW * c).splat()

    @llvm.every(n_blocks)
    def block(j):
        columns = state + j * (n_keys * (4 * LANES))
        lanes = j * (4 * LANES)

        def products(i, sums):
            row = load(VF, columns + i * (4 * LANES))
            at = i * 4
            pairs = [(rows, c) for rows in ((q, k) if corrects else (q,)) for c in range(n)]
            return [element(rows, at, c).fma(row, sums[j]) for j, (rows, c) in enumerate(pairs)]

        zeros = [const(F32, 0.0)] * (2 * n if corrects else n)
        sums = llvm.loop(0, n_keys, 1, zeros, products)
        deltas: list[Value] = []
        for c in range(n):
            decay, pairs = factor(c), 3 * n + c * n
            value = load(VF, v + lanes, 4 * ROW * c)
            if corrects:
                seen = decay * sums[n + c]
                for s in range(c):
                    seen = factor(pairs + s).fma(deltas[s], seen)
                value = value - seen
            deltas.append(factor(n + c) * value)
            result = decay * sums[c]
            for s in range(c + 1):
                result = factor(n * n + pairs + s).fma(deltas[s], result)
            store(result, out + lanes, 4 * ROW * c)
        weights = [factor(2 * n + s) * deltas[s] for s in range(n)]
        decay = factor(n - 1)

        @llvm.every(n_keys)
        def update(i):
            place = columns + i * (4 * LANES)
            row, at = load(VF, place) * decay, i * 4
            for s in range(n):
                row = element(k, at, s).fma(weights[s], row)
            store(row, place)


@njit(cache=True, nogil=True)
def softplus(x):
    """Returns log(1 + exp(x)); x itself above 20."""
    return x if x > 20 else np.log1p(np.exp(x))


@njit(cache=True, nogil=True)
def dots_of_groups(n, x, y, d, dots):
    """Sets dots[t, size c + s] = x_{t+c} . y_{t+s}, s <= c < size, for the groups of n rows.

    x, y f32 (>= n, ROW), whose first d elements are followed by zeros. t: the first row of a group.
    """
    width, t = (d + LANES - 1) // LANES * LANES, 0
    while t < n:
        size = GROUP if n - t >= GROUP else 1
        for c in range(size):
            for s in range(c + 1):
                dots[t, size * c + s] = llvm.dot_product(x[t + c], y[t + s], width)
        t += size


@njit(cache=True, nogil=True)
def _group_factors(n, log_decay, beta, of_queries, of_keys, factors):
    """Sets the factors of a group of n rows: G_c, beta_c and G_n / G_s (n each), two matrices.

    The matrices (n, n) are (G_c / G_s) (k_c . k_s) for s < c and (G_c / G_s) (q_c . k_s) for
    s <= c. of_queries, of_keys: the products q_c . k_s and k_c . k_s, from ``dots_of_groups``.
    """
    total = np.float32(1)
    for c in range(n):
        decay = np.exp(log_decay[c])
        total *= decay
        factors[c], factors[n + c] = total, beta[c]
        for s in range(c):
            factors[2 * n + s] *= decay
        factors[2 * n + c] = 1
        for s in range(c + 1):
            ratio, at = factors[2 * n + s], n * c + s
            factors[3 * n + at] = ratio * of_keys[at]
            factors[n * n + 3 * n + at] = ratio * of_queries[at]


@njit(cache=True, nogil=True)
def run_groups(n, log_decay, beta, q, k, v, out, dots, state, factors, corrects):
    """Sets out = S^T q of n rows of a head, and advances its state. corrects: by the delta rule.

    q, k, v, out f32 (>= n, ROW). log_decay, beta f32 (>= n,). dots f32 (2, >= n, GROUP^2): q . k
    and k . k, from ``dots_of_groups``. Without ``corrects`` k . k is not used. state f32 (n_blocks,
    d_k, 16). Scratch: factors f32 (N_FACTORS,).
    """
    (n_blocks, d_k, _), t = state.shape, 0
    while t < n:
        size = GROUP if n - t >= GROUP else 1
        _group_factors(size, log_decay[t:], beta[t:], dots[0, t], dots[1, t], factors)
        _run_group(size, corrects, state, n_blocks, d_k, q[t], k[t], v[t], out[t], factors)
        t += size


@njit(cache=True, nogil=True)
def convolve(mixed, weight, bias, rows, first, last, recent, out):
    """out = silu(conv(mixed[:, first:last]) + bias) for n rows; bias: of all channels, or empty.

    It also sets channels of out up to a multiple of 16. mixed (n, channels): f32 or bf16. rows f32
    (L - 1, channels): the rows before; set to the last rows. out f32 (n, >= last - first rounded up
    to 16). Scratch: recent f32 (L + 1, as wide as out), a ring in which row t is at t % L, and a
    row for ones.
    """
    n_rows, before, width = out.shape[0], rows.shape[0], last - first
    length, ones = before + 1, recent[before + 1]
    ones[:] = 1
    for j in range(before):
        for c in range(width):
            recent[j, c] = rows[j, first + c]
    for t in range(n_rows):
        new, source, total = recent[(t + before) % length], mixed[t, first:last], out[t]
        factor, start = weight[before, first:last], bias[first:last]
        for c in range(width):
            new[c] = widen(source[c])
            total[c] = factor[c] * new[c]
        for c in range(len(start)):
            total[c] += start[c]
        for j in range(before):
            row, factor = recent[(t + j) % length], weight[j, first:last]
            for c in range(width):
                total[c] += factor[c] * row[c]
        gate_lanes(out, SILU, total, ones, total, width)
    for j in range(before):
        row = recent[(n_rows + j) % length]
        for c in range(width):
            rows[j, first + c] = row[c]
