"""Which experts a row takes, with which weights, and a chunk's rows grouped by expert."""

import numpy as np
from numba import njit, prange

from sparsekv_cli.cpu.jit.threads import PRANGE_ONLY
from sparsekv_cli.cpu.layer.prefill import rounded, widen

CHOSEN = np.float32(-np.inf)
LEAST_SUM = np.float32(2**-14)  # the smallest normal f16, as in llama.cpp's build_moe_ffn


NO_BIAS = np.empty(0, np.float32)


@njit(cache=True, nogil=True)
def _softmax(logits):
    """logits f32 (experts,) become the shares of their softmax."""
    largest = logits.max()
    total = np.float32(0)
    for e in range(logits.shape[0]):
        logits[e] = np.exp(logits[e] - largest)
        total += logits[e]
    for e in range(logits.shape[0]):
        logits[e] /= total


@njit(cache=True, nogil=True)
def route_row(logits, bias, normalised, chosen, weights):
    """The experts of one row, best first, in chosen int64 (used,), and their weights f32 (used,).

    logits f32 (experts,) are overwritten; weights are the shares of their softmax. With a bias f32
    (experts,) they are the sigmoids instead, and the best are those of the largest sigmoid plus
    bias. The first of several equal experts is chosen.
    """
    if bias.shape[0]:
        for e in range(logits.shape[0]):
            logits[e] = np.float32(1) / (np.float32(1) + np.exp(-logits[e])) + bias[e]
    else:
        _softmax(logits)
    weight = np.float32(0)
    for j in range(chosen.shape[0]):
        best = 0
        while logits[best] == CHOSEN:
            best += 1  # stays among those that are not chosen, whatever is no number
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
def route_rows(logits, bias, normalised, chosen, weights, n_threads):
    """``route_row`` of each of T rows: logits (T, experts), chosen and weights (T, used)."""
    n_rows = logits.shape[0]
    for part in prange(n_threads):
        for t in range(part * n_rows // n_threads, (part + 1) * n_rows // n_threads):
            route_row(logits[t], bias, normalised, chosen[t], weights[t])


def route_ref(
    logits: np.ndarray, bias: np.ndarray, n_used: int, normalised: bool
) -> tuple[np.ndarray, np.ndarray]:
    """numpy reference: the experts of each row, best first (T, used), and their weights f32."""
    shifted = np.exp(logits - logits.max(1, keepdims=True))
    shares = shifted / shifted.sum(1, keepdims=True)
    if len(bias):
        shares = 1 / (1 + np.exp(-logits))
    order = -(shares + bias) if len(bias) else -shares
    chosen = np.argsort(order, axis=1, kind="stable")[:, :n_used]
    weights = np.take_along_axis(shares, chosen, axis=1)
    if normalised:
        weights = weights / np.maximum(weights.sum(1, keepdims=True), LEAST_SUM)
    return chosen, weights


@njit(cache=True, nogil=True)
def group_rows(chosen, offsets, rows, places):
    """Pairs of a row and an expert of it, in the order of the experts, then of the rows.

    chosen int64 (T, used). Results: expert e has the pairs offsets[e] <= p < offsets[e + 1].
    rows[p] is the row of a pair. places[t, j] is the pair of row t and its expert j.
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
    for e in range(offsets.shape[0] - 1, 0, -1):  # each is where its expert ends
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
    """results[p] += biases[e] for expert e's pairs p, grouped as above.

    results (pairs, n), f32 or bf16; biases f32 (experts, n).
    """
    n_expert = biases.shape[0]
    for part in prange(n_threads):
        for e in range(part * n_expert // n_threads, (part + 1) * n_expert // n_threads):
            for p in range(offsets[e], offsets[e + 1]):
                for c in range(results.shape[1]):
                    results[p, c] = rounded(results, widen(results[p, c]) + biases[e, c])


@njit(cache=True, nogil=True)
def sigmoid_product(x, weight):
    """1 / (1 + e^-(x . weight)), f32 (n,); 1 without a weight."""
    if weight.shape[0] == 0:
        return np.float32(1)
    total = np.float32(0)
    for c in range(x.shape[0]):
        total += x[c] * weight[c]
    return np.float32(1) / (np.float32(1) + np.exp(-total))


@njit(cache=True, nogil=True, parallel=PRANGE_ONLY)
def add_weighted(results, places, weights, shared, normed, shared_gate, out, n_threads):
    """out f32 (T, n) = the results of a row's experts times their weights, best first.

    results (pairs, n), f32 or bf16; places and weights (T, used). shared (T, n), or (0, n): what
    is added last, times ``sigmoid_product`` of normed f32 (T, n) and shared_gate f32 (n,).
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
