"""The second half of an LFPS step: scores of the candidates, attention, and the tables' update.

lfps/search.py finds the candidates, lfps/start.py fills the tables after a prefill. ``run_tasks``
shares a step between threads. step: a view of LFPSState; memory: a StepMemory (lfps/state.py).
"""

import numpy as np

from sparsekv_cli.cpu.attention.rows import (
    GATHER,
    K_HEAD,
    K_KIND,
    K_ROW,
    V_HEAD,
    V_KIND,
    V_ROW,
    K,
    V,
)
from sparsekv_cli.cpu.attention.select import order_keys, select_largest
from sparsekv_cli.cpu.attention.softmax import NEGATIVE_INFINITY, exp_in_place, max_of, soften
from sparsekv_cli.cpu.attention.tile import AHEAD_GATHER, MAX_TILE, tile_scores, tile_values
from sparsekv_cli.cpu.jit.kernel import njit
from sparsekv_cli.cpu.jit.llvm import prefetch_lines, tasks_of
from sparsekv_cli.cpu.jit.pool import atomic_add, wait_for
from sparsekv_cli.cpu.jit.value import LANES
from sparsekv_cli.cpu.lfps.history import RESCALE_BELOW, SINKS, add_entries, rescale_tables
from sparsekv_cli.cpu.lfps.search import ask_for_entries, mark, merge_candidates, search_head
from sparsekv_cli.cpu.lfps.state import ATTENDED, SCORES_DONE, SEARCHED

SCORE_PIECE = 240  # rows of C1: a multiple of the rows that tile_scores takes, for every tile


@njit(cache=True, nogil=True, forceinline=True)
def _score_part(head_group, part, n_parts, step, memory):
    """Scores a part of C1 for a head group's active heads. A tile of heads shares each key row."""
    work, layout, rules = memory.work, step.layout, step.rules
    n_head, d, n_head_groups = step.n_head, step.k_width, step.n_head_groups
    count = work.n_rows[head_group]
    piece = n_parts * SCORE_PIECE
    size = (count + piece - 1) // piece * SCORE_PIECE
    first, last = part * size, min(count, (part + 1) * size)
    if first >= last:
        return
    h0, heads = head_group * n_head // n_head_groups, n_head // n_head_groups
    k_row, mode = layout[K_ROW], layout[K_KIND] | GATHER
    k_at = layout[K] + h0 // (n_head // rules.n_kv_head) * layout[K_HEAD]
    for j in range(first, min(last, first + AHEAD_GATHER)):  # prefetch the others while scoring
        prefetch_lines(k_at + work.rows[head_group, j] * k_row, k_row)
    n_active = work.active[h0 : h0 + heads].sum()
    for t in range(0, n_active, MAX_TILE):
        tile_scores(
            min(MAX_TILE, n_active - t), mode, work.queries[h0 + t], k_at, k_row,
            work.rows[head_group, first:], last - first, d,
            work.scores[head_group, t, first:], work.scores.shape[2],
        )  # fmt: skip


@njit(cache=True, nogil=True, forceinline=True)
def _add_to_tables(h, rows, weights, total_weight, part, at, row_bytes, step, memory):
    """Adds weights, whose sum is total_weight, to a head's tables (eq 10); fills the journal.

    at, row_bytes: the rows to prefetch, see ``add_entries``.
    """
    m, changes, journal = rows.shape[0], memory.own.changes, step.journal
    add_entries(
        h, step.tables, step.n, rows, weights, 0.5 * total_weight / m, part / total_weight, at,
        row_bytes, changes,
    )  # fmt: skip
    if journal.rows.shape[1]:
        journal.sizes[h] = m
        for j in range(m):
            journal.rows[h, j] = rows[j]
            journal.entries[0, h, j], journal.entries[1, h, j] = changes[0, j], changes[1, j]


@njit(cache=True, nogil=True, forceinline=True)
def _attend_rows(h, rows, scores, part, step, memory):
    """Chooses C2, attends to the sinks and C2, and updates the tables (eq 10).

    C2 is the recents and the best of C1 by exact score. rows: C1, ascending; its last n_recent are
    the recents. scores: f32 (count + PAD,), of ``rows``. A softcap keeps their order, so only the
    scores of C2 are capped. The update adds ``part`` times (softmax over C2 - half its mean) to the
    entries of C2 in the head's tables. If the step defers it, ``_update_head`` does it later.
    Returns C2's rows int32 (m,), in the thread's scratch.
    """
    tables, layout, n, n_recent = step.tables, step.layout, step.n, step.n_recent
    sinks, out, lse = memory.work.near[h], step.out[h], step.lse[h : h + 1]
    v_row, v_kind = layout[V_ROW], layout[V_KIND]
    v = layout[V] + h // (step.n_head // step.rules.n_kv_head) * layout[V_HEAD]
    ver, dist = tables.ver[h], tables.dist[h]
    count = rows.shape[0]
    m = min(count, step.k_budget)
    keys, chosen, weights = memory.own.keys, memory.own.chosen, memory.own.weights
    picked = memory.own.picked[:m]
    n_old = count - n_recent
    if m < count:
        order_keys(scores, keys, n_old)
        select_largest(keys, n_old, m - n_recent, chosen)
        for j in range(n_recent):
            chosen[m - n_recent + j] = n_old + j
    else:
        for j in range(m):
            chosen[j] = j
    for j in range(m):
        at = np.uint64(chosen[j])
        i = rows[at]
        picked[j] = i
        prefetch_lines(ver.ctypes.data + 4 * i, 4)
        prefetch_lines(dist.ctypes.data + 4 * (n - 1 - i), 4)
        weights[j] = scores[at]
    for j in range(m, m + LANES):
        weights[j] = NEGATIVE_INFINITY
    if step.rules.softcap:
        soften(weights, m, np.float32(step.rules.softcap))
    peak = max(max_of(weights, m), step.sinks[h])
    sink_weights = np.empty(SINKS, np.float32)
    for j in range(SINKS):
        peak = max(peak, sinks[j])
    sink_mass = np.float32(0)
    for j in range(SINKS):
        sink_weights[j] = np.exp(sinks[j] - peak)
        sink_mass += sink_weights[j]
    mass = exp_in_place(weights, m, peak)
    total = sink_mass + mass + np.exp(step.sinks[h] - peak)
    d_v = out.shape[0]
    out[:] = 0
    if lse.shape[0]:
        lse[0] = peak + np.log(mass)
        total = mass if mass > 0 else np.float32(1)  # if mass is 0, the output is not read
    else:
        tile_values(1, v_kind, sink_weights, 0, v, v_row, 0, SINKS, d_v, out)
    total_weight = np.float64(mass)
    if mass == 0:  # the sinks' scores are so high that C2's weights are 0: no information
        weights[:m] = 1
        total_weight = np.float64(m)
    if step.pending.rows.shape[1]:
        step.pending.sizes[h], step.pending.masses[h] = m, total_weight
        for j in range(m):
            step.pending.rows[h, j], step.pending.weights[h, j] = picked[j], weights[j]
            prefetch_lines(v + picked[j] * v_row, v_row)
    else:  # the update prefetches the values
        _add_to_tables(h, picked, weights, total_weight, part, v, v_row, step, memory)
    if mass > 0:
        tile_values(1, v_kind | GATHER, weights, 0, v, v_row, picked, m, d_v, out)
    for c in range(d_v):
        out[c] /= total
    return picked


@njit(cache=True, nogil=True, forceinline=True)
def _attend_head(h, step, memory):
    """Attends with query head h to its best candidates and updates its two tables.

    It does nothing if the high-sparsity test has bypassed the head, i.e. work.active[h] is 0.
    step: the view of an LFPSState (lfps/state.py). memory: the scratch of the step and the thread.
    """
    work, tables = memory.work, step.tables
    if not work.active[h]:
        return
    n_head, n_head_groups = step.n_head, step.n_head_groups
    head_group = h * n_head_groups // n_head
    first = head_group * n_head // n_head_groups
    rows = work.rows[head_group, : work.n_rows[head_group]]
    m = min(rows.shape[0], step.k_budget)
    gain = tables.gain[h] * step.rules.decay
    scores = work.scores[head_group, work.active[first:h].sum()]
    picked = _attend_rows(h, rows, scores, 1.0 / gain, step, memory)
    step.statistics[h, ATTENDED] += m + SINKS
    if step.attended.shape[1]:
        step.n_attended[h] = m + SINKS
        for j in range(SINKS):
            step.attended[h, j] = j
        for j in range(m):
            step.attended[h, SINKS + j] = picked[j]
    if not step.pending.rows.shape[1]:
        _decay(h, gain, step)


@njit(cache=True, nogil=True, forceinline=True)
def _decay(h, gain, step):
    """Sets g of a head's tables. If g is small, it is multiplied into the entries."""
    if gain < RESCALE_BELOW:
        rescale_tables(h, step.tables, gain, step.n)
        gain = 1.0
    step.tables.gain[h] = gain


@njit(cache=True, nogil=True)
def _update_head(h, step, memory):
    """Updates a head's tables (eq 10) by the rows that it attended to, unless it was bypassed."""
    pending, tables = step.pending, step.tables
    m = pending.sizes[h]
    if m == 0:
        return
    gain, total_weight = tables.gain[h] * step.rules.decay, pending.masses[h]
    rows, weights = pending.rows[h, :m], pending.weights[h]
    _add_to_tables(h, rows, weights, total_weight, 1.0 / gain, step.layout[V], 0, step, memory)
    _decay(h, gain, step)
    pending.sizes[h] = 0


@njit(cache=True, nogil=True, forceinline=True)
def update_tasks(counter, step, memory):
    """Updates heads' tables after a step, in one thread, until no head is left."""
    for h in tasks_of(counter, step.n_head):
        _update_head(h, step, memory)


@njit(cache=True, nogil=True, forceinline=True)
def mark_tasks(counter, step, memory):
    """Marks heads' candidates C0 before a step (eq 7, 8), in one thread."""
    for h in tasks_of(counter, step.n_head):
        ask_for_entries(h, step, memory)
        mark(h, step.raised[h], step, memory)


@njit(cache=True, nogil=True, forceinline=True)
def _run(task, head_group, n_parts, step, memory):
    """Runs one task of a head group: a search, one of ``n_parts`` of the scores, or attention.

    The task waits for the results of earlier tasks of the head group. Other threads may run these.
    """
    n_head_groups = step.n_head_groups
    heads = step.n_head // n_head_groups
    progress = memory.work.progress[head_group].ctypes.data
    if task < heads:
        search_head(head_group * heads + task, step, memory)
        if atomic_add(progress + 8 * SEARCHED, 1) == heads - 1:
            merge_candidates(head_group, step, memory)
            atomic_add(progress + 8 * SEARCHED, 1)
    elif task < heads + n_parts:
        wait_for(progress + 8 * SEARCHED, heads + 1)
        _score_part(head_group, task - heads, n_parts, step, memory)
        atomic_add(progress + 8 * SCORES_DONE, 1)
    else:
        wait_for(progress + 8 * SCORES_DONE, n_parts)
        _attend_head(head_group * heads + task - heads - n_parts, step, memory)


@njit(cache=True, nogil=True, forceinline=True)
def run_tasks(counter, step, memory):
    """Runs tasks of a step until none is left, in one thread.

    Each thread first runs the same number of whole head groups. Threads share the tasks of the
    remaining head groups: all searches first, all attention last. counter: int64 (1,), the number
    of tasks taken.
    """
    n_head_groups, n_threads = step.n_head_groups, step.n_threads
    heads = step.n_head // n_head_groups
    a_thread, n_shared = n_head_groups // n_threads, n_head_groups % n_threads
    n_whole = n_head_groups - n_shared
    n_tasks = 2 * heads + n_threads  # of a shared head group
    for task in tasks_of(counter, n_whole + n_shared * n_tasks):
        if task < n_whole:  # neighbours for one thread: heads of a kv group read the same keys
            head_group = task % n_threads * a_thread + task // n_threads
            for h in range(head_group * heads, (head_group + 1) * heads):
                ask_for_entries(h, step, memory)
            first, last, n_parts = 0, 2 * heads + 1, 1
        else:
            before, of_stage = 0, task - n_whole
            for width in (heads, n_threads, heads):  # searches, scores, attention
                if of_stage < n_shared * width:
                    break
                of_stage -= n_shared * width
                before += width
            head_group, first = n_whole + of_stage // width, before + of_stage % width
            last, n_parts = first + 1, n_threads
            if first < heads:
                ask_for_entries(head_group * heads + first, step, memory)
        for each in range(first, last):
            _run(each, head_group, n_parts, step, memory)
