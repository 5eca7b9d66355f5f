"""The first half of an LFPS step: the bypass test of each head, and the other heads' candidates.

Heads that score the same candidates are a head group: a kv group (``by_group``), or a single head.
Functions that take a step are inlined, because passing it by value takes .3 to .6 us a call. step:
a view of LFPSState; memory: a StepMemory.
"""

import numpy as np

from sparsekv_cli.cpu.attention.rows import K_HEAD, K_KIND, K_ROW, V_HEAD, V_KIND, V_ROW, K, V
from sparsekv_cli.cpu.attention.softmax import soften
from sparsekv_cli.cpu.attention.tile import MAX_TILE, tile_scores
from sparsekv_cli.cpu.jit.kernel import njit
from sparsekv_cli.cpu.jit.llvm import prefetch_lines
from sparsekv_cli.cpu.lfps.bypass import bypass, may_bypass
from sparsekv_cli.cpu.lfps.history import (
    BLOCK,
    SINKS,
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
from sparsekv_cli.cpu.lfps.scout import PART, find_rows
from sparsekv_cli.cpu.lfps.state import (
    ATTENDED,
    BOUNDS_READ,
    BYPASSED,
    CODES_READ,
    ENTRIES_READ,
    HEAD_STEPS,
    KEYS_READ,
    LOCAL,
    ROWS,
    SCORED,
    SCOUTING,
    TESTED,
)

RAISE = 1.25  # factor of the thresholds if too many rows pass
LOWER_BELOW = 0.7  # thresholds fall again if fewer rows pass than this share of the limit


@njit(cache=True, nogil=True, forceinline=True)
def ask_for_entries(h, step, memory):
    """Computes a head's thresholds; prefetches the entries that its search will read."""
    if step.is_marked:
        return
    n, rules, tables = step.n, step.rules, step.tables
    taus, sums, raised = memory.marks.taus[h], tables.sums[h], step.raised[h]
    for t in range(2):
        taus[t] = threshold(sums[t], n - SINKS, rules.a, rules.horizon)
    prefetch_above(tables.ver[h], tables.ver_bounds[h], n, raised * taus[0])
    prefetch_above(tables.dist[h], tables.dist_bounds[h], n - SINKS, raised * taus[1])


@njit(cache=True, nogil=True)
def mark(h, factor, step, memory):
    """Sets the bits of a head's C0 (eq 8), with thresholds raised by ``factor``.

    If neighbours are filtered, it sets the bits of C1 (eq 9), because each head filters its own.
    """
    n, tables, statistics = step.n, step.tables, step.statistics
    bits, n_words = memory.marks.bits[h], (n + BLOCK - 1) // BLOCK
    ver, dist = tables.ver[h], tables.dist[h]
    tau_ver, tau_dist = memory.marks.taus[h]
    bits[:] = 0
    n_read = mark_vertical(ver, tables.ver_bounds[h], n, factor * tau_ver, bits)
    n_read += mark_slash(dist, tables.dist_bounds[h], n, factor * tau_dist, bits)
    statistics[h, ENTRIES_READ] += n_read
    statistics[h, BOUNDS_READ] += 2 * n_words
    if step.rules.filtered:
        sums, n_known = tables.sums[h], n - SINKS
        wide = memory.own.bits[0]
        expand(bits, wide, n_words)
        filter_expansion(
            wide, bits, n_words, ver, dist, n, sums[0, 0] / n_known, sums[1, 0] / n_known
        )
        for w in range(n_words):
            bits[w] = wide[w]


@njit(cache=True, nogil=True, forceinline=True)
def scout(head_group, step, memory):
    """Finds rows in the step's slice of all rows, for each head of a group."""
    n_head, n_head_groups = step.n_head, step.n_head_groups
    first, last = head_group * n_head // n_head_groups, (head_group + 1) * n_head // n_head_groups
    found, codes = memory.work.found[first:last], step.codes
    found[:] = 0
    if step.n_scanned == 0 or codes.n_parts == 0:
        return
    n_slices = (codes.n_parts + step.n_scanned - 1) // step.n_scanned
    at, kv_head = step.n % n_slices, first // (n_head // step.rules.n_kv_head)
    begin, end = at * codes.n_parts // n_slices, (at + 1) * codes.n_parts // n_slices
    find_rows(memory.work.queries[first:last], codes, kv_head, begin, end, found)
    step.statistics[first, SCOUTING] += 1
    step.statistics[first, CODES_READ] += (end - begin) * PART


@njit(cache=True, nogil=True, forceinline=True)
def search_head(h, step, memory):
    """Runs a head's bypass test. Writes its output if it is bypassed, marks its C0 otherwise."""
    n, layout, rules, constants = step.n, step.layout, step.rules, step.constants
    statistics, near, active = step.statistics, memory.work.near, memory.work.active
    n_head, d = step.n_head, step.k_width
    first_local = max(SINKS, n - 1 - LOCAL)
    n_near = SINKS + n - first_local
    kv_head = h // (n_head // rules.n_kv_head)
    k_row, v_row, k_kind, v_kind = layout[K_ROW], layout[V_ROW], layout[K_KIND], layout[V_KIND]
    k_at = layout[K] + kv_head * layout[K_HEAD]
    v_at = layout[V] + kv_head * layout[V_HEAD]
    prefetch_lines(k_at, SINKS * k_row)
    prefetch_lines(k_at + first_local * k_row, (n - first_local) * k_row)
    query = memory.work.queries[h]
    for c in range(d):
        query[c] = step.q[h, c] * np.float32(rules.scale)
    local, scores = k_at + first_local * k_row, near[h]
    tile_scores(1, k_kind, query, k_at, k_row, 0, SINKS, d, scores, 0)
    tile_scores(1, k_kind, query, local, k_row, 0, n - first_local, d, scores[SINKS:], 0)
    if rules.softcap:
        soften(scores, n_near, np.float32(rules.softcap))
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
            mark(h, step.raised[h], step, memory)
        return
    statistics[h, BYPASSED] += 1
    statistics[h, ATTENDED] += n_near
    if step.attended.shape[1]:
        step.n_attended[h] = n_near
        for j in range(n_near):
            step.attended[h, j] = j if j < SINKS else first_local + j - SINKS


@njit(cache=True, nogil=True, forceinline=True)
def merge_candidates(head_group, step, memory):
    """Makes C1 of a head group, ascending (eq 9).

    C1 is its active heads' C0 with neighbours, the recents, and the rows that the scout found.
    While more than ``limit`` rows pass, the thresholds rise by RAISE. ``raised`` f64 (H,) keeps the
    factor from step to step. The factor falls if fewer than LOWER_BELOW times ``limit`` rows pass.
    In ``work.queries`` the head group's active heads move to the front.
    """
    n, work, statistics = step.n, memory.work, step.statistics
    n_head, n_head_groups = step.n_head, step.n_head_groups
    first, last = head_group * n_head // n_head_groups, (head_group + 1) * n_head // n_head_groups
    n_active = work.active[first:last].sum()
    if n_active == 0:
        work.n_rows[head_group] = 0
        return
    scout(head_group, step, memory)
    n_words = (n + BLOCK - 1) // BLOCK
    merged, wide = memory.own.bits
    factor = step.raised[first]
    while True:
        merged[:] = 0
        for h in range(first, last):
            for w in range(n_words if work.active[h] else 0):
                merged[w] |= memory.marks.bits[h, w]
        if step.rules.filtered:
            for w in range(n_words):
                wide[w] = merged[w]
        else:
            expand(merged, wide, n_words)
        for h in range(first, last):
            for j in range(work.found.shape[1] if work.active[h] else 0):
                set_range(wide, work.found[h, j], work.found[h, j] + 1)
        set_range(wide, n - step.n_recent, n)
        count = count_rows(wide, n_words, n)
        if count <= step.limit:
            break
        factor *= RAISE
        for h in range(first, last):
            if work.active[h]:
                mark(h, factor, step, memory)
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
