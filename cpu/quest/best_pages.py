"""The pages that a chunk of a prompt attends to: the best ones over several queries."""

import numpy as np
from numba import prange

from sparsekv_cli.cpu.attention.select import order_keys, select_largest
from sparsekv_cli.cpu.jit.kernel import njit
from sparsekv_cli.cpu.jit.llvm import tasks_of
from sparsekv_cli.cpu.jit.threads import PRANGE_ONLY
from sparsekv_cli.cpu.quest.byte_pages import SPAN


@njit(cache=True, nogil=True)
def _compare_tasks(counter, scores, tops, n_page, n_last, best):
    """Writes best scores until no task is left. A task is SPAN pages of a kv head."""
    n_kv, n_rows = tops.shape
    n_spans = (n_page + SPAN - 1) // SPAN
    for task in tasks_of(counter, n_kv * n_spans):
        head, span = task % n_kv, task // n_kv
        first = span * SPAN
        count = min(n_page - first, SPAN)
        of_span = best[head, first : first + count]
        of_span[:] = -np.inf
        for r in range(n_rows):
            of_query, top = scores[span, head, r], tops[head, r]
            for j in range(count):
                score = of_query[j] - top
                of_span[j] = score if score > of_span[j] else of_span[j]
        of_span[max(0, n_page - n_last - first) :] = np.inf
        if first == 0:
            of_span[0] = np.inf


@njit(cache=True, nogil=True, parallel=PRANGE_ONLY)
def best_pages(scores, tops, n_page, n_last, best, chosen, n_threads=1):
    """chosen int32 (G, n_best) = the best pages of each kv head, ascending.

    scores f32 (spans, G, R, SPAN): see ``score_pages``. tops f32 (G, R): the largest score of each
    query. best f32 (G, >= n_page) is set to the pages' scores: the largest over R of scores - tops.
    Page 0 and the last ``n_last`` pages are chosen first, and the earlier ones of equal pages.
    n_best <= n_page, which is a multiple of 16.
    """
    counter = np.zeros(1, np.int64)
    for _thread in prange(n_threads):
        _compare_tasks(counter, scores, tops, n_page, n_last, best)
    for head in prange(len(chosen)):
        keys = np.empty(n_page, np.int32)
        order_keys(best[head], keys, n_page)
        select_largest(keys, n_page, chosen.shape[1], chosen[head])
