"""Exact selection of the k largest scores without sorting or moving them."""

from __future__ import annotations

import numpy as np
from numba import prange, types

from sparsekv_cli.cpu.jit import llvm
from sparsekv_cli.cpu.jit.emitter import LITERAL, emitter
from sparsekv_cli.cpu.jit.kernel import njit
from sparsekv_cli.cpu.jit.llvm import trailing_zeros
from sparsekv_cli.cpu.jit.threads import PRANGE_ONLY
from sparsekv_cli.cpu.jit.value import F32, I32, LANES, VI
from sparsekv_cli.cpu.vector.put import put

WORD = 64  # keys that are compared at a time
N_GUESSES = 9  # passes of a search for a threshold that may be guesses
LARGEST = np.float32(1e38)
SAMPLED_FROM, SAMPLED_SHARE = 16384, 16  # a sample is used from so many keys, for 1/16 or fewer
SAMPLE_STEP = 16  # a sample has every 16th vector of keys


@njit(cache=True, nogil=True)
def _ordered(bits):
    """Turns an f32's bits into its key of ``order_keys``, or a key into bits: by one flip."""
    return bits ^ ((bits >> np.int32(31)) & np.int32(0x7FFFFFFF))


@njit(cache=True, nogil=True)
def order_keys(scores, keys, n):
    """Writes keys[j] int32 in the order of scores[j] f32 (no NaN): a signed-magnitude flip."""
    bits = scores.view(np.int32)
    for j in range(n):
        keys[j] = _ordered(bits[j])


@njit(cache=True, nogil=True)
def count_above(keys, n, pivot):
    """Returns how many of keys[:n] int32 are above pivot."""
    count = np.int32(0)  # LLVM counts in vectors of int32
    for j in range(n):
        count = np.int32(count + np.int32(keys[j] > pivot))
    return np.int64(count)


@emitter(returns=types.int32, value=types.float32)
def bits_of(value):
    """Returns the bits of an f32 as int32."""
    return value.bitcast(I32)


@emitter(returns=types.float32, bits=types.int32)
def float_of(bits):
    """Returns the f32 with the given bits, int32."""
    return bits.bitcast(F32)


@njit(cache=True, nogil=True)
def _guess(low, high, n_low, n_high, k):
    """Returns a key in (low, high], a guess of the k-th largest key.

    n_low keys are at least low, and n_high keys are above high. A key is a score as an integer of
    ``order_keys``. The guess assumes that the square root of the number of scores above a value is
    linear in the value. This is nearly true in the upper part of a bell-shaped distribution.
    Example: scores 0 and 4 with n_low = 900, n_high = 0, k = 100 give the key of the score 2.67.

    If low or high is the key of no finite score, it returns the middle of low and high.
    """
    a, b = float_of(_ordered(np.int32(low))), float_of(_ordered(np.int32(high)))
    if not -LARGEST < a <= b < LARGEST:
        return (low + high + 1) >> 1
    root = np.sqrt(np.float64(n_low))
    share = (root - np.sqrt(np.float64(k))) / (root - np.sqrt(np.float64(n_high)))
    key = np.int64(_ordered(bits_of(np.float32(a + (b - a) * share))))
    return min(max(key, low + 1), high)


@njit(cache=True, nogil=True)
def threshold_of_largest(keys, n, k):
    """Returns a threshold for the k largest of keys[:n] int32, 1 <= k <= n.

    At most k keys are above it, and at least k keys are above it or equal to it. Keys (5, 9, 5, 2)
    and k = 2 give the threshold 5: the two largest are 9 and one of the fives.

    A pass compares all keys with one number and counts. It moves and allocates nothing. Bell-shaped
    scores need about 7 passes with guesses. Other scores need a bisection of some 16 passes, at
    most 32.
    """
    low, high = keys[0], keys[0]
    for j in range(n):
        low, high = min(low, keys[j]), max(high, keys[j])
    low, high = np.int64(low), np.int64(high)
    n_low, n_high, n_passes = n, 0, 0
    while low < high:
        middle = (low + high + 1) >> 1
        if n_passes < N_GUESSES and n_passes % 3 != 2:  # guesses may all be on the same side
            middle = _guess(low, high, n_low, n_high, k)
        n_passes += 1
        count = count_above(keys, n, np.int32(middle - 1))
        if count == k:
            return np.int32(middle - 1)
        if count > k:
            low, n_low = middle, count
        else:
            high, n_high = middle - 1, count
    return np.int32(low)


@emitter(returns=types.uint64, pivot=types.int32, equal=LITERAL)
def _compare(keys, pivot, equal):
    """Returns a u64 with bit j set where keys[j] > pivot (``equal``: == pivot). keys: address."""
    limit = pivot.splat()
    return llvm.bits_where(VI, keys, lambda x: x == limit if equal else x > limit)


@njit(cache=True, nogil=True)
def _positions_above(keys, n, threshold, ties, out):
    """Writes the positions of keys[:n] above the threshold and of the first ``ties`` equal to it.

    They are ascending. Returns their number, or len(out) + 1 if ``out`` is too small.
    """
    at, room = 0, len(out)
    whole = n - n % WORD
    for start in range(0, whole, WORD):  # if few of many are chosen, most words are empty
        address = keys.ctypes.data + 4 * start
        word = _compare(address, threshold, False)
        if ties:
            equal = _compare(address, threshold, True)
            while equal and ties:
                others = equal & (equal - np.uint64(1))
                word |= equal ^ others
                equal = others
                ties -= 1
        while word:
            if at == room:
                return room + 1
            out[at] = start + trailing_zeros(word)
            at += 1
            word &= word - np.uint64(1)
    for j in range(whole, n):
        is_tie = (keys[j] == threshold) & (ties > 0)
        if keys[j] > threshold or is_tie:
            if at == room:
                return room + 1
            out[at] = j
            at += 1
            ties -= is_tie
    return at


@njit(cache=True, nogil=True)
def _candidates(keys, n, k, out):
    """Runs ``_positions_above`` with a sample's threshold. Probably more than k keys exceed it."""
    sample = np.empty(n // (SAMPLE_STEP * LANES) * LANES, np.int32)
    for at in range(0, len(sample), LANES):
        put(sample[at : at + LANES], keys[at * SAMPLE_STEP :])
    rank = k / SAMPLE_STEP
    rank = int(rank + 4 * np.sqrt(rank)) + 2
    return _positions_above(keys, n, threshold_of_largest(sample, len(sample), rank), 0, out)


@njit(cache=True, nogil=True)
def _select(keys, n, k, out):
    threshold = threshold_of_largest(keys, n, k)
    ties = k - count_above(keys, n, threshold)
    _positions_above(keys, n, threshold, ties, out)


@njit(cache=True, nogil=True)
def select_largest(keys, n, k, out):
    """Writes out[:k], the positions of the k largest of keys[:n], ascending. The first win ties.

    If k is small, it selects among the keys above a sample's threshold, if there are enough.
    """
    if k <= 0:
        return
    if k >= n:
        for j in range(n):
            out[j] = j
        return
    if n >= SAMPLED_FROM and k <= n // SAMPLED_SHARE:
        places = np.empty(6 * k + 256, np.int32)
        count = _candidates(keys, n, k, places)
        if k <= count <= len(places):
            _select(keys[places[:count]], count, k, out)
            for i in range(k):
                out[i] = places[out[i]]
            return
    _select(keys, n, k, out)


@njit(cache=True, nogil=True, parallel=PRANGE_ONLY)
def select_rows(scores, n, n_sinks, n_recent, k, out):
    """Writes for each list the first n_sinks rows, the last n_recent and the k - n_recent best.

    scores f32 (U, >= n); out int32 (U, n_sinks + k), rows ascending except that the recent ones
    come before the best.
    """
    n_middle = n - n_sinks - n_recent
    for unit in prange(scores.shape[0]):
        keys = np.empty(n_middle, np.int32)
        order_keys(scores[unit, n_sinks : n_sinks + n_middle], keys, n_middle)
        for j in range(n_sinks):
            out[unit, j] = j
        for j in range(n_recent):
            out[unit, n_sinks + j] = n - n_recent + j
        best = out[unit, n_sinks + n_recent :]
        select_largest(keys, n_middle, k - n_recent, best)
        for j in range(k - n_recent):
            best[j] += n_sinks


def select_rows_ref(scores, n, n_sinks, n_recent, k):
    """numpy reference: returns each list's rows as one sorted array."""
    middle = np.arange(n_sinks, n - n_recent)
    rows = []
    for row in scores:
        best = middle[np.argsort(-row[middle], kind="stable")[: k - n_recent]]
        forced = np.concatenate([np.arange(n_sinks), np.arange(n - n_recent, n)])
        rows.append(np.sort(np.concatenate([forced, best])))
    return np.stack(rows)
