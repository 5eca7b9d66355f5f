"""Pages of the KV cache: summaries, scores and choice (Quest, and LFPS' dense layers).

A page is ``page`` consecutive rows. Its summary is two vectors, hi and lo. They are the largest and
smallest key element of each channel (Quest, arXiv:2406.10774, section 3.3), or mean + std and
mean - std. A page's score is relu(q) . hi - relu(-q) . lo. For the first kind this is sum_c max(q_c
hi_c, q_c lo_c), an upper bound of the score of any key of the page. For the second kind it is q .
mean + |q| . std. Summaries are f16, in which bounds of f16 keys are exact. They are passed as
uint16, because numba has no f16 arrays.
"""

import numpy as np
from numba import prange

from sparsekv_cli.cpu.attention.decode import BLOCK, ONE_THREAD_BELOW, TILE, n_key_splits
from sparsekv_cli.cpu.attention.rows import GATHER
from sparsekv_cli.cpu.attention.select import order_keys, select_largest
from sparsekv_cli.cpu.attention.softmax import NEGATIVE_INFINITY, exponentiate
from sparsekv_cli.cpu.attention.tile import PAD, tile_scores
from sparsekv_cli.cpu.jit import llvm
from sparsekv_cli.cpu.jit.emitter import emitter
from sparsekv_cli.cpu.jit.kernel import njit
from sparsekv_cli.cpu.jit.llvm import tasks_of
from sparsekv_cli.cpu.jit.threads import PRANGE_ONLY
from sparsekv_cli.cpu.jit.value import F16, F32, I64, LANES, VF, call_named, const, store, vec


@emitter(meanstd=(0, 1))
def summarise_rows(meanstd, rows, row_bytes, count, d, hi, lo):
    """Computes hi, lo f16 (d,) of ``count`` >= 1 f16 rows, all addresses; d a multiple of 16.

    meanstd: 0: the largest and smallest element of each channel. 1: mean + std and mean
    - std (over count). The std comes from deviations, so that no digits cancel.
    """
    share = (1.0 / count.to(F32)).splat()

    @llvm.every(d, LANES)
    def chunk(c):
        at = c * 2
        first = rows + at

        def row(j):
            return llvm.load_half_lanes(first + j * row_bytes)

        def extend(j, ends):
            return [ends[0].maxnum(row(j)), ends[1].minnum(row(j))]

        def add(j, sums):
            return [sums[0] + row(j)]

        if not meanstd:
            ends = [row(I64(0)), row(I64(0))]
            high, low = llvm.loop(1, count, 1, ends, extend)
        else:
            mean = llvm.loop(0, count, 1, [const(F32, 0.0)], add)[0] * share

            def deviate(j, sums):
                deviation = row(j) - mean
                return [deviation.fma(deviation, sums[0])]

            squares = llvm.loop(0, count, 1, [const(F32, 0.0)], deviate)[0]
            std = call_named("llvm.sqrt.v16f32", VF, squares * share)
            high, low = mean + std, mean - std
        store(high.to(vec(F16)), hi + at)
        store(low.to(vec(F16)), lo + at)


@njit(cache=True, nogil=True)
def page_summaries(
    k, k_head, k_row, first_page, last_page, page, n_kv_head, d, meanstd, hi, lo, n_sinks=0
):
    """Summarises the whole pages first_page .. last_page - 1 of every kv head.

    A page is ``page`` rows. Its summary is two rows, hi and lo, see ``summarise_rows``. With page =
    16, hi[g, 3] is over the rows 48 to 63 of kv head g. hi, lo: f16 bits, uint16 (G, >= last_page,
    d). d: padded head size.

    k: address of f16 keys. k_head, k_row: bytes from one kv head, or row, to the next. n_sinks <
    page: first rows that the summary of page 0 leaves out. They are attended to anyway, and their
    large elements would widen the bounds.
    """
    for kv_head in range(n_kv_head):
        for j in range(first_page, last_page):
            skipped = n_sinks if j == 0 else 0
            rows = k + kv_head * k_head + (j * page + skipped) * k_row
            count = page - skipped
            summarise_rows(meanstd, rows, k_row, count, d, hi[kv_head, j], lo[kv_head, j])


def page_summaries_ref(keys, page, meanstd, n_sinks=0):
    """numpy reference: returns hi, lo f32 (G, n // page, d) of keys (G, n, d), not in f16."""
    hi, lo = [], []
    for j in range(keys.shape[1] // page):
        rows = keys[:, j * page + (n_sinks if j == 0 else 0) : (j + 1) * page].astype(np.float64)
        mean, std = rows.mean(1), rows.std(1)
        hi.append(mean + std if meanstd else rows.max(1))
        lo.append(mean - std if meanstd else rows.min(1))
    empty = np.empty((keys.shape[0], 0, keys.shape[2]))
    return tuple(np.stack(x, 1).astype(np.float32) if x else empty for x in (hi, lo))


@njit(cache=True, nogil=True)
def _by_sign(q, scale):
    """Returns scale max(q, 0) and scale min(q, 0)."""
    positive, negative = np.empty_like(q), np.empty_like(q)
    for t in range(q.shape[0]):
        for c in range(q.shape[1]):
            value = q[t, c] * scale
            positive[t, c] = max(value, np.float32(0))
            negative[t, c] = min(value, np.float32(0))
    return positive, negative


@njit(cache=True, nogil=True)
def _score_group(mode, listed, q, hi, lo, first, last, scale, out):
    """Scores pages first to last - 1 of one kv head. With GATHER they are numbers of ``listed``.

    listed: address of page numbers (int32); see ``listed_page_scores`` for the others.
    """
    stride, row_bytes = BLOCK + PAD, hi.strides[0]
    of_hi, of_lo = np.empty((TILE, stride), np.float32), np.empty((TILE, stride), np.float32)
    for h in range(0, q.shape[0], TILE):
        tile = min(TILE, q.shape[0] - h)
        positive, negative = _by_sign(q[h : h + tile], scale)
        for start in range(first, last, BLOCK):
            size = min(BLOCK, last - start)
            rows, at = (0, listed + 4 * start) if mode == GATHER else (start * row_bytes, 0)
            for x, ends, to in ((positive, hi, of_hi), (negative, lo, of_lo)):
                tile_scores(
                    tile, mode, x, ends.ctypes.data + rows, row_bytes, at, size,
                    q.shape[1], to, stride,
                )  # fmt: skip
            for t in range(tile):
                for j in range(size):
                    out[h + t, start + j] = of_hi[t, j] + of_lo[t, j]


@njit(cache=True, nogil=True)
def _score_pieces(counter, q, hi, lo, n_page, n_kv_head, scale, out, n_split):
    """Runs (kv head, split) tasks until none is left; see ``page_scores``."""
    group = q.shape[0] // n_kv_head
    for task in tasks_of(counter, n_kv_head * n_split):
        g, split = task // n_split, task % n_split
        first, last = split * n_page // n_split, (split + 1) * n_page // n_split
        heads = slice(g * group, (g + 1) * group)
        _score_group(0, 0, q[heads], hi[g], lo[g], first, last, scale, out[heads])


@njit(cache=True, nogil=True, parallel=PRANGE_ONLY)
def page_scores(q, hi, lo, n_page, n_kv_head, scale, out, n_threads=1):
    """out[h, j] = scale (relu(q[h]) . hi[j] - relu(-q[h]) . lo[j]) for pages j < n_page.

    q f32 (H, d) with d padded; hi, lo: f16 bits, uint16 (G, >= n_page, d), rows consecutive;
    out f32 (H, >= n_page).
    """
    if 2 * n_page < ONE_THREAD_BELOW:
        n_threads = 1
    n_split = n_key_splits(n_page, n_kv_head, n_threads)
    counter = np.zeros(1, np.int64)
    for _thread in prange(n_threads):
        _score_pieces(counter, q, hi, lo, n_page, n_kv_head, scale, out, n_split)


@njit(cache=True, nogil=True)
def listed_page_scores(q, hi, lo, listed, scale, out):
    """out[h, i] = the score of page listed[i] (int32) for query h: ``page_scores`` of one kv head.

    q f32 (group, d); hi, lo uint16 (n_page, d); out f32 (group, >= len(listed)).
    """
    _score_group(GATHER, listed.ctypes.data, q, hi, lo, 0, len(listed), scale, out)


def page_scores_ref(q, hi, lo, scale):
    """Returns the pages' scores, f64 (H, n_page), by numpy: the reference of the tests.

    q (H, d). hi, lo (G, n_page, d): the summaries of the pages, see ``summarise_rows``. A score is
    the sum of q[c] hi[c] where q[c] > 0, and of q[c] lo[c] elsewhere. q = (2, -1), hi = (3, 5) and
    lo = (1, 4) give 6 - 4 = 2, times scale.
    """
    group = q.shape[0] // hi.shape[0]
    hi, lo = (np.repeat(x.astype(np.float64), group, axis=0) for x in (hi, lo))
    q = q.astype(np.float64)[:, None]
    return scale * (np.maximum(q, 0) * hi + np.minimum(q, 0) * lo).sum(-1)


@njit(cache=True, nogil=True, error_model="numpy")
def pool_softmax(scores, n, softcap, pooled):
    """pooled[:n] = the mean of the softmax of each row of scores f32 (group, >= n + LANES).

    Scores are overwritten. softcap: of the scores, 0 for none. FreeKV, arXiv:2505.13109, section
    3.2.
    """
    group = scores.shape[0]
    pooled[:n] = 0
    for t in range(group):
        row = scores[t]
        _, mass = exponentiate(row, n, softcap, NEGATIVE_INFINITY)
        share = np.float32(1) / (mass * np.float32(group))
        for j in range(n):
            pooled[j] += share * row[j]


@njit(cache=True, nogil=True)
def best_pooled(scores, n, n_best, softcap, chosen):
    """chosen[:n_best] = the columns of scores (group, n + PAD) whose mean softmax is largest."""
    pooled, keys = np.empty(n, np.float32), np.empty(n, np.int32)
    pool_softmax(scores, n, softcap, pooled)
    order_keys(pooled, keys, n)
    select_largest(keys, n, n_best, chosen)


@njit(cache=True, nogil=True)
def _select_of_heads(counter, scores, n_page, n_best, page, n, n_sinks, softcap, idx, counts):
    """Runs kv heads until none is left; see ``select_pages``."""
    n_kv_head = idx.shape[0]
    group = scores.shape[0] // n_kv_head
    chosen = np.empty(n_page, np.int32)
    for kv_head in tasks_of(counter, n_kv_head):
        heads = slice(kv_head * group, (kv_head + 1) * group)
        best_pooled(scores[heads], n_page, n_best, softcap, chosen)
        at = 0
        for j in range(min(n_sinks, n)):
            idx[kv_head, at] = j
            at += 1
        for i in range(n_best):
            for j in range(max(at, chosen[i] * page), (chosen[i] + 1) * page):
                idx[kv_head, at] = j
                at += 1
        for j in range(max(at, n_page * page), n):
            idx[kv_head, at] = j
            at += 1
        counts[kv_head] = at


@njit(cache=True, nogil=True, parallel=PRANGE_ONLY)
def select_pages(scores, n_page, n_best, page, n, n_sinks, softcap, idx, counts, n_threads=1):
    """Lists the rows of each kv head's best pages, with the first rows and the current page.

    scores f32 (H, >= n_page + LANES) of the whole pages 0..n_page - 1, which may be chosen. They
    are overwritten. A kv head takes the ``n_best`` pages with the highest mean softmax over its
    group; ties go to the first. idx int32 (G, m) is set to rows, ascending: 0..n_sinks - 1, the
    chosen pages, n_page page..n - 1. counts int64 (G,) is set to their numbers.
    """
    counter = np.zeros(1, np.int64)
    n_best = min(n_best, n_page)
    for _thread in prange(1 if scores.shape[0] * n_page < ONE_THREAD_BELOW else n_threads):
        _select_of_heads(counter, scores, n_page, n_best, page, n, n_sinks, softcap, idx, counts)


def select_pages_ref(scores, n_kv_head, n_best, page, n, n_sinks, softcap=0.0):
    """numpy reference: one ascending int array a kv head; scores (H, n_page)."""
    n_head, n_page = scores.shape
    pooled = np.zeros((n_kv_head, n_page))
    if n_page:
        scores = scores.astype(np.float64)
        scores = softcap * np.tanh(scores / softcap) if softcap else scores
        weights = np.exp(scores - scores.max(1, keepdims=True))
        weights /= weights.sum(1, keepdims=True)
        pooled = weights.reshape(n_kv_head, n_head // n_kv_head, n_page).mean(1)
    return listed_rows_ref(pooled, n_best, page, n, n_sinks)


def listed_rows_ref(pooled, n_best, page, n, n_sinks):
    """numpy reference: one ascending int array a kv head; pooled (G, n_page)."""
    lists, n_page = [], pooled.shape[1]
    for scores in pooled:
        chosen = np.argsort(-scores, kind="stable")[:n_best]
        pages = [np.arange(j * page, (j + 1) * page) for j in chosen]
        forced = [np.arange(min(n_sinks, n)), np.arange(n_page * page, n)]
        lists.append(np.unique(np.concatenate([*pages, *forced])))
    return lists
