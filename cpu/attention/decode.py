"""Decode attention over a KV cache: all rows, or rows listed by index, with online softmax.

K and V of one layer are arrays (kv head, capacity, row) of rows of some kind (attention/rows.py).
Rows are padded to a multiple of 16 elements, so that a row is a few whole vectors. The arithmetic
on rows is in attention/tile.py.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import prange

from sparsekv_cli.cpu.attention.rows import (
    GATHER,
    K_HEAD,
    K_KIND,
    K_ROW,
    KIND,
    V_HEAD,
    V_KIND,
    V_ROW,
    K,
    V,
    listed_rows,
    successive_rows,
)
from sparsekv_cli.cpu.attention.softmax import NEGATIVE_INFINITY, exp_in_place, max_of, soften
from sparsekv_cli.cpu.attention.store import store_row
from sparsekv_cli.cpu.attention.tile import MAX_TILE, PAD, tile_scores, tile_values
from sparsekv_cli.cpu.jit.kernel import njit
from sparsekv_cli.cpu.jit.llvm import tasks_of
from sparsekv_cli.cpu.jit.threads import PRANGE_ONLY
from sparsekv_cli.cpu.jit.value import LANES
from sparsekv_cli.cpu.vector.put import put

BLOCK = 256  # keys whose scores are kept at a time: K and V of a block stay in the L2 cache
VALUES = 64  # rows of V in a tile: they stay in the L1 cache for all dims
TILE = MAX_TILE  # query heads that share a loaded row
ONE_THREAD_BELOW = 160  # rows under which starting threads costs more than they save


@njit(cache=True, nogil=True)
def scaled_copy(q, scale):
    """Returns q * scale in a new array (numba keeps array expressions out of prange loops)."""
    return q * scale


class Softmax(NamedTuple):
    """The state of the running softmax of each head."""

    peak: np.ndarray  # f32 (heads,): the largest score
    mass: np.ndarray  # f32 (heads,): the sum of exp(score - peak)
    acc: np.ndarray  # f32 (heads, d_v): the sum of exp(score - peak) times the row of V


@njit(cache=True, nogil=True)
def begin_softmax(sinks, state):
    """Sets a Softmax to its state without rows.

    sinks f32 (heads,): scores without values that the softmaxes include, or empty.
    """
    for h in range(len(state.peak)):
        state.peak[h] = sinks[h] if len(sinks) else NEGATIVE_INFINITY
        state.mass[h] = 1 if len(sinks) else 0
    state.acc[:] = 0


@njit(cache=True, nogil=True)
def attend_heads(q, rows, softcap, state, scores):
    """Folds HeadRows into the Softmax of the heads that share them.

    All heads use a block of rows, TILE heads at a time, before the next block is read. So a row is
    read from memory once.

    q f32 (heads, d) scaled by 1/sqrt(d). softcap: of the scores, 0 for none. scores: scratch f32
    (TILE, BLOCK + PAD).
    """
    n_head, d = q.shape
    peak, mass, acc = state
    mode, count, k_row, v_row = rows.mode, rows.n, rows.k_row, rows.v_row
    k_mode, v_mode = mode & (KIND | GATHER), (mode & GATHER) | (mode >> 2 & KIND)
    stride = scores.shape[1]
    for start in range(0, count, BLOCK):
        size = min(BLOCK, count - start)
        at = rows.numbers + 4 * start
        k_at, v_at = rows.k, rows.v
        if not mode & GATHER:
            k_at, v_at = k_at + start * k_row, v_at + start * v_row
        for first in range(0, n_head, TILE):
            tile = min(TILE, n_head - first)
            tile_scores(tile, k_mode, q[first], k_at, k_row, at, size, d, scores, stride)
            for t in range(tile):
                h = first + t
                for j in range(size, size + LANES):
                    scores[t, j] = NEGATIVE_INFINITY
                address = scores.ctypes.data + 4 * t * stride
                if softcap:
                    soften(address, size, softcap)
                new_peak = max(peak[h], max_of(address, size))
                old = np.float32(np.exp(peak[h] - new_peak))
                mass[h] = mass[h] * old + exp_in_place(address, size, new_peak)
                peak[h] = new_peak
                for c in range(acc.shape[1]):
                    acc[h, c] *= old
            part = size if mode & GATHER else VALUES  # listed rows are prefetched
            for row in range(0, size, part):
                tile_values(
                    tile, v_mode, scores.ctypes.data + 4 * row, stride, v_at + row * v_row, v_row,
                    at, min(part, size - row), acc.shape[1], acc[first],
                )  # fmt: skip


@njit(cache=True, nogil=True)
def n_key_splits(n, n_kv_head, n_threads):
    """Returns the number of pieces of a kv head's keys, so that threads get equal work.

    A piece has at least BLOCK keys; shorter contexts are not cut.
    """
    if n_threads == 1:
        return 1
    n_split = -(-4 * n_threads // n_kv_head)
    while n_kv_head * n_split % n_threads:
        n_split += 1
    return min(max(1, n // BLOCK), n_split)


@njit(cache=True, nogil=True, error_model="numpy")
def attend_list(q, rows, scale, softcap, sinks, out, scores):
    """Computes attention of heads that share HeadRows, in this thread's memory.

    sinks: see ``begin_softmax``. out f32 (heads, d_v).
    """
    n_head, d_v = out.shape
    peak, mass = np.empty(n_head, np.float32), np.empty(n_head, np.float32)
    state = Softmax(peak=peak, mass=mass, acc=np.empty((n_head, d_v), np.float32))
    begin_softmax(sinks, state)
    attend_heads(scaled_copy(q, scale), rows, softcap, state, scores)
    for h in range(n_head):
        factor = np.float32(1) / mass[h]
        for c in range(d_v):
            out[h, c] = state.acc[h, c] * factor


@njit(cache=True, nogil=True, error_model="numpy")
def _attend_tokens(q, layouts, kv_head, spans, scale, softcap, sinks, whole, piece, out, scores):
    """Computes attention of tokens and heads that share a kv head's rows, in this thread's memory.

    All tokens use a block of rows before the next block is read. So a row that they share is read
    from memory once.

    q f32 (B, heads, d). layouts int64 (B, 8). spans int64 (B, 2): each token's first row, and the
    row after its last one. out f32 (B, heads, d_v): set, if the spans have all rows (``whole``).
    Otherwise ``piece`` is set, a Softmax of (B, heads).
    """
    n_token, n_head, d_v = out.shape
    peak, mass = np.empty((n_token, n_head), np.float32), np.empty((n_token, n_head), np.float32)
    acc, scaled = np.empty((n_token, n_head, d_v), np.float32), scaled_copy(q, scale)
    longest = 0
    for b in range(n_token):
        begin_softmax(sinks, Softmax(peak=peak[b], mass=mass[b], acc=acc[b]))
        longest = max(longest, spans[b, 1] - spans[b, 0])
    for start in range(0, longest, BLOCK):
        for b in range(n_token):
            first, last = spans[b, 0] + start, spans[b, 1]
            if first < last:
                rows = successive_rows(layouts[b], kv_head, first, min(BLOCK, last - first))
                state = Softmax(peak=peak[b], mass=mass[b], acc=acc[b])
                attend_heads(scaled[b], rows, softcap, state, scores)
    if not whole:
        piece.peak[:], piece.mass[:], piece.acc[:] = peak, mass, acc
        return
    for b in range(n_token):
        for h in range(n_head):
            factor = np.float32(1) / mass[b, h]
            for c in range(d_v):
                out[b, h, c] = acc[b, h, c] * factor


@njit(cache=True, nogil=True)
def _attend_pieces(
    counter, tasks, q, layouts, spans, n_kv_head, scale, softcap, sinks, pieces, out
):
    """Runs tasks until none is left. A task is a kv head and a row of ``tasks``.

    pieces: a Softmax of (S, B, H), a piece of the keys a row.
    """
    group, n_task = q.shape[1] // n_kv_head, len(tasks)
    scores = np.empty((TILE, BLOCK + PAD), np.float32)
    for task in tasks_of(counter, n_kv_head * n_task):
        kv_head, (b, last, split, n_split) = task // n_task, tasks[task % n_task]
        h, end = kv_head * group, (kv_head + 1) * group
        at = split, slice(b, last), slice(h, end)
        piece = Softmax(peak=pieces.peak[at], mass=pieces.mass[at], acc=pieces.acc[at])
        _attend_tokens(
            q[b:last, h:end], layouts[b:last], kv_head, spans[split, b:last], scale, softcap,
            sinks[h:end] if split == 0 else sinks[:0], n_split == 1, piece, out[b:last, h:end],
            scores,
        )  # fmt: skip


@njit(cache=True, nogil=True)
def _tasks_of_kv_head(n_split, owners, n_threads):
    """Returns the tasks of one kv head, int64 (n, 4), a row a task.

    A row is (first token, token after the last one, piece, number of pieces). n_split int64 (B,):
    the pieces into which the keys of each token are cut. owners int64 (B,): see ``attend_dense``.
    Neighbouring tokens share a task if they have one owner and equally many pieces. With several
    threads, a token whose keys are one piece has a task of its own.

    Example: n_split = (2, 2, 1), owners = (7, 7, 7) and two threads give the rows (0, 2, 0, 2),
    (0, 2, 1, 2) and (2, 3, 0, 1).
    """
    tasks, n, b = np.empty((n_split.sum(), 4), np.int64), 0, 0
    while b < len(n_split):
        last = b + 1
        if n_threads == 1 or n_split[b] > 1:
            while last < len(n_split) and owners[last] == owners[b] and n_split[last] == n_split[b]:
                last += 1
        for split in range(n_split[b]):
            tasks[n, 0], tasks[n, 1], tasks[n, 2], tasks[n, 3] = b, last, split, n_split[b]
            n += 1
        b = last
    return tasks[:n]


@njit(cache=True, nogil=True, parallel=PRANGE_ONLY)
def _attend_all(tasks, q, layouts, spans, n_kv_head, scale, softcap, sinks, pieces, out, n_threads):
    """Runs all tasks on several threads."""
    counter = np.zeros(1, np.int64)
    for _thread in prange(n_threads):
        _attend_pieces(
            counter, tasks, q, layouts, spans, n_kv_head, scale, softcap, sinks, pieces, out
        )


@njit(cache=True, nogil=True)
def attend_dense(
    q, layouts, stops, owners, window, n_kv_head, scale, softcap, sinks, out, n_threads
):
    """Computes attention of B tokens in all heads, each over the rows up to its own.

    q f32 (B, H, d); layouts int64 (B, 8), see attention/rows.py; stops int64 (B,): each token's
    number of rows; out f32 (B, H, d_v). Query head h belongs to kv head h // (H / G). owners int64
    (B,): neighbouring tokens with the same owner read the same rows, except the last ones. window:
    the most rows to which a token attends, its own included. softcap: 0 for none; sinks f32 (H,),
    or empty. Threads share the keys evenly. The pieces are merged by their peaks and masses. Short
    contexts stay on one thread. A token's bits do not depend on the other tokens.
    """
    n_token, n_head, d_v = out.shape
    n_split, n_rows = np.empty(n_token, np.int64), 0
    for b in range(n_token):
        n_split[b] = n_key_splits(min(stops[b], window), n_kv_head, n_threads)
        n_rows += min(stops[b], window)
    most = n_split.max()
    spans = np.empty((most, n_token, 2), np.int64)
    for b in range(n_token):
        size = min(stops[b], window)
        for split in range(n_split[b]):
            spans[split, b, 0] = stops[b] - size + split * size // n_split[b]
            spans[split, b, 1] = stops[b] - size + (split + 1) * size // n_split[b]
    tasks = _tasks_of_kv_head(n_split, owners, n_threads)
    peak = np.empty((most, n_token, n_head), np.float32)
    mass = np.empty((most, n_token, n_head), np.float32)
    acc = np.empty((most, n_token, n_head, d_v), np.float32)
    used = 1 if n_rows < ONE_THREAD_BELOW else n_threads
    pieces = Softmax(peak=peak, mass=mass, acc=acc)
    _attend_all(tasks, q, layouts, spans, n_kv_head, scale, softcap, sinks, pieces, out, used)
    for b in range(n_token):
        n = n_split[b]
        if n > 1:
            for h in range(n_head):
                merge_pieces(peak[:n, b, h], mass[:n, b, h], acc[:n, b, h], out[b, h])


@njit(cache=True, nogil=True, error_model="numpy", fastmath={"contract", "nsz"})
def merge_pieces(peak, mass, acc, out):
    """Merges pieces into the softmax-weighted mean: peak, mass (S,), acc (S, d_v) -> out (d_v,)."""
    top = peak.max()
    total = np.float32(0)
    for split in range(peak.shape[0]):
        total += np.float32(np.exp(peak[split] - top)) * mass[split]
    out[:] = 0
    for split in range(peak.shape[0]):
        weight = np.float32(np.exp(peak[split] - top)) / total
        for c in range(out.shape[0]):
            out[c] += weight * acc[split, c]


@njit(cache=True, nogil=True, parallel=PRANGE_ONLY)
def attend_rows(q, layout, idx, counts, n_kv_head, scale, softcap, sinks, out, n_threads):
    """Computes attention of one token over listed rows: idx int32 (U, m), counts int64 (U,).

    U is the number of lists: H (one a query head) or G (one a kv head, which its group shares).
    softcap, sinks: as in ``attend_dense``.
    """
    n_list = idx.shape[0]
    heads_a_list = q.shape[0] // n_list
    group = q.shape[0] // n_kv_head
    counter = np.zeros(1, np.int64)
    for _thread in prange(n_threads):
        scores = np.empty((TILE, BLOCK + PAD), np.float32)
        for unit in tasks_of(counter, n_list):
            h, end = unit * heads_a_list, (unit + 1) * heads_a_list
            rows = listed_rows(layout, h // group, idx[unit].ctypes.data, counts[unit])
            attend_list(q[h:end], rows, scale, softcap, sinks[h:end], out[h:end], scores)


@njit(cache=True, nogil=True)
def append_row(k_new, v_new, layout, position):
    """Writes one token's K and V, f32 (G, d), as rows at ``position``; d multiples of 16."""
    for kv_head in range(k_new.shape[0]):
        at = layout[K] + kv_head * layout[K_HEAD] + position * layout[K_ROW]
        store_row(layout[K_KIND], k_new[kv_head].ctypes.data, at, k_new.shape[1])
        at = layout[V] + kv_head * layout[V_HEAD] + position * layout[V_ROW]
        store_row(layout[V_KIND], v_new[kv_head].ctypes.data, at, v_new.shape[1])


@njit(cache=True, nogil=True)
def append_rows(k_new, v_new, layout, position):
    """Writes T tokens' K and V, f32 (T, G, d), as rows from ``position`` on."""
    for t in range(k_new.shape[0]):
        append_row(k_new[t], v_new[t], layout, position + t)


@njit(cache=True, nogil=True, parallel=PRANGE_ONLY)
def score_rows(q, layout, n, n_kv_head, scale, out, n_threads):
    """out[h, j] = scale q[h] . k[j] for j < n; q f32 (H, d), out f32 (H, >= n + PAD).

    layout int64 (8,), see attention/rows.py.
    """
    n_head, d = q.shape
    group = n_head // n_kv_head
    n_split = n_key_splits(n, n_kv_head, n_threads)
    counter = np.zeros(1, np.int64)
    for _thread in prange(n_threads):
        part = np.empty((TILE, BLOCK + PAD), np.float32)
        for task in tasks_of(counter, n_kv_head * n_split):
            kv_head, split = task // n_split, task % n_split
            first, last = split * n // n_split, (split + 1) * n // n_split
            for h in range(kv_head * group, (kv_head + 1) * group, TILE):
                end = min(h + TILE, (kv_head + 1) * group)
                scaled = scaled_copy(q[h:end], scale)
                for start in range(first, last, BLOCK):
                    size = min(BLOCK, last - start)
                    at = layout[K] + kv_head * layout[K_HEAD] + start * layout[K_ROW]
                    tile_scores(
                        end - h, layout[K_KIND], scaled, at, layout[K_ROW], 0, size, d,
                        part, part.shape[1],
                    )  # fmt: skip
                    for t in range(end - h):
                        put(out[h + t, start : start + size], part[t])


def attend_rows_ref(q, k, v, rows, scale, softcap=0.0, sinks=None):
    """Returns f64 (H, d_v) for q (H, d), k (G, n, d), v (G, n, d_v) and a row list a head."""
    group = q.shape[0] // k.shape[0]
    out = np.empty((q.shape[0], v.shape[2]))
    for h, row in enumerate(rows):
        s = k[h // group, row].astype(np.float64) @ q[h].astype(np.float64) * scale
        s = softcap * np.tanh(s / softcap) if softcap else s
        sink = -np.inf if sinks is None else np.float64(sinks[h])
        peak = max(s.max(), sink)
        p = np.exp(s - peak)
        out[h] = p @ v[h // group, row].astype(np.float64) / (p.sum() + np.exp(sink - peak))
    return out


def attend_dense_ref(q, k, v, scale, softcap=0.0, sinks=None):
    """Returns ``attend_rows_ref`` over all rows."""
    rows = [np.arange(k.shape[1])] * q.shape[0]
    return attend_rows_ref(q, k, v, rows, scale, softcap, sinks)
