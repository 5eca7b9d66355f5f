"""The first half of an LFPS step: the bypass test of each head, and the other heads' candidates.

Heads that score the same candidates are a head group: a kv group (``by_group``), or a single head.
Functions that take a StepState are inlined, because passing it by value takes .3 to .6 us a call.
"""

from typing import NamedTuple

import numpy as np
from numba import njit

from sparsekv_cli.cpu.attention.rows import K_HEAD, K_KIND, K_ROW, V_HEAD, V_KIND, V_ROW, K, V
from sparsekv_cli.cpu.attention.softmax import soften
from sparsekv_cli.cpu.attention.tile import MAX_TILE, tile_scores
from sparsekv_cli.cpu.jit.llvm import prefetch_lines
from sparsekv_cli.cpu.lfps.bypass import Constants, bypass, may_bypass
from sparsekv_cli.cpu.lfps.history import (
    BLOCK,
    SINKS,
    Tables,
    count_rows,
    expand,
    extract_rows,
    filter_expansion,
    mark_slash,
    mark_vertical,
    prefetch_above,
    set_range,
    threshold,
)
from sparsekv_cli.cpu.lfps.scout import FOUND, PART, Codes, find_rows

LOCAL = 6  # keys before the current one in the local mass of the bypass test (eq 6)
# Columns of the statistics (int64, one row a head).
ROWS, SCORED, ATTENDED, TESTED, BYPASSED, HEAD_STEPS = range(6)
BOUNDS_READ, ENTRIES_READ, KEYS_READ, SCOUTING, CODES_READ = range(6, 11)
N_STATISTICS = 11
RAISE = 1.25  # factor of the thresholds if too many rows pass
LOWER_BELOW = 0.7  # thresholds fall again if fewer rows pass than this share of the limit
# Columns of Work.progress, each on a cache line. SEARCHED: finished searches of a head group, plus
# one when its candidates are merged. SCORES_DONE: finished parts of its scores.
SEARCHED, SCORES_DONE, N_PROGRESS = 0, 8, 16


class Rules(NamedTuple):
    """The method's options for the kernels; symbols as in the paper."""

    scale: float
    n_kv_head: int
    recent: int  # R
    a: float
    horizon: int  # most entries in the mean of the thresholds, see ``threshold``
    decay: float  # r
    epsilon: float
    filtered: bool  # whether neighbours must be above the mean (eq 9)
    by_group: bool  # whether a kv group's heads score each other's candidates
    softcap: float  # of the scores; 0 for none


class Work(NamedTuple):
    """Arrays that tasks of a step share: H heads in T head groups."""

    queries: np.ndarray  # f32 (H, d), scaled; later a head group's active heads come first
    near: np.ndarray  # f32 (H, >= n_near): capped scores of the sinks and of the local rows
    active: np.ndarray  # int64 (H,): 1, or 0 for a bypassed head
    taus: np.ndarray  # f64 (H, 2): thresholds of the two tables (eq 8), before they are raised
    bits: np.ndarray  # uint64 (H, n // 64 + 2): rows above a threshold, a bit each
    found: np.ndarray  # int32 (H, m): rows that the scout found; 0 for none
    rows: np.ndarray  # int32 (T, >= limit + AT_ONCE): starts with C1, ascending
    n_rows: np.ndarray  # int64 (T,): |C1|; 0 if no head is active
    scores: np.ndarray  # f32 (T, H / T, >= limit + PAD): of C1 for active heads, not capped
    progress: np.ndarray  # int64 (T, N_PROGRESS)


class PendingUpdate(NamedTuple):
    """An update of the tables that ``update_tasks`` (lfps/attend.py) does after the step.

    The arrays have no columns if the step itself updates the tables.
    """

    rows: np.ndarray  # int32 (H, >= k_budget): C2
    weights: np.ndarray  # f32 (H, >= k_budget): softmax weights of C2, not normalised
    sizes: np.ndarray  # int64 (H,): |C2|; 0 for a bypassed head
    masses: np.ndarray  # f64 (H,): the sum of the weights


class Journal(NamedTuple):
    """Old entries of an update. Without columns the update cannot be undone."""

    rows: np.ndarray  # int32 (H, >= k_budget): C2
    entries: np.ndarray  # f32 (2, H, >= k_budget): the old entries of C2 in both tables
    sizes: np.ndarray  # int64 (H,): |C2|; 0 for a bypassed head


class Scratch(NamedTuple):
    """Buffers of one thread."""

    bits: np.ndarray  # uint64 (2, n // 64 + 2)
    keys: np.ndarray  # int32 (limit,)
    chosen: np.ndarray  # int32 (k_budget,)
    picked: np.ndarray  # int32 (k_budget,)
    weights: np.ndarray  # f32 (k_budget + PAD,)
    changes: np.ndarray  # f32 (4, k_budget)


class StepState(NamedTuple):
    """Everything that a step reads and writes, for H query heads; see lfps/step.py."""

    q: np.ndarray  # f32 (H, d)
    layout: np.ndarray  # int64 (8,), see attention/rows.py
    n: int  # rows, with the current token's
    k_budget: int  # |C2|
    n_recent: int  # last rows of C1, always chosen: R, but at most half the budget
    limit: int  # most rows of C1
    rules: Rules
    tables: Tables
    raised: np.ndarray  # f64 (H,): factor of the thresholds
    constants: Constants
    statistics: np.ndarray  # int64 (H, N_STATISTICS)
    attended: np.ndarray  # int32 (H, m)
    n_attended: np.ndarray  # int64 (H,)
    lse: np.ndarray  # f32 (H,) or (0,)
    sinks: np.ndarray  # f32 (H,): each head's score without a value, -inf for none
    out: np.ndarray  # f32 (H, d_v)
    work: Work
    pending: PendingUpdate
    journal: Journal
    codes: Codes
    is_marked: bool  # whether ``work`` has the thresholds and the bits of C0 already
    scratch: Scratch


@njit(cache=True, nogil=True, forceinline=True)
def ask_for_entries(h, step):
    """Computes a head's thresholds; prefetches the entries that its search will read."""
    if step.is_marked:
        return
    n, rules, tables = step.n, step.rules, step.tables
    taus, sums, raised = step.work.taus[h], tables.sums[h], step.raised[h]
    for t in range(2):
        taus[t] = threshold(sums[t], n - SINKS, rules.a, rules.horizon)
    prefetch_above(tables.ver[h], tables.ver_bounds[h], n, raised * taus[0])
    prefetch_above(tables.dist[h], tables.dist_bounds[h], n - SINKS, raised * taus[1])


@njit(cache=True, nogil=True)
def mark(h, factor, step):
    """Sets the bits of a head's C0 (eq 8), with thresholds raised by ``factor``.

    If neighbours are filtered, it sets the bits of C1 (eq 9), because each head filters its own.
    """
    n, tables, statistics = step.n, step.tables, step.statistics
    bits, n_words = step.work.bits[h], (n + BLOCK - 1) // BLOCK
    ver, dist = tables.ver[h], tables.dist[h]
    tau_ver, tau_dist = step.work.taus[h]
    bits[:] = 0
    n_read = mark_vertical(ver, tables.ver_bounds[h], n, factor * tau_ver, bits)
    n_read += mark_slash(dist, tables.dist_bounds[h], n, factor * tau_dist, bits)
    statistics[h, ENTRIES_READ] += n_read
    statistics[h, BOUNDS_READ] += 2 * n_words
    if step.rules.filtered:
        sums, n_known = tables.sums[h], n - SINKS
        wide = step.scratch.bits[0]
        expand(bits, wide, n_words)
        filter_expansion(
            wide, bits, n_words, ver, dist, n, sums[0, 0] / n_known, sums[1, 0] / n_known
        )
        for w in range(n_words):
            bits[w] = wide[w]


@njit(cache=True, nogil=True, forceinline=True)
def scout(head_group, step):
    """Finds rows in the step's slice of all rows, for each head of a group."""
    n_head, n_head_groups = step.q.shape[0], step.work.rows.shape[0]
    first, last = head_group * n_head // n_head_groups, (head_group + 1) * n_head // n_head_groups
    found, codes = step.work.found[first:last], step.codes
    found[:] = 0
    if found.shape[1] == 0 or codes.n_parts == 0:
        return
    n_slices = (codes.n_parts + found.shape[1] - 1) // found.shape[1]
    at, kv_head = step.n % n_slices, first // (n_head // step.rules.n_kv_head)
    begin, end = at * codes.n_parts // n_slices, (at + 1) * codes.n_parts // n_slices
    find_rows(step.work.queries[first:last], codes, kv_head, begin, end, found)
    step.statistics[first, SCOUTING] += 1
    step.statistics[first, CODES_READ] += (end - begin) * PART


@njit(cache=True, nogil=True, forceinline=True)
def search_head(h, step):
    """Runs a head's bypass test. Writes its output if it is bypassed, marks its C0 otherwise."""
    n, layout, rules, constants = step.n, step.layout, step.rules, step.constants
    statistics, near, active = step.statistics, step.work.near, step.work.active
    n_head, d = step.q.shape
    first_local = max(SINKS, n - 1 - LOCAL)
    n_near = SINKS + n - first_local
    kv_head = h // (n_head // rules.n_kv_head)
    k_row, v_row, k_kind, v_kind = layout[K_ROW], layout[V_ROW], layout[K_KIND], layout[V_KIND]
    k_at = layout[K] + kv_head * layout[K_HEAD]
    v_at = layout[V] + kv_head * layout[V_HEAD]
    prefetch_lines(k_at, SINKS * k_row)
    prefetch_lines(k_at + first_local * k_row, (n - first_local) * k_row)
    query = step.work.queries[h]
    for c in range(d):
        query[c] = step.q[h, c] * np.float32(rules.scale)
    at = near[h].ctypes.data
    tile_scores(1, k_kind, query.ctypes.data, k_at, k_row, 0, SINKS, d, at, 0)
    tile_scores(
        1, k_kind, query.ctypes.data, k_at + first_local * k_row, k_row, 0, n - first_local, d,
        at + 4 * SINKS, 0,
    )  # fmt: skip
    if rules.softcap:
        soften(at, n_near, np.float32(rules.softcap))
    active[h] = 1
    if may_bypass(near[h], n_near, step.sinks[h], rules.epsilon):
        statistics[h, TESTED] += 1
        active[h] = not bypass(
            query, near[h], n_near, step.sinks[h], rules.softcap, constants, kv_head,
            constants.ratio[h], v_at, v_row, v_kind, first_local, n, rules.epsilon,
            step.lse[h : h + 1], step.out[h],
        )  # fmt: skip
    statistics[h, ROWS] += n
    statistics[h, SCORED] += n_near
    statistics[h, KEYS_READ] += n_near
    statistics[h, HEAD_STEPS] += 1
    if active[h]:
        if not step.is_marked:
            mark(h, step.raised[h], step)
        return
    statistics[h, BYPASSED] += 1
    statistics[h, ATTENDED] += n_near
    if step.attended.shape[1]:
        step.n_attended[h] = n_near
        for j in range(n_near):
            step.attended[h, j] = j if j < SINKS else first_local + j - SINKS


@njit(cache=True, nogil=True, forceinline=True)
def merge_candidates(head_group, step):
    """Makes C1 of a head group, ascending (eq 9).

    C1 is its active heads' C0 with neighbours, the recents, and the rows that the scout found.
    While more than ``limit`` rows pass, the thresholds rise by RAISE. ``raised`` f64 (H,) keeps the
    factor from step to step. The factor falls if fewer than LOWER_BELOW times ``limit`` rows pass.
    In ``work.queries`` the head group's active heads move to the front.
    """
    n, work, statistics = step.n, step.work, step.statistics
    n_head, n_head_groups = step.q.shape[0], work.rows.shape[0]
    first, last = head_group * n_head // n_head_groups, (head_group + 1) * n_head // n_head_groups
    n_active = work.active[first:last].sum()
    if n_active == 0:
        work.n_rows[head_group] = 0
        return
    scout(head_group, step)
    n_words = (n + BLOCK - 1) // BLOCK
    merged, wide = step.scratch.bits
    factor = step.raised[first]
    while True:
        merged[:] = 0
        for h in range(first, last):
            for w in range(n_words if work.active[h] else 0):
                merged[w] |= work.bits[h, w]
        if step.rules.filtered:
            for w in range(n_words):
                wide[w] = merged[w]
        else:
            expand(merged, wide, n_words)
        for h in range(first, last):
            for j in range(min(FOUND, work.found.shape[1]) if work.active[h] else 0):
                set_range(wide, work.found[h, j], work.found[h, j] + 1)
        set_range(wide, n - step.n_recent, n)
        count = count_rows(wide, n_words, n)
        if count <= step.limit:
            break
        factor *= RAISE
        for h in range(first, last):
            if work.active[h]:
                mark(h, factor, step)
    lowers = count < LOWER_BELOW * step.limit
    for h in range(first, last):
        step.raised[h] = max(1.0, factor / RAISE) if lowers else factor
    extract_rows(wide, n_words, work.rows[head_group])
    work.n_rows[head_group] = count
    n_scored = count - min(count, n - max(SINKS, n - 1 - LOCAL))  # local rows are scored already
    slot = first
    for h in range(first, last):
        if work.active[h]:
            statistics[h, SCORED] += n_scored
            for c in range(work.queries.shape[1]):
                work.queries[slot, c] = work.queries[h, c]
            slot += 1
    statistics[first, KEYS_READ] += count * ((n_active + MAX_TILE - 1) // MAX_TILE)
