"""One decode step of LFPS for a whole layer; lfps_start.py is how its tables begin."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit, prange

from sparsekv_cli.cpu.attention import append_row, scaled_copy
from sparsekv_cli.cpu.bypass import bypass, may_bypass
from sparsekv_cli.cpu.emit import LANES, keep, next_task, prefetch_lines
from sparsekv_cli.cpu.history import (
    BLOCK,
    RESCALE_BELOW,
    SINKS,
    add_entries,
    count_rows,
    expand,
    extract_rows,
    filter_expansion,
    mark_slash,
    mark_vertical,
    prefetch_tables,
    rescale_tables,
    set_range,
    threshold,
)
from sparsekv_cli.cpu.parallel import PRANGE_ONLY
from sparsekv_cli.cpu.rows import GATHER, K_HEAD, K_KIND, K_ROW, V_HEAD, V_KIND, V_ROW, K, V
from sparsekv_cli.cpu.select import order_keys, select_largest
from sparsekv_cli.cpu.tiles import (
    NEGATIVE_INFINITY,
    PAD,
    exp_in_place,
    max_of,
    tile_scores,
    tile_values,
)

LOCAL = 6  # keys before the current one in the local mass of the bypass test (eq 6)
# Columns of the statistics (int64, one row a unit).
ROWS, SCORED, ATTENDED, TESTED, BYPASSED, HEAD_STEPS = range(6)
BOUNDS_READ, ENTRIES_READ, KEYS_READ = range(6, 9)
N_STATISTICS = 9
RAISE = 1.25  # factor of the thresholds where too many rows pass
AHEAD_SEARCH = 64  # candidates whose keys are asked for when they are found
CALM = 0.7  # share of the limit below which the thresholds come down again


class Rules(NamedTuple):
    """Options of a step; symbols as in the paper."""

    scale: float
    n_kv_head: int
    recent: int  # R
    a: float
    horizon: int  # most entries that the mean of the thresholds is over
    decay: float  # r
    epsilon: float
    filtered: bool  # whether neighbours must be above the mean (eq 9)


@njit(cache=True, nogil=True)
def _candidates(unit, n, n_recent, limit, rules, tables, raised, statistics):
    """C1, ascending: rows above a threshold, their neighbours and the recents (eq 8, 9).

    While more than ``limit`` rows pass, both thresholds are raised by RAISE; ``raised`` f64 (U,)
    remembers how far, and comes down again when fewer than CALM of them pass.
    """
    n_words = (n + BLOCK - 1) // BLOCK
    n_known = n - SINKS
    words, wide = np.empty(n_words + 1, np.uint64), np.empty(n_words, np.uint64)
    ver, dist, sums = tables.ver[unit], tables.dist[unit], tables.sums[unit]
    tau_ver = threshold(sums[0], n_known, rules.a, rules.horizon)
    tau_dist = threshold(sums[1], n_known, rules.a, rules.horizon)
    factor = raised[unit]
    while True:
        words[:] = 0
        n_read = mark_vertical(ver, tables.ver_bounds[unit], n, factor * tau_ver, words)
        n_read += mark_slash(dist, tables.dist_bounds[unit], n, factor * tau_dist, words)
        statistics[unit, ENTRIES_READ] += n_read
        statistics[unit, BOUNDS_READ] += 2 * n_words
        expand(words, wide, n_words)
        if rules.filtered:
            means = sums[0, 0] / n_known, sums[1, 0] / n_known
            filter_expansion(wide, words, n_words, ver, dist, n, means[0], means[1])
        set_range(wide, n - n_recent, n)
        count = count_rows(wide, n_words, n)
        if count <= limit or factor > 1e9:
            calm = count < CALM * limit
            raised[unit] = max(1.0, factor / RAISE) if calm else factor
            return extract_rows(wide, n_words, count)
        factor *= RAISE


@njit(cache=True, nogil=True)
def _attend_candidates(
    unit, sinks, rows, scores, k_budget, n_recent, v, v_row, v_kind, tables, part, n, keys, chosen,
    lse, out,
):  # fmt: skip
    """C2 = the recents and the best of C1 by exact score; attends sinks and C2, learns C2 (eq 10).

    scores f32 (count + PAD,) of C1 ``rows`` ascending, whose last n_recent are the recents. To the
    unit's tables ``part`` times the softmax over C2 alone less its halved mean is added. keys,
    chosen: int32 scratch. lse: f32 (1,), if only C2 is attended, or (0,). Returns C2's rows int32
    (m,).
    """
    ver, dist = tables.ver[unit], tables.dist[unit]
    count = rows.shape[0]
    m = min(count, k_budget)
    n_old = count - n_recent
    if m < count:
        order_keys(scores, keys, n_old)
        select_largest(keys, n_old, m - n_recent, chosen)
        for j in range(n_recent):
            chosen[m - n_recent + j] = n_old + j
    else:
        for j in range(m):
            chosen[j] = j
    picked = np.empty(m, np.int32)
    weights = np.empty(m + PAD, np.float32)
    for j in range(m):
        c = np.uint64(chosen[j])
        i = rows[c]
        picked[j] = i
        prefetch_lines(ver.ctypes.data + 4 * i, 4)
        prefetch_lines(dist.ctypes.data + 4 * (n - 1 - i), 4)
        weights[j] = scores[c]
    for j in range(m, m + LANES):
        weights[j] = NEGATIVE_INFINITY
    peak = max_of(weights.ctypes.data, m)
    sink_weights = np.empty(SINKS, np.float32)
    for j in range(SINKS):
        peak = max(peak, sinks[j])
    sink_mass = np.float32(0)
    for j in range(SINKS):
        sink_weights[j] = np.exp(sinks[j] - peak)
        sink_mass += sink_weights[j]
    mass = exp_in_place(weights.ctypes.data, m, peak)
    total = sink_mass + mass
    d_v = out.shape[0]
    out[:] = 0
    if lse.shape[0]:
        lse[0] = peak + np.log(mass)
        total = mass if mass > 0 else np.float32(1)  # without mass nothing looks at the output
    else:
        tile_values(
            1, v_kind, sink_weights.ctypes.data, 0, v, v_row, 0, SINKS, d_v, out.ctypes.data
        )
    keep(sink_weights)
    learned = np.float64(mass)
    if mass == 0:  # the sinks' scores are so far above that C2's masses vanish: no information
        weights[:m] = 1
        learned = np.float64(m)
    # The tables learn first: meanwhile the values arrive.
    add_entries(unit, tables, n, picked, weights, 0.5 * learned / m, part / learned, v, v_row)
    if mass > 0:
        tile_values(
            1, v_kind | GATHER, weights.ctypes.data, 0, v, v_row, picked.ctypes.data, m, d_v,
            out.ctypes.data,
        )  # fmt: skip
    keep(weights)
    for c in range(d_v):
        out[c] /= total
    return picked


class Search(NamedTuple):
    """What a unit's heads look for, before any candidate is scored."""

    queries: np.ndarray  # f32 (heads, d), scaled
    near: np.ndarray  # f32 (heads, >= n_near): scores of the sinks and of the local rows
    active: np.ndarray  # bool (heads,): not bypassed
    n_active: int
    rows: np.ndarray  # int32: C1, ascending; empty where no head is active


@njit(cache=True, nogil=True)
def _search_unit(
    unit, q, layout, n, n_recent, limit, rules, tables, raised, constants, statistics, attended,
    n_attended, lse, out,
):  # fmt: skip
    """The bypass tests of a unit's heads, with the outputs of those bypassed, and C1 of the others,
    whose first keys are asked for.
    """
    n_head, d = q.shape
    heads = n_head // tables.gain.shape[0]
    first_local = max(SINKS, n - 1 - LOCAL)
    n_near = SINKS + n - first_local
    h0 = unit * heads
    kv_head = h0 // (n_head // rules.n_kv_head)
    k_row, v_row, k_kind, v_kind = layout[K_ROW], layout[V_ROW], layout[K_KIND], layout[V_KIND]
    k_at = layout[K] + kv_head * layout[K_HEAD]
    v_at = layout[V] + kv_head * layout[V_HEAD]
    prefetch_lines(k_at, SINKS * k_row)
    prefetch_lines(k_at + first_local * k_row, (n - first_local) * k_row)
    scaled = scaled_copy(q[h0 : h0 + heads], np.float32(rules.scale))
    near = np.empty((heads, SINKS + LOCAL + 1 + PAD), np.float32)
    active = np.zeros(heads, np.bool_)
    n_active = 0
    for t in range(heads):
        at = near[t].ctypes.data
        query = scaled[t].ctypes.data
        tile_scores(1, k_kind, query, k_at, k_row, 0, SINKS, d, at, 0)
        tile_scores(
            1, k_kind, query, k_at + first_local * k_row, k_row, 0, n - first_local, d,
            at + 4 * SINKS, 0,
        )  # fmt: skip
        active[t] = True
        if may_bypass(near[t], n_near, rules.epsilon):
            statistics[unit, TESTED] += 1
            active[t] = not bypass(
                scaled[t], near[t], n_near, constants, kv_head, constants.ratio[h0 + t], v_at,
                v_row, v_kind, first_local, n, rules.epsilon, lse[h0 + t : h0 + t + 1], out[h0 + t],
            )  # fmt: skip
        n_active += active[t]
        if not active[t] and attended.shape[1]:
            n_attended[h0 + t] = n_near
            for j in range(n_near):
                near_row = j if j < SINKS else first_local + j - SINKS
                attended[h0 + t, j] = near_row
    statistics[unit, ROWS] += heads * n
    statistics[unit, SCORED] += heads * n_near
    statistics[unit, KEYS_READ] += heads * n_near
    statistics[unit, HEAD_STEPS] += heads
    statistics[unit, BYPASSED] += heads - n_active
    statistics[unit, ATTENDED] += (heads - n_active) * n_near
    if n_active == 0:
        return Search(scaled, near, active, n_active, np.empty(0, np.int32))
    rows = _candidates(unit, n, n_recent, limit, rules, tables, raised, statistics)
    count = rows.shape[0]
    statistics[unit, SCORED] += n_active * (count - min(count, n_near - SINKS))
    for j in range(min(count, AHEAD_SEARCH)):  # the others are asked for as the scores proceed
        prefetch_lines(k_at + rows[j] * k_row, k_row)
    return Search(scaled, near, active, n_active, rows)


@njit(cache=True, nogil=True)
def _score_candidates(search, k_at, k_row, k_kind, reads):
    """Scores f32 (heads, count + PAD) of the candidates; reads, int64 (1,), counts the keys."""
    heads, d = search.queries.shape
    rows = search.rows
    count = rows.shape[0]
    stride = count + PAD
    scores = np.empty((heads, stride), np.float32)
    if search.n_active == heads:  # a tile of heads shares each key row
        reads[0] += count * ((heads + 3) // 4)
        for t in range(0, heads, 4):
            tile_scores(
                min(4, heads - t), k_kind | GATHER, search.queries[t].ctypes.data, k_at, k_row,
                rows.ctypes.data, count, d, scores[t].ctypes.data, stride,
            )  # fmt: skip
    else:
        reads[0] += count * search.n_active
        for t in range(heads):
            if search.active[t]:
                tile_scores(
                    1, k_kind | GATHER, search.queries[t].ctypes.data, k_at, k_row,
                    rows.ctypes.data, count, d, scores[t].ctypes.data, 0,
                )  # fmt: skip
    return scores


@njit(cache=True, nogil=True)
def _attend_unit(
    unit, search, scores, k_budget, n_recent, v_at, v_row, v_kind, n, decay, tables, statistics,
    attended, n_attended, lse, out,
):  # fmt: skip
    """Attention and learning of a unit's active heads."""
    heads = search.active.shape[0]
    h0 = unit * heads
    count = search.rows.shape[0]
    keys = np.empty(count, np.int32)
    chosen = np.empty(min(count, k_budget), np.int32)
    gain = tables.gain[unit] * decay
    part = 1.0 / (gain * search.n_active)
    for t in range(heads):
        if not search.active[t]:
            continue
        picked = _attend_candidates(
            unit, search.near[t], search.rows, scores[t], k_budget, n_recent, v_at, v_row, v_kind,
            tables, part, n, keys, chosen, lse[h0 + t : h0 + t + 1], out[h0 + t],
        )  # fmt: skip
        m = min(count, k_budget)
        statistics[unit, ATTENDED] += m + SINKS
        if attended.shape[1]:
            n_attended[h0 + t] = m + SINKS
            for j in range(SINKS):
                attended[h0 + t, j] = j
            for j in range(m):
                attended[h0 + t, SINKS + j] = picked[j]
    if gain < RESCALE_BELOW:
        rescale_tables(unit, tables, gain, n)
        gain = 1.0
    tables.gain[unit] = gain


@njit(cache=True, nogil=True)
def _step_units(
    counter, q, layout, n, k_budget, limit, rules, tables, raised, constants, statistics, attended,
    n_attended, lse, out, n_threads,
):  # fmt: skip
    """Takes tasks until there are none: whole kv groups, whose heads share key rows in this
    thread's cache, while every thread can have one; then single units.

    Of a kv group's units the next one's candidates are searched, and their first keys asked for,
    before this one attends, which works mostly in the caches.
    """
    n_kv_head, n_unit = rules.n_kv_head, tables.gain.shape[0]
    a_group = n_unit // n_kv_head
    n_whole = n_kv_head // n_threads * n_threads
    n_recent = max(1, min(rules.recent, k_budget // 2))  # the current row is always a candidate
    k_row, v_row, k_kind, v_kind = layout[K_ROW], layout[V_ROW], layout[K_KIND], layout[V_KIND]
    task = next_task(counter)
    while task < n_whole + (n_kv_head - n_whole) * a_group:
        first, last = task * a_group, (task + 1) * a_group
        if task >= n_whole:
            first = n_whole * a_group + task - n_whole
            last = first + 1
        prefetch_tables(first, n, rules, tables, raised)
        search = _search_unit(
            first, q, layout, n, n_recent, limit, rules, tables, raised, constants, statistics,
            attended, n_attended, lse, out,
        )  # fmt: skip
        for unit in range(first, last):
            kv_head = unit // a_group
            k_at = layout[K] + kv_head * layout[K_HEAD]
            v_at = layout[V] + kv_head * layout[V_HEAD]
            now = search
            if unit + 1 < last:
                prefetch_tables(unit + 1, n, rules, tables, raised)
            scores = _score_candidates(
                now, k_at, k_row, k_kind, statistics[unit, KEYS_READ : KEYS_READ + 1]
            )
            if unit + 1 < last:
                search = _search_unit(
                    unit + 1, q, layout, n, n_recent, limit, rules, tables, raised, constants,
                    statistics, attended, n_attended, lse, out,
                )  # fmt: skip
            if now.n_active:
                _attend_unit(
                    unit, now, scores, k_budget, n_recent, v_at, v_row, v_kind, n, rules.decay,
                    tables, statistics, attended, n_attended, lse, out,
                )  # fmt: skip
        task = next_task(counter)


@njit(cache=True, nogil=True, parallel=PRANGE_ONLY)
def lfps_step(
    q, k, v, layout, n, k_budget, limit, rules, tables, raised, constants, statistics, attended,
    n_attended, lse, out, n_threads,
):  # fmt: skip
    """One decode step of a layer (Algorithm 1): stores the current token as row n - 1, and attends.

    q f32 (H, 1, d), k (G, 1, d), v (G, 1, d_v); layout int64 (8,), see rows.py. k_budget = |C2|;
    limit: most rows of C1, at least R; raised f64 (U,): by how much it has raised the thresholds.
    tables: history.py; constants: bypass.py. statistics int64 (U, N_STATISTICS), added to. attended
    int32 (H, m), n_attended int64 (H,): the rows that each head attended to, sinks first; m = 0
    leaves them out. out f32 (H, d_v). lse f32 (H,): the sinks are left out of ``out``, and this is
    the log of the sum of exponentials of the scores that it covers; (0,): they are in it.
    """
    append_row(k[:, 0], v[:, 0], layout, n - 1)
    queries = q[:, 0]
    counter = np.zeros(1, np.int64)
    for _thread in prange(n_threads):
        _step_units(
            counter, queries, layout, n, k_budget, limit, rules, tables, raised, constants,
            statistics, attended, n_attended, lse, out, n_threads,
        )  # fmt: skip
