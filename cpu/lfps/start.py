"""Fills LFPS' tables after a prefill (eq 4)."""

from __future__ import annotations

import numpy as np
from numba import njit, prange

from sparsekv_cli.cpu.attention.decode import scaled_copy
from sparsekv_cli.cpu.attention.rows import K_HEAD, K_KIND, K_ROW, K
from sparsekv_cli.cpu.attention.tile import NEGATIVE_INFINITY, PAD, exp_in_place, tile_scores
from sparsekv_cli.cpu.jit.llvm import LANES, keep
from sparsekv_cli.cpu.jit.threads import PRANGE_ONLY
from sparsekv_cli.cpu.lfps.history import SINKS, rescale_tables


@njit(cache=True, nogil=True, parallel=PRANGE_ONLY)
def lfps_init(q, layout, n, rules, tables, n_threads):
    """Tables from the last s prefill queries (eq 4): q f32 (H, s, d), the last at position n - 1.

    Each query's weights are its causal softmax without the sinks; every table sums to
    1 / (2 (1 - decay)).
    """
    for part in prange(n_threads):
        for h in range(part, q.shape[0], n_threads):
            _init_head(h, q, layout, n, rules, tables)


@njit(cache=True, nogil=True)
def _init_head(h, q, layout, n, rules, tables):
    """``lfps_init`` of one head."""
    n_head, s, d = q.shape
    ver, dist = tables.ver[h], tables.dist[h]
    k_row = layout[K_ROW]
    k_at = layout[K] + h // (n_head // rules.n_kv_head) * layout[K_HEAD] + SINKS * k_row
    ver[:] = 0
    dist[:] = 0
    scores = np.empty(n + PAD, np.float32)
    for j in range(s):
        position = n - s + j
        count = position + 1 - SINKS
        if count < 1:
            continue
        scaled = scaled_copy(q[h, j], np.float32(rules.scale))
        tile_scores(
            1, layout[K_KIND], scaled.ctypes.data, k_at, k_row, 0, count, d, scores.ctypes.data, 0
        )
        keep(scaled)
        scores[count : count + LANES] = NEGATIVE_INFINITY
        peak = scores[:count].max()
        mass = exp_in_place(scores.ctypes.data, count, peak)
        c = np.float32(1.0 / (2 * s * (1 - rules.decay))) / mass
        for i in range(count):
            ver[SINKS + i] += c * scores[i]
            dist[position - SINKS - i] += c * scores[i]
    tables.gain[h] = 1.0
    rescale_tables(h, tables, 1.0, n)
