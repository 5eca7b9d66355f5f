"""FreeKV's choice of pages for a kv head, by the mean of its heads' softmax over page scores.

A context with many pages is searched by groups of pages first.
"""

import numpy as np

from sparsekv_cli.cpu.attention.tile import PAD
from sparsekv_cli.cpu.freekv.pages import GROUPED
from sparsekv_cli.cpu.jit.kernel import njit
from sparsekv_cli.cpu.quest.pages import best_pooled, listed_page_scores, page_scores


@njit(cache=True, nogil=True)
def choose_pages(q, hi, lo, first, end, n_best, scale, softcap, chosen):
    """chosen[:m] = the best of the pages first..end - 1 for a kv head, ascending; returns m.

    q f32 (group, d); hi, lo uint16 (1, n_page, d). A page's score is the mean over the group of
    each head's softmax over these pages. Ties go to the first page. softcap: of the scores, 0 for
    none.
    """
    n = end - first
    if n_best >= n:
        for j in range(n):
            chosen[j] = first + j
        return n
    scores = np.empty((q.shape[0], end + PAD), np.float32)
    page_scores(q, hi, lo, end, 1, scale, scores)
    best_pooled(scores[:, first:], n, n_best, softcap, chosen)
    for j in range(n_best):
        chosen[j] += first
    return n_best


@njit(cache=True, nogil=True)
def choose_pages_by_groups(
    q, hi, lo, group_hi, group_lo, first, end, n_visited, n_best, scale, softcap, chosen
):
    """``choose_pages`` among the pages of the best ``n_visited`` groups, and the pages after the
    groups.

    Returns the number of chosen pages and of scored summaries. A group's score is the mean over the
    heads of their softmax over all whole groups. hi, lo, group_hi, group_lo uint16 (1, n, d).
    """
    n_group = end // GROUPED
    scores = np.empty((q.shape[0], n_group + PAD), np.float32)
    page_scores(q, group_hi, group_lo, n_group, 1, scale, scores)
    visited = np.empty(n_visited, np.int32)
    best_pooled(scores, n_group, n_visited, softcap, visited)
    listed = np.empty((n_visited + 1) * GROUPED, np.int32)
    count = 0
    for i in range(n_visited):
        for j in range(max(first, visited[i] * GROUPED), (visited[i] + 1) * GROUPED):
            listed[count] = j
            count += 1
    for j in range(max(first, n_group * GROUPED), end):
        listed[count] = j
        count += 1
    scores = np.empty((q.shape[0], count + PAD), np.float32)
    listed_page_scores(q, hi[0], lo[0], listed[:count], scale, scores)
    n_best = min(n_best, count)
    best_pooled(scores, count, n_best, softcap, chosen)
    for j in range(n_best):
        chosen[j] = listed[chosen[j]]
    return n_best, n_group + count


def choose_pages_ref(q, hi, lo, first, end, n_best, scale, softcap=0.0):
    """numpy reference in f64: q (group, d), hi, lo (n_page, d) floats; also the pooled scores."""
    q, hi, lo = (x.astype(np.float64) for x in (q, hi[first:end], lo[first:end]))
    scores = scale * (np.maximum(q, 0) @ hi.T + np.minimum(q, 0) @ lo.T)
    scores = softcap * np.tanh(scores / softcap) if softcap else scores
    weights = np.exp(scores - scores.max(1, keepdims=True))
    pooled = (weights / weights.sum(1, keepdims=True)).mean(0)
    return first + np.sort(np.argsort(-pooled, kind="stable")[:n_best]), pooled
