"""The pages that a chunk of a prompt attends to: the best ones over several queries."""

import numpy as np
from numba import njit, prange

from sparsekv_cli.cpu.attention.select import order_keys, select_largest
from sparsekv_cli.cpu.attention.softmax import max_of
from sparsekv_cli.cpu.jit.llvm import LANES, keep, next_task
from sparsekv_cli.cpu.jit.threads import PRANGE_ONLY


@njit(cache=True, nogil=True)
def _best_of_heads(counter, scores, n_page, n_last, chosen):
    """Runs kv heads until none is left; see ``best_pages``."""
    n_kv_head, n_best = chosen.shape
    group = scores.shape[0] // n_kv_head
    best, keys = np.empty(n_page, np.float32), np.empty(n_page, np.int32)
    kv_head = next_task(counter)
    while kv_head < n_kv_head:
        best[:] = -np.inf
        for row in scores[kv_head * group : (kv_head + 1) * group]:
            row[n_page : n_page + LANES] = -np.inf
            top = max_of(row.ctypes.data, n_page)
            for j in range(n_page):
                best[j] = max(best[j], row[j] - top)
        keep(scores)
        best[0] = np.inf
        best[n_page - n_last :] = np.inf
        order_keys(best, keys, n_page)
        select_largest(keys, n_page, n_best, chosen[kv_head])
        kv_head = next_task(counter)


@njit(cache=True, nogil=True, parallel=PRANGE_ONLY)
def best_pages(scores, n_page, n_last, chosen, n_threads=1):
    """chosen int32 (G, n_best) = the best pages of each kv head, ascending.

    scores f32 (G R, >= n_page + LANES): R queries of a kv head after those of the one before. The
    last LANES are overwritten. A page's score is the largest of its queries' scores, each minus the
    query's largest. Page 0 and the last ``n_last`` pages are chosen first, and the earlier ones of
    equal pages. n_best <= n_page.
    """
    counter = np.zeros(1, np.int64)
    for _thread in prange(n_threads):
        _best_of_heads(counter, scores, n_page, n_last, chosen)
