"""Fills LFPS' tables after a prefill (eq 4)."""

import numpy as np
from numba import prange

from sparsekv_cli.cpu.attention.decode import scaled_copy
from sparsekv_cli.cpu.attention.rows import K_HEAD, K_KIND, K_ROW, K
from sparsekv_cli.cpu.attention.softmax import NEGATIVE_INFINITY, exponentiate
from sparsekv_cli.cpu.attention.tile import MAX_TILE, PAD, tile_scores
from sparsekv_cli.cpu.jit.kernel import njit
from sparsekv_cli.cpu.jit.threads import PRANGE_ONLY
from sparsekv_cli.cpu.lfps.history import SINKS, Tables, rescale_tables
from sparsekv_cli.cpu.lfps.state import Rules

FEW_FROM, FEW = 32768, 8  # rows from which every eighth of the last queries starts the tables


def start_tables(
    q: np.ndarray, layout: np.ndarray, n: int, rules: Rules, tables: Tables, n_threads: int
) -> None:
    """Fills tables from the queries f32 (H, s, d) of the last s of n rows, or of some of them."""
    every = FEW if n >= FEW_FROM else 1
    few = np.ascontiguousarray(q[:, (q.shape[1] - 1) % every :: every])
    lfps_init(few, every, layout, n, rules, tables, n_threads)


@njit(cache=True, nogil=True, parallel=PRANGE_ONLY)
def lfps_init(q, every, layout, n, rules, tables, n_threads):
    """Fills tables from prefill queries (eq 4), q f32 (H, s, d), of s rows up to row n - 1.

    every: the distance of two of these rows. Each query's weights are its causal softmax without
    the sinks. The sum of a table is 1 / (2 (1 - decay)).
    """
    for part in prange(n_threads):
        for h in range(part, q.shape[0], n_threads):
            _init_head(h, q, every, layout, n, rules, tables)


@njit(cache=True, nogil=True)
def _init_head(h, q, every, layout, n, rules, tables):
    """Does ``lfps_init`` for one head."""
    n_head, s, d = q.shape
    ver, dist = tables.ver[h], tables.dist[h]
    k_row = layout[K_ROW]
    k_at = layout[K] + h // (n_head // rules.n_kv_head) * layout[K_HEAD] + SINKS * k_row
    ver[:] = 0
    dist[:] = 0
    scores = np.empty((MAX_TILE, n + PAD), np.float32)
    scaled = scaled_copy(q[h], np.float32(rules.scale))
    share = np.float32(1.0 / (2 * s * (1 - rules.decay)))
    for first in range(0, s, MAX_TILE):
        tile = min(MAX_TILE, s - first)
        # Rows that the last query of the tile sees.
        n_rows = n - (s - first - tile) * every - SINKS
        if n_rows < 1:
            continue
        tile_scores(
            tile, layout[K_KIND], scaled[first], k_at, k_row, 0, n_rows, d, scores, scores.shape[1]
        )
        for t in range(tile):
            count = n_rows - (tile - 1 - t) * every
            if count > 0:
                _add_weights(scores[t], count, np.float32(rules.softcap), share, ver[SINKS:], dist)
    tables.gain[h] = 1.0
    rescale_tables(h, tables, 1.0, n)


@njit(cache=True, nogil=True)
def _add_weights(scores, count, softcap, share, ver, dist):
    """Adds the softmax weights, times ``share``, of the query at row count - 1 of ``ver``."""
    factor = share / exponentiate(scores, count, softcap, NEGATIVE_INFINITY)[1]
    for i in range(count):
        ver[i] += factor * scores[i]
    for i in range(count):
        dist[i] += factor * scores[count - 1 - i]
