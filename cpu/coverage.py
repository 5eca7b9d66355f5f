"""Compares the rows that a method attends to with exact attention over all rows."""

from __future__ import annotations

import numpy as np
from numba import prange

from sparsekv_cli.cpu.attention.decode import scaled_copy
from sparsekv_cli.cpu.attention.rows import F16
from sparsekv_cli.cpu.attention.select import order_keys, select_largest
from sparsekv_cli.cpu.attention.softmax import NEGATIVE_INFINITY, exponentiate
from sparsekv_cli.cpu.attention.tile import PAD, tile_scores
from sparsekv_cli.cpu.jit.kernel import njit
from sparsekv_cli.cpu.jit.llvm import tasks_of
from sparsekv_cli.cpu.jit.threads import PRANGE_ONLY


@njit(cache=True, nogil=True)
def _rate_head(query, k, n, tail, n_tail, k_row, scale, softcap, rows, n_sinks):
    """Rates the rows of one head: query f32 (1, d); k, tail: addresses of its kv head's rows."""
    d, total = query.shape[1], n + n_tail
    scores = np.empty((1, total + PAD), np.float32)
    scaled = scaled_copy(query, np.float32(scale))
    tile_scores(1, F16, scaled, k, k_row, 0, n, d, scores, 0)
    tile_scores(1, F16, scaled, tail, k_row, 0, n_tail, d, scores[0, n:], 0)
    n_other, chosen = total - n_sinks, 0
    for row in rows:
        chosen += row >= n_sinks
    keys, best = np.empty(n_other, np.int32), np.empty(chosen, np.int32)
    order_keys(scores[0, n_sinks:], keys, n_other)
    select_largest(keys, n_other, chosen, best)
    is_best = np.zeros(total, np.bool_)
    for j in best:
        is_best[n_sinks + j] = True
    _, mass = exponentiate(scores[0], total, np.float32(softcap), NEGATIVE_INFINITY)
    attended, possible, n_best = 0.0, 0.0, 0
    for row in rows:
        attended += np.float64(scores[0, row])
        possible += np.float64(scores[0, row]) if row < n_sinks else 0.0
        n_best += is_best[row]
    for j in best:
        possible += np.float64(scores[0, n_sinks + j])
    return chosen, n_best, attended / mass, possible / mass


@njit(cache=True, nogil=True, parallel=PRANGE_ONLY)
def rate_rows(
    q, k, k_head, n, tail, tail_head, n_tail, k_row, n_kv_head, scale, softcap, idx, counts,
    n_sinks, n_chosen, n_best, mass, best_mass, n_threads,
):  # fmt: skip
    """Counts each head's attended rows, and those that exact top-k also has; sums their mass.

    q f32 (H, d). k, tail: addresses of f16 keys, n rows and then n_tail rows. k_head, tail_head,
    k_row: bytes between kv heads and rows. softcap: of the scores, 0 for none. idx int32 (U, m),
    counts int64 (U,): the attended rows, U = H, G or 1. n_chosen, n_best int64 (H,) leave out the
    first n_sinks rows, which are always attended; top-k takes n_chosen of the others. mass f64
    (H,): share of all attended rows in the softmax. best_mass f64 (H,): share of the attended sinks
    and the rows of top-k.
    """
    n_head = q.shape[0]
    counter = np.zeros(1, np.int64)
    for _thread in prange(n_threads):
        for head in tasks_of(counter, n_head):
            unit, kv_head = head * len(counts) // n_head, head * n_kv_head // n_head
            n_chosen[head], n_best[head], mass[head], best_mass[head] = _rate_head(
                q[head : head + 1], k + kv_head * k_head, n, tail + kv_head * tail_head, n_tail,
                k_row, scale, softcap, idx[unit, : counts[unit]], n_sinks,
            )  # fmt: skip
