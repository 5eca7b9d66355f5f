"""Routing: chooses each row's experts and their weights, and groups a chunk's rows by expert."""

import numpy as np
from numba import prange

from sparsekv_cli.cpu.jit.kernel import njit
from sparsekv_cli.cpu.jit.threads import PRANGE_ONLY
from sparsekv_cli.cpu.layer.rows import rounded, widen

CHOSEN = np.float32(-np.inf)
LEAST_SUM = np.float32(2**-14)  # the smallest normal f16, as in llama.cpp's build_moe_ffn


NO_BIAS = np.empty(0, np.float32)
ALL_GROUPS = (1, 1)  # one group, which is used


@njit(cache=True, nogil=True)
def _softmax(logits):
    """Replaces logits f32 (experts,) by their softmax."""
    largest = logits.max()
    total = np.float32(0)
    for e in range(logits.shape[0]):
        logits[e] = np.exp(logits[e] - largest)
        total += logits[e]
    for e in range(logits.shape[0]):
        logits[e] /= total


@njit(cache=True, nogil=True)
def _leave_out_groups(values, n_group, n_group_used):
    """Sets the values f32 (experts,) of all groups but the best to CHOSEN.

    A group has as many experts as each other, one after another. It counts as the sum of its two
    largest values. The first of several equal groups is used.
    """
    size = values.shape[0] // n_group
    sums = np.empty(n_group, np.float32)
    for g in range(n_group):
        first = second = CHOSEN
        for e in range(g * size, (g + 1) * size):
            if values[e] > first:
                first, second = values[e], first
            elif values[e] > second:
                second = values[e]
        sums[g] = first + second
    for _ in range(n_group - n_group_used):
        worst = n_group - 1
        while sums[worst] == np.inf:
            worst -= 1
        for g in range(worst - 1, -1, -1):
            if sums[g] < sums[worst]:
                worst = g
        sums[worst] = np.inf
        values[worst * size : (worst + 1) * size] = CHOSEN


@njit(cache=True, nogil=True)
def route_row(logits, bias, sigmoid, normalised, groups, chosen, weights):
    """Sets chosen int64 (used,) to the experts of one row, best first, and weights f32 (used,).

    logits f32 (experts,) are overwritten. Weights are the softmax of the logits, or with
    ``sigmoid`` the sigmoid of each. With a bias f32 (experts,) the best experts have the largest
    weight plus bias. The first of several equal experts is chosen. groups: the number of groups of
    experts, and how many of them are used. The best groups have the largest sum of their two best.
    """
    if sigmoid:
        for e in range(logits.shape[0]):
            logits[e] = np.float32(1) / (np.float32(1) + np.exp(-logits[e]))
    else:
        _softmax(logits)
    for e in range(bias.shape[0]):
        logits[e] += bias[e]
    if groups[1] < groups[0]:
        _leave_out_groups(logits, groups[0], groups[1])
    weight = np.float32(0)
    for j in range(chosen.shape[0]):
        best = 0
        while logits[best] == CHOSEN:
            best += 1  # the first expert that is not chosen yet, also if logits are NaN
        for e in range(best + 1, logits.shape[0]):
            if logits[e] > logits[best]:
                best = e
        chosen[j], weights[j] = best, logits[best]
        if bias.shape[0]:
            weights[j] -= bias[best]
        weight += weights[j]
        logits[best] = CHOSEN
    if normalised:
        for j in range(chosen.shape[0]):
            weights[j] /= max(weight, LEAST_SUM)


@njit(cache=True, nogil=True, parallel=PRANGE_ONLY)
def route_rows(logits, bias, sigmoid, normalised, groups, chosen, weights, n_threads):
    """Runs ``route_row`` for T rows: logits (T, experts), chosen and weights (T, used)."""
    n_rows = logits.shape[0]
    for part in prange(n_threads):
        for t in range(part * n_rows // n_threads, (part + 1) * n_rows // n_threads):
            route_row(logits[t], bias, sigmoid, normalised, groups, chosen[t], weights[t])


def route_ref(
    logits: np.ndarray,
    bias: np.ndarray,
    n_used: int,
    normalised: bool,
    sigmoid: bool = False,
    groups: tuple[int, int] = ALL_GROUPS,
) -> tuple[np.ndarray, np.ndarray]:
    """numpy reference: returns each row's experts, best first (T, used), and their weights."""
    shifted = np.exp(logits - logits.max(1, keepdims=True))
    shares = shifted / shifted.sum(1, keepdims=True)
    if sigmoid:
        shares = 1 / (1 + np.exp(-logits))
    order = -(shares + bias) if len(bias) else -shares
    of_group = np.sort(order.reshape(len(order), groups[0], -1), axis=2)[..., :2].sum(2)
    worse = np.argsort(of_group, axis=1, kind="stable")[:, groups[1] :]
    np.put_along_axis(order.reshape(len(order), groups[0], -1), worse[..., None], np.inf, axis=1)
    chosen = np.argsort(order, axis=1, kind="stable")[:, :n_used]
    weights = np.take_along_axis(shares, chosen, axis=1)
    if normalised:
        weights = weights / np.maximum(weights.sum(1, keepdims=True), LEAST_SUM)
    return chosen, weights


@njit(cache=True, nogil=True)
def group_rows(chosen, offsets, rows, places):
    """Sorts the pairs of a row and one of its experts by expert, then by row.

    chosen int64 (T, used). Results: expert e has the pairs offsets[e] <= p < offsets[e + 1].
    rows[p] is the row of a pair. places[t, j] is the pair of row t and its expert chosen[t, j].
    """
    offsets[:] = 0
    for t in range(chosen.shape[0]):
        for j in range(chosen.shape[1]):
            offsets[chosen[t, j] + 1] += 1
    for e in range(1, offsets.shape[0]):
        offsets[e] += offsets[e - 1]
    for t in range(chosen.shape[0]):
        for j in range(chosen.shape[1]):
            e = chosen[t, j]
            rows[offsets[e]], places[t, j] = t, offsets[e]
            offsets[e] += 1
    for e in range(offsets.shape[0] - 1, 0, -1):  # offsets[e] is now the end of expert e's pairs
        offsets[e] = offsets[e - 1]
    offsets[0] = 0


def group_ref(chosen: np.ndarray, n_expert: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """numpy reference of ``group_rows``: offsets, rows, places."""
    order = np.argsort(chosen.reshape(-1), kind="stable")
    places = np.empty(chosen.size, np.int64)
    places[order] = np.arange(chosen.size)
    offsets = np.searchsorted(chosen.reshape(-1)[order], np.arange(n_expert + 1))
    return offsets, order // chosen.shape[1], places.reshape(chosen.shape)


@njit(cache=True, nogil=True, parallel=PRANGE_ONLY)
def add_biases(results, offsets, biases, n_threads):
    """results[p] += biases[e] for the pairs p of expert e, see ``group_rows``.

    results (pairs, >= n), f32 or bf16; biases f32 (experts, n).
    """
    n_expert = biases.shape[0]
    for part in prange(n_threads):
        for e in range(part * n_expert // n_threads, (part + 1) * n_expert // n_threads):
            for p in range(offsets[e], offsets[e + 1]):
                for c in range(biases.shape[1]):
                    results[p, c] = rounded(results, widen(results[p, c]) + biases[e, c])


@njit(cache=True, nogil=True)
def sigmoid_product(x, weight):
    """Returns 1 / (1 + e^-(x . weight)); x, weight f32 (n,). Returns 1 if ``weight`` is empty."""
    if weight.shape[0] == 0:
        return np.float32(1)
    total = np.float32(0)
    for c in range(x.shape[0]):
        total += x[c] * weight[c]
    return np.float32(1) / (np.float32(1) + np.exp(-total))


@njit(cache=True, nogil=True, parallel=PRANGE_ONLY)
def add_weighted(results, places, weights, shared, normed, shared_gate, out, n_threads):
    """out f32 (T, n) = the sum of the results of a row's experts times their weights, best first.

    results (pairs, n), f32 or bf16; places and weights (T, used). shared (T, n), or (0, n): the
    shared expert's results. They are added last, times ``sigmoid_product`` of normed f32 (T, n) and
    shared_gate f32 (n,).
    """
    n_rows, n = out.shape
    for part in prange(n_threads):
        for t in range(part * n_rows // n_threads, (part + 1) * n_rows // n_threads):
            weigh_row(results, places[t], weights[t], out[t])
            if shared.shape[0]:
                weight = sigmoid_product(normed[t], shared_gate)
                for c in range(n):
                    out[t, c] += weight * widen(shared[t, c])


@njit(cache=True, nogil=True)
def weigh_row(results, places, weights, out):
    """out f32 (n,) = the sum of weights[j] results[places[j]], in this order."""
    out[:] = 0
    for j in range(places.shape[0]):
        result, weight = results[places[j]], weights[j]
        for c in range(out.shape[0]):
            out[c] += weight * widen(result[c])
