"""The history tables of LFPS: entries, thresholds and candidates.

A query head has two tables: ``ver[i]`` by position and ``dist[delta]`` by distance, both f32. An
entry is u = Phi / g. So the decay of eq 10 is one multiplication of g a step. Power sums S1..S4
(f64) give the thresholds of eq 8. Each block of 64 entries has an upper bound. A write raises the
bound, and a scan of the block makes it exact.

A step reads the bounds, the blocks that hold a candidate, and the candidates (lfps/search.py), but
not the whole context. sparsekv_cli/methods/naive/lfps.py is the naive form of a step.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from llvmlite import ir
from numba import types

from sparsekv_cli.cpu.attention.softmax import max_of
from sparsekv_cli.cpu.jit import llvm
from sparsekv_cli.cpu.jit.emitter import emitter
from sparsekv_cli.cpu.jit.kernel import njit
from sparsekv_cli.cpu.jit.llvm import prefetch_lines, reversed_bits, set_bits, trailing_zeros
from sparsekv_cli.cpu.jit.pointers import grown
from sparsekv_cli.cpu.jit.value import F32, VF, const, load, vec
from sparsekv_cli.cpu.vector.declared import f32, f64

SINKS = 4
BLOCK = 64  # table entries under one bound: one word of the candidate bitmap
POWERS = 8  # entries whose powers are computed at a time
AT_ONCE = 8  # set bits that are extracted without a branch
RESCALE_BELOW = 1e-6  # smallest g before the tables are multiplied out


class Tables(NamedTuple):
    """The history of H query heads."""

    ver: np.ndarray = f32("n_head", "n_entries")
    dist: np.ndarray = f32("n_head", "n_entries")
    ver_bounds: np.ndarray = f32("n_head", "n_blocks")  # of 64 entries each
    dist_bounds: np.ndarray = f32("n_head", "n_blocks")
    sums: np.ndarray = f64("n_head", 2, 4)  # power sums of ver and dist
    gain: np.ndarray = f64("n_head")

    def with_room(self, capacity: int) -> Tables:
        """Returns tables of ``capacity`` entries in whole blocks. New entries are 0."""
        n_blocks = -(-capacity // BLOCK)
        if n_blocks == self.ver_bounds.shape[1]:
            return self
        sizes = [n_blocks * BLOCK] * 2 + [n_blocks] * 2
        ver, dist, *bounds = (grown(old, 1, n) for old, n in zip(self[:4], sizes, strict=True))
        return Tables(ver, dist, bounds[0], bounds[1], self.sums, self.gain)


@njit(cache=True, nogil=True)
def threshold(sums, n, a, horizon):
    """Returns tau = a mean / kappa of a table from its power sums (eq 8), kappa in [1/n, 1].

    The mean is the sum divided by n, or by ``horizon`` if that is less. Otherwise a table with more
    zeros and the same other entries would have a lower threshold.
    """
    mean = sums[0] / n
    m2 = sums[1] - n * mean * mean
    m4 = sums[3] - 4 * mean * sums[2] + 6 * mean * mean * sums[1] - 3 * n * mean**4
    kappa = 1.0 / n
    if m2 > 1e-12 * sums[1]:
        kappa = min(1.0, max(1.0 / n, m4 / (m2 * m2)))
    return a * sums[0] / min(n, horizon) / kappa


@emitter(returns=types.uint64, tau=types.float32)
def _mask_above(entries, tau):
    """Returns a u64 with bit j set where entries[j] > tau, j < 64. entries: address of f32."""
    limit = tau.splat()
    return llvm.bits_where(VF, entries, lambda x: x > limit)


@njit(cache=True, nogil=True)
def _scan_block(table, bounds, block, count, tau):
    """Returns the bits of a block's entries above tau; makes its bound exact. count: of a table."""
    start = block * BLOCK
    if start + BLOCK <= count:
        at = table.ctypes.data + 4 * start
        bounds[block] = max_of(at, BLOCK)
        return _mask_above(at, tau)
    word = np.uint64(0)
    peak = table[start]
    for i in range(start, count):
        peak = max(peak, table[i])
        word |= np.uint64(table[i] > tau) << np.uint64(i - start)
    bounds[block] = peak
    return word


@njit(cache=True, nogil=True)
def _blocks_above(bounds, first, n_blocks, tau):
    """Returns a u64 with bit b set where bounds[first + b] > tau, for at most 64 blocks."""
    if first + BLOCK <= n_blocks:
        return _mask_above(bounds.ctypes.data + 4 * first, tau)
    word = np.uint64(0)
    for block in range(first, n_blocks):
        word |= np.uint64(bounds[block] > tau) << np.uint64(block - first)
    return word


@njit(cache=True, nogil=True)
def prefetch_above(table, bounds, n, tau):
    """Prefetches the blocks of a table that may have an entry above tau among the first n entries.

    A block of 64 entries may have one if its bound exceeds tau. table f32 (>= n,); bounds f32, one
    a block.
    """
    n_blocks = (n + BLOCK - 1) // BLOCK
    for first in range(0, n_blocks, BLOCK):
        found = _blocks_above(bounds, first, n_blocks, np.float32(tau))
        while found:
            block = first + trailing_zeros(found)
            found &= found - np.uint64(1)
            prefetch_lines(table.ctypes.data + 4 * BLOCK * block, 4 * BLOCK)


@njit(cache=True, nogil=True)
def mark_vertical(table, bounds, n, tau, words):
    """Sets bit i of ``words`` where table[i] > tau; returns the number of entries read."""
    tau = np.float32(tau)
    n_read, n_blocks = 0, (n + BLOCK - 1) // BLOCK
    for first in range(0, n_blocks, BLOCK):
        found = _blocks_above(bounds, first, n_blocks, tau)
        while found:
            block = first + trailing_zeros(found)
            found &= found - np.uint64(1)
            words[block] |= _scan_block(table, bounds, block, n, tau)
            n_read += min(BLOCK, n - block * BLOCK)
    return n_read


@njit(cache=True, nogil=True)
def mark_slash(table, bounds, n, tau, words):
    """Sets bit p - delta of ``words`` where table[delta] > tau; p = n - 1, delta <= p - SINKS.

    Returns the number of entries read.
    """
    tau = np.float32(tau)
    count = n - SINKS
    n_read, n_blocks = 0, (count + BLOCK - 1) // BLOCK
    for first in range(0, n_blocks, BLOCK):
        found = _blocks_above(bounds, first, n_blocks, tau)
        while found:
            block = first + trailing_zeros(found)
            found &= found - np.uint64(1)
            word = _scan_block(table, bounds, block, count, tau)
            n_read += min(BLOCK, count - block * BLOCK)
            _mark_reversed(word, n - 1 - block * BLOCK - (BLOCK - 1), words)
    return n_read


@njit(cache=True, nogil=True)
def _mark_reversed(word, lowest, words):
    """Sets in ``words`` the bits of a block of distances. Bit 63 of word is position ``lowest``.

    The last block may start below position 0.
    """
    word = reversed_bits(word)
    if lowest < 0:
        words[0] |= word >> np.uint64(-lowest)
        return
    shift = np.uint64(lowest & 63)
    words[lowest >> 6] |= word << shift
    if shift:
        words[(lowest >> 6) + 1] |= word >> (np.uint64(64) - shift)


@njit(cache=True, nogil=True)
def expand(words, wide, n_words):
    """Writes to ``wide`` the set bits of ``words`` and their neighbours {-1, +1, +2} (eq 9).

    words uint64 (> n_words,), 0 from n_words on, because neighbours may lie in the next word.
    """
    one, two, last, last_two = np.uint64(1), np.uint64(2), np.uint64(63), np.uint64(62)
    now = words[0]
    wide[0] = now | (now << one) | (now << two) | (now >> one) | (words[1] << last)
    for w in range(1, n_words):
        before, now, after = words[w - 1], words[w], words[w + 1]
        right = (now << one) | (before >> last)
        right_two = (now << two) | (before >> last_two)
        wide[w] = now | right | right_two | (now >> one) | (after << last)


@njit(cache=True, nogil=True)
def filter_expansion(words, before, n_words, ver, dist, n, ver_mean, dist_mean):
    """Drops added neighbours whose two entries are both at most the mean (eq 9 as printed)."""
    for w in range(n_words):
        added = words[w] & ~before[w]
        while added:
            i = w * BLOCK + trailing_zeros(added)
            lowest = added & (~added + np.uint64(1))
            added ^= lowest
            if i >= n or not (ver[i] > ver_mean or dist[n - 1 - i] > dist_mean):
                words[w] ^= lowest


@njit(cache=True, nogil=True)
def set_range(words, first, last):
    for i in range(first, last):
        words[i >> 6] |= np.uint64(1) << np.uint64(i & 63)


@njit(cache=True, nogil=True)
def count_rows(words, n_words, n):
    """Clears the bits that are no row (SINKS <= i < n); returns the number of the others."""
    words[0] &= ~np.uint64((1 << SINKS) - 1)
    tail = n & 63
    if tail:
        words[n_words - 1] &= (np.uint64(1) << np.uint64(tail)) - np.uint64(1)
    count = 0
    for w in range(n_words):
        count += set_bits(words[w])
    return count


@njit(cache=True, nogil=True)
def extract_rows(words, n_words, rows):
    """Writes the positions of the set bits, ascending, to rows int32 (bits + AT_ONCE,).

    It always extracts AT_ONCE bits at a time and overwrites surplus ones. A branch for each bit
    would be mispredicted once a word.
    """
    at = 0
    for w in range(n_words):
        word = words[w]
        after = at + set_bits(word)
        while at < after:
            for i in range(AT_ONCE):
                rows[at + i] = w * BLOCK + trailing_zeros(word)
                word &= word - np.uint64(1)
            at += AT_ONCE
        at = after


@njit(cache=True, nogil=True)
def add_entries(h, tables, n, rows, weights, mean, part, at, row_bytes, changes):
    """Adds part (weights[j] - mean) to a head's ver[i] and dist[n - 1 - i], i = rows[j] (eq 10).

    It updates the power sums and raises bounds that are too low. rows int32 (m,) without repeats;
    weights f32 (>= m,); changes: scratch f32 (4, >= m). It also prefetches the rows i of
    ``row_bytes`` at address ``at``.
    """
    m = rows.shape[0]
    ver, dist = tables.ver[h], tables.dist[h]
    ver_bounds, dist_bounds = tables.ver_bounds[h], tables.dist_bounds[h]
    old, new = changes[:2], changes[2:]
    for j in range(m):
        i = np.uint64(rows[j])
        delta = np.uint64(n - 1) - i
        prefetch_lines(at + np.int64(i) * row_bytes, row_bytes)
        added = part * (weights[j] - mean)
        old[0, j], old[1, j] = ver[i], dist[delta]
        value, slash = np.float32(old[0, j] + added), np.float32(old[1, j] + added)
        new[0, j], new[1, j] = value, slash
        ver[i], dist[delta] = value, slash
        block = i // np.uint64(BLOCK)
        ver_bounds[block] = max(ver_bounds[block], value)
        block = delta // np.uint64(BLOCK)
        dist_bounds[block] = max(dist_bounds[block], slash)
    _replace_powers(tables.sums[h, 0], old[0], new[0], m)
    _replace_powers(tables.sums[h, 1], old[1], new[1], m)


@emitter(returns=types.UniTuple(types.float64, 4))
def _power_changes(old, new, count):
    """Returns the sums over j < count of new[j]^p - old[j]^p for p = 1..4, in f64.

    old, new: addresses of f32; count: a multiple of POWERS.
    """
    wide = vec(ir.DoubleType(), POWERS)

    def powers(array, j):
        x = load(vec(F32, POWERS), array + j * 4).to(wide)
        square = x * x
        return [x, square, square * x, square * square]

    def body(j, sums):
        changes = zip(sums, powers(new, j), powers(old, j), strict=True)
        return [total + (after - before) for total, after, before in changes]

    zero = const(ir.DoubleType(), 0.0, POWERS)
    sums = llvm.loop(0, count, POWERS, [zero] * 4, body)
    return [llvm.sum_lanes(lanes) for lanes in sums]


@njit(cache=True, nogil=True)
def _replace_powers(sums, old, new, n):
    """sums[p - 1] += sum over j < n of new[j]^p - old[j]^p, in f64."""
    whole = n - n % POWERS
    s1, s2, s3, s4 = _power_changes(old, new, whole)
    for j in range(whole, n):
        before, after = np.float64(old[j]), np.float64(new[j])
        before2, after2 = before * before, after * after
        s1 += after - before
        s2 += after2 - before2
        s3 += after2 * after - before2 * before
        s4 += after2 * after2 - before2 * before2
    sums[0] += s1
    sums[1] += s2
    sums[2] += s3
    sums[3] += s4


@njit(cache=True, nogil=True)
def rescale(table, bounds, sums, gain, n):
    """Multiplies the first n entries of a table by ``gain``, so that its scale g becomes 1.

    It computes the power sums f64 (4,) and the bound of each block of 64 entries anew.
    """
    gain, none = np.float32(gain), np.zeros(BLOCK, np.float32)
    sums[:] = 0
    for block in range((n + BLOCK - 1) // BLOCK):
        entries = table[block * BLOCK : min(n, (block + 1) * BLOCK)]
        peak = np.float32(-np.inf)
        for i in range(len(entries)):
            entries[i] *= gain
            peak = max(peak, entries[i])
        _replace_powers(sums, none, entries, len(entries))
        bounds[block] = peak


@njit(cache=True, nogil=True)
def rescale_tables(h, tables, gain, n):
    """Rescales both tables of a head, whose g is ``gain``."""
    rescale(tables.ver[h], tables.ver_bounds[h], tables.sums[h, 0], gain, n)
    rescale(tables.dist[h], tables.dist_bounds[h], tables.sums[h, 1], gain, n)
