"""Sums of the attention that keys have received. SnapKV and H2O drop rows with small sums.

A sum is a column sum of the causal softmax over a cache's rows, f32. A kv head has one list of
sums, to which all its query heads add. The softmax is the attention's, sinks included. Each part of
the queries has its own sums, and the parts are merged in a fixed order. So the number of threads
changes no bit.
"""

import numpy as np
from numba import prange

from sparsekv_cli.cpu.attention.decode import TILE, scaled_copy
from sparsekv_cli.cpu.attention.rows import K_HEAD, K_KIND, K_ROW, V_HEAD, V_ROW, K, V
from sparsekv_cli.cpu.attention.softmax import NEGATIVE_INFINITY, exponentiate
from sparsekv_cli.cpu.attention.tile import PAD, tile_scores
from sparsekv_cli.cpu.jit.kernel import njit
from sparsekv_cli.cpu.jit.llvm import copy_bytes, tasks_of
from sparsekv_cli.cpu.jit.threads import PRANGE_ONLY

N_PART = 8  # most parts of a kv head's queries
ROWS_A_PART = 64  # fewest queries of a part
ONE_THREAD_BELOW = 1 << 14  # dot products under which threads cost more than they save


@njit(cache=True, nogil=True, fastmath={"contract", "nsz"})
def _add_weighted(target, source, n, factor):
    """target[:n] += factor source[:n]."""
    for j in range(n):
        target[j] += factor * source[j]


@njit(cache=True, nogil=True)
def _add_columns(q, first, last, k, k_row, kind, n_past, group, scale, softcap, sinks, sums):
    """Adds the softmax of the queries q[first:last] of one kv head to sums f32 (n,).

    sinks f32 (group,): scores without values of its query heads, or empty.
    """
    if first == last:
        return
    d = q.shape[1]
    scores = np.empty((TILE, n_past + (last - 1) // group + 1 + PAD), np.float32)
    stride = scores.shape[1]
    for row in range(first, last, TILE):
        tile = min(TILE, last - row)
        longest = n_past + (row + tile - 1) // group + 1
        scaled = scaled_copy(q[row : row + tile], scale)
        tile_scores(tile, kind, scaled, k, k_row, 0, longest, d, scores, stride)
        for t in range(tile):
            visible = n_past + (row + t) // group + 1
            sink = sinks[(row + t) % group] if len(sinks) else NEGATIVE_INFINITY
            peak, mass = exponentiate(scores[t], visible, softcap, sink)
            _add_weighted(sums, scores[t], visible, np.float32(1) / (mass + np.exp(sink - peak)))


@njit(cache=True, nogil=True)
def _add_parts(counter, q, layout, n_past, group, scale, softcap, sinks, parts):
    """Runs (kv head, part) tasks until none is left; parts f32 (G, parts, n)."""
    n_kv_head, n_part, _ = parts.shape
    n_row = q.shape[1]
    for task in tasks_of(counter, n_kv_head * n_part):
        kv_head, part = task // n_part, task % n_part
        first, last = part * n_row // n_part, (part + 1) * n_row // n_part
        _add_columns(
            q[kv_head], first, last, layout[K] + kv_head * layout[K_HEAD], layout[K_ROW],
            layout[K_KIND], n_past, group, scale, softcap,
            sinks[kv_head * group : (kv_head + 1) * group], parts[kv_head, part],
        )  # fmt: skip


@njit(cache=True, nogil=True, parallel=PRANGE_ONLY)
def add_attention(q, layout, n, group, scale, softcap, sinks, sums, n_threads):
    """sums[g, j] += softmax(scale q . k)[j], summed over the queries of the last positions.

    q f32 (G, R, d): the ``group`` query heads of the first of R / group positions, then of the next
    position. The last position sees n rows, each earlier position one row less. layout int64 (8,):
    see attention/rows.py. softcap: 0 for none; sinks f32 (H,): scores without values, or empty.
    sums f32 (G, >= n).
    """
    n_kv_head, n_row, _ = q.shape
    n_past = n - n_row // group
    n_part = min(N_PART, max(1, n_row // ROWS_A_PART))
    parts = np.zeros((n_kv_head, n_part, n), np.float32)
    counter = np.zeros(1, np.int64)
    for _thread in prange(1 if n_kv_head * n_row * n < ONE_THREAD_BELOW else n_threads):
        _add_parts(counter, q, layout, n_past, group, scale, softcap, sinks, parts)
    for kv_head in range(n_kv_head):
        for part in range(n_part):
            _add_weighted(sums[kv_head], parts[kv_head, part], n, np.float32(1))


def add_attention_ref(q, k, n, group, scale, sums, softcap=0.0, sinks=()):
    """numpy reference in f64: q (G, R, d), k (G, >= n, d) -> sums + the columns (G, n)."""
    total = sums[:, :n].astype(np.float64)
    n_row = q.shape[1]
    for g in range(len(q)):
        for row in range(n_row):
            visible = n - n_row // group + row // group + 1
            s = k[g, :visible].astype(np.float64) @ q[g, row].astype(np.float64) * scale
            s = softcap * np.tanh(s / softcap) if softcap else s
            sink = np.float64(sinks[g * group + row % group]) if len(sinks) else -np.inf
            peak = max(s.max(), sink)
            p = np.exp(s - peak)
            total[g, :visible] += p / (p.sum() + np.exp(sink - peak))
    return total


@njit(cache=True, nogil=True)
def max_pool(scores, n, width, out):
    """out[g, j] = the largest of scores[g, j - width // 2 .. j + width // 2] within 0..n - 1."""
    half = width // 2
    for g in range(scores.shape[0]):
        for j in range(n):
            best = scores[g, j]
            for i in range(max(0, j - half), min(n, j + half + 1)):
                best = max(best, scores[g, i])
            out[g, j] = best


def max_pool_ref(scores, width):
    """numpy reference: scores (G, n) -> (G, n)."""
    half = width // 2
    padded = np.pad(scores, ((0, 0), (half, half)), constant_values=-np.inf)
    return np.lib.stride_tricks.sliding_window_view(padded, width, axis=1).max(-1)


@njit(cache=True, nogil=True)
def least_attended(positions, mass, n, first, last):
    """Returns the slot below n with the least mass at positions first..last - 1; oldest of ties."""
    found = -1
    for j in range(n):
        if first <= positions[j] < last and (
            found < 0
            or mass[j] < mass[found]
            or (mass[j] == mass[found] and positions[j] < positions[found])
        ):
            found = j
    return found


@njit(cache=True, nogil=True)
def drop_least_attended(layout, n, first, last, positions, mass):
    """Drops one of the n rows of every kv head; the last row moves to its slot.

    layout int64 (8,): see attention/rows.py; positions int32, mass f32 (G, >= n). The
    row with the least mass among those at positions first..last - 1 is dropped; there must be one.
    """
    k_row, v_row = layout[K_ROW], layout[V_ROW]
    for g in range(positions.shape[0]):
        slot = least_attended(positions[g], mass[g], n, first, last)
        k_base, v_base = layout[K] + g * layout[K_HEAD], layout[V] + g * layout[V_HEAD]
        copy_bytes(k_base + (n - 1) * k_row, k_base + slot * k_row, k_row)
        copy_bytes(v_base + (n - 1) * v_row, v_base + slot * v_row, v_row)
        positions[g, slot] = positions[g, n - 1]
        mass[g, slot] = mass[g, n - 1]


def drop_least_attended_ref(first, last, positions, mass):
    """numpy reference: returns the slot that each kv head drops; positions, mass (G, n)."""
    slots = []
    for position, weight in zip(positions, mass, strict=True):
        among = np.flatnonzero((first <= position) & (position < last))
        slots.append(among[np.lexsort((position[among], weight[among]))[0]])
    return slots


@njit(cache=True, nogil=True)
def heavy_hitter_step(
    q, layout, n, scale, softcap, sinks, drops, first, last, positions, mass, n_threads
):
    """Runs H2O's update after the attention of a decode step. The step's row is the last of n.

    q f32 (G, group, d). It adds the step's attention to mass. If ``drops``, it drops a row of every
    kv head (``drop_least_attended``).
    """
    add_attention(q, layout, n, q.shape[1], scale, softcap, sinks, mass, n_threads)
    if drops:
        drop_least_attended(layout, n, first, last, positions, mass)
