"""Copies chosen pages of FreeKV to slots on the host, and summarises pages that leave the window.

The step in freekv/step.py calls these kernels.

A layer's K and V lie in pages of p rows on two tiers (arrays: freekv/pages.py). Attention reads
resident pages, NHD (page, p, kv head, d). These are the sinks' pages, a ring of window pages, and
slots. The slots are an LRU cache of pages for each kv head. The pool has all rows as HND (kv head,
page, p, d). There a kv head's part of a page is contiguous. Copies between the tiers change the
layout. f16 rows are passed as uint64, four elements in one, because numba has no f16 arrays.
"""

import numpy as np

from sparsekv_cli.cpu.attention.decode import attend_list
from sparsekv_cli.cpu.attention.rows import F16, GATHER, HeadRows
from sparsekv_cli.cpu.freekv.pages import (
    CLOCK,
    GROUPED,
    HIT,
    N_CHOSEN,
    OFFLOADED,
    RECALLED,
    group_summaries,
)
from sparsekv_cli.cpu.jit.kernel import njit
from sparsekv_cli.cpu.quest.pages import page_summaries


@njit(cache=True, nogil=True)
def offload_pages(pages, first, last, n_sink, n_ring, meanstd):
    """Summarises the pages first..last - 1, which leave the window's ring. The pool has them."""
    page, n_kv_head, width = pages.k.shape[1:]
    row_bytes = 8 * n_kv_head * width
    for j in range(first, last):
        for g in range(n_kv_head):
            pages.statistics[g, OFFLOADED] += 1
        ring = np.int64(pages.k.ctypes.data) + (n_sink + j % n_ring - j) * page * row_bytes
        page_summaries(
            ring, 8 * width, row_bytes, j, j + 1, page, n_kv_head, 4 * width, meanstd, pages.hi,
            pages.lo,
        )  # fmt: skip
        if (j + 1) % GROUPED == 0 and pages.group_hi.shape[1]:
            group_summaries(pages, j // GROUPED, j // GROUPED + 1, meanstd)


@njit(cache=True, nogil=True)
def _recall_page(pages, g, j, at):
    """Copies kv head g's page j of the pool into resident page ``at``, HND to NHD."""
    page, _, width = pages.k.shape[1:]
    width_v = pages.v.shape[3]
    for i in range(page):
        row = j * page + i
        for c in range(width):
            pages.k[at, i, g, c] = pages.pool_k[g, row * width + c]
        for c in range(width_v):
            pages.v[at, i, g, c] = pages.pool_v[g, row * width_v + c]


@njit(cache=True, nogil=True)
def recall_pages(pages, g, n_chosen, first_slot):
    """Makes the chosen pages of kv head g resident, in place of the least recently used ones.

    There are at least as many slots as chosen pages. Hits get their time stamp first, so that no
    chosen page loses its slot.
    """
    slot_of, page_in, stamps = pages.slot_of[g], pages.page_in[g], pages.stamps[g]
    chosen, statistics = pages.chosen[g], pages.statistics[g]
    pages.state[g, CLOCK] += 1
    now = pages.state[g, CLOCK]
    n_hit = 0
    for i in range(n_chosen):
        slot = slot_of[chosen[i]]
        if slot >= 0:
            stamps[slot] = now
            n_hit += 1
    statistics[HIT] += n_hit
    statistics[RECALLED] += n_chosen - n_hit
    if n_hit == n_chosen:
        return
    for i in range(n_chosen):
        j = chosen[i]
        if slot_of[j] >= 0:
            continue
        slot = 0
        for s in range(1, stamps.shape[0]):
            if stamps[s] < stamps[slot]:
                slot = s
        if page_in[slot] >= 0:
            slot_of[page_in[slot]] = -1
        page_in[slot] = j
        slot_of[j] = slot
        stamps[slot] = now
        _recall_page(pages, g, j, first_slot + slot)


@njit(cache=True, nogil=True, fastmath={"reassoc", "contract"})
def mean_cosine(q, previous):
    """Returns the mean over rows of cos(q[t], previous[t]), f32 (group, d); a zero row counts 0."""
    total = 0.0
    for t in range(q.shape[0]):
        dot, size, size_previous = np.float32(0), np.float32(0), np.float32(0)
        for c in range(q.shape[1]):
            dot += q[t, c] * previous[t, c]
            size += q[t, c] * q[t, c]
            size_previous += previous[t, c] * previous[t, c]
        product = np.float64(size) * np.float64(size_previous)
        if product > 0:
            total += dot / np.sqrt(product)
    return total / q.shape[0]


def mean_cosine_ref(q, previous):
    """numpy reference in f64."""
    q, previous = q.astype(np.float64), previous.astype(np.float64)
    sizes = np.linalg.norm(q, axis=1) * np.linalg.norm(previous, axis=1)
    return ((q * previous).sum(1) / np.where(sizes > 0, sizes, 1)).mean()


@njit(cache=True, nogil=True)
def resident_rows(pages, g, n, window, n_sink, n_ring, rows, positions):
    """Lists kv head g's resident rows in order of their positions; returns their number.

    They are the rows of the sinks, the chosen pages and the window. rows int32: set to numbers of
    rows in the resident pages. positions: set to positions in the sequence, or empty.
    """
    page = pages.k.shape[1]
    count = n_sink * page
    for i in range(count):
        rows[i] = i
    for i in range(pages.state[g, N_CHOSEN]):
        at = (n_sink + n_ring + pages.slot_of[g, pages.chosen[g, i]]) * page
        for r in range(page):
            rows[count + r] = at + r
        count += page
    n_window = n - window * page
    for i in range(n_window):
        j = window + i // page
        rows[count + i] = (n_sink + j % n_ring) * page + i % page
    if positions.shape[0]:
        for i in range(n_sink * page):
            positions[i] = i
        for i in range(n_sink * page, count):
            j = pages.chosen[g, i // page - n_sink]
            positions[i] = j * page + i % page
        for i in range(n_window):
            positions[count + i] = window * page + i
    return count + n_window


@njit(cache=True, nogil=True)
def attend_head(pages, g, q, rows, count, scale, softcap, sinks, scores, out):
    """Computes attention of a kv head's queries (group, d) over resident rows; out (group, d_v)."""
    n_kv_head, width = pages.k.shape[2:]
    width_v = pages.v.shape[3]
    listed = HeadRows(
        k=np.int64(pages.k.ctypes.data) + g * 8 * width,
        v=np.int64(pages.v.ctypes.data) + g * 8 * width_v,
        k_row=np.int64(n_kv_head * 8 * width),
        v_row=np.int64(n_kv_head * 8 * width_v),
        mode=np.int64(GATHER | F16),
        numbers=np.int64(rows.ctypes.data),
        n=np.int64(count),
    )
    attend_list(q, listed, scale, softcap, sinks, out, scores)
