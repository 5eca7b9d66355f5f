"""FreeKV's step of a layer on the host, and the choice of pages for the next step.

this: a view of FreeKVState.
"""

from collections.abc import Callable
from functools import partial

import numpy as np
from numba import carray

from sparsekv_cli.cpu.attention.store import store_halves
from sparsekv_cli.cpu.freekv.choice import choose_pages, choose_pages_by_groups
from sparsekv_cli.cpu.freekv.pages import (
    ATTENDED,
    BEST,
    CORRECTED,
    END,
    GROUPED,
    N_CHOSEN,
    QUERY,
    SCORED,
    STEPPED,
    HostPages,
    PageCache,
)
from sparsekv_cli.cpu.freekv.recall import (
    attend_head,
    mean_cosine,
    offload_pages,
    recall_pages,
    resident_rows,
)
from sparsekv_cli.cpu.freekv.state import FreeKVBuffers, FreeKVState
from sparsekv_cli.cpu.jit.kernel import njit
from sparsekv_cli.cpu.jit.llvm import tasks_of
from sparsekv_cli.cpu.jit.pointers import integer_pointer
from sparsekv_cli.cpu.vector.fields import Scratch
from sparsekv_cli.cpu.vector.run import KernelStep, memory_of, run
from sparsekv_cli.cpu.vector.views import scratch, view

VISITED = 4  # groups whose pages are scored, for each page that is chosen


@njit(cache=True, nogil=True)
def _select(this, g, query, of_rows):
    """Chooses and recalls kv head g's pages with a query f32 (H, d), current at ``of_rows`` rows.

    Groups are used if they leave out at least half of the pages.
    """
    pages, group, first, end = this.pages, this.n_head // this.n_kv, this.n_sink, this.window
    n_best, n_visited, n_scored = this.n_best, VISITED * this.n_best, end
    q, of_head, chosen = query[g * group : (g + 1) * group], slice(g, g + 1), pages.chosen[g]
    ends = pages.hi[of_head], pages.lo[of_head]
    groups = pages.group_hi[of_head], pages.group_lo[of_head]
    if groups[0].shape[1] and end // GROUPED > 2 * n_visited:
        n_chosen, n_scored = choose_pages_by_groups(
            q, *ends, *groups, first, end, n_visited, n_best, this.scale, this.softcap, chosen
        )
    else:
        n_chosen = choose_pages(q, *ends, first, end, n_best, this.scale, this.softcap, chosen)
    recall_pages(pages, g, n_chosen, first + this.n_ring)
    state = pages.state[g]
    state[N_CHOSEN], state[QUERY], state[END], state[BEST] = n_chosen, of_rows, end, n_best
    if end - first > n_best:
        pages.statistics[g, SCORED] += n_scored


@njit(cache=True, nogil=True, forceinline=True)
def _has_chosen(this, g):
    """Returns whether a kv head has already chosen with the query of the previous step."""
    state = this.pages.state[g]
    return state[QUERY] == this.n - 1 and state[END] == this.window and state[BEST] == this.n_best


@njit(cache=True, nogil=True, forceinline=True)
def _offload(this):
    """Summarises the pages that have left the window."""
    offload_pages(this.pages, this.offloaded, this.window, this.n_sink, this.n_ring, this.meanstd)


@njit(cache=True, nogil=True)
def recall_ahead(at):
    """Retrieves pages speculatively for a step of n rows, with the query of the previous step.

    at: of a record of FreeKVState. Pages that have left the window are summarised first. Kv heads
    that have already chosen with that query are skipped.
    """
    this = view(FreeKVState, at)
    _offload(this)
    for g in range(this.n_kv):
        if not _has_chosen(this, g):
            _select(this, g, this.previous, this.n - 1)


@njit(cache=True, nogil=True)
def run_thread(at, task, counter, shared, own):
    """Runs kv heads until none is left; see ``run`` (cpu/vector/run.py) and ``recall_step``."""
    this, buffers = view(FreeKVState, at), scratch(FreeKVBuffers, at, own)
    tasks, pages, n, n_kv = carray(integer_pointer(counter), 1), this.pages, this.n, this.n_kv
    group, width, width_v, page = this.n_head // n_kv, this.k_words, this.v_words, this.page
    resident = this.n_sink + ((n - 1) // page) % this.n_ring
    row = (resident * page + (n - 1) % page) * n_kv
    k_row = np.int64(pages.k.ctypes.data) + row * 8 * width
    v_row = np.int64(pages.v.ctypes.data) + row * 8 * width_v
    for g in tasks_of(tasks, n_kv):
        statistics = pages.statistics[g]
        store_halves(this.k[g], k_row + g * 8 * width, 4 * width)
        store_halves(this.v[g], v_row + g * 8 * width_v, 4 * width_v)
        for c in range(width):
            pages.pool_k[g, (n - 1) * width + c] = pages.k[resident, (n - 1) % page, g, c]
        for c in range(width_v):
            pages.pool_v[g, (n - 1) * width_v + c] = pages.v[resident, (n - 1) % page, g, c]
        heads = slice(g * group, (g + 1) * group)
        turned = not this.current and mean_cosine(this.q[heads], this.previous[heads]) < this.tau
        if this.current or turned:
            query, of_rows = this.q, n
        else:
            query, of_rows = this.previous, n - 1
        if this.current or turned or not _has_chosen(this, g):
            _select(this, g, query, of_rows)
        count = resident_rows(
            pages, g, n, this.window, this.n_sink, this.n_ring, buffers.rows, this.attended[g]
        )
        this.n_attended[g] = count
        attend_head(
            pages, g, this.q[heads], buffers.rows, count, this.scale, this.softcap,
            this.sinks[heads], buffers.scores, this.out[heads],
        )  # fmt: skip
        statistics[CORRECTED] += turned
        statistics[STEPPED] += 1
        statistics[ATTENDED] += count


@njit(cache=True, nogil=True)
def recall_step(at):
    """Runs one decode step of a layer: attends to the sinks' pages, chosen pages and the window.

    at: of a record of FreeKVState. Pages that have left the window are summarised first. A kv head
    chooses with q if ``current``, or if its queries' mean cosine is below tau. Otherwise it chooses
    with ``previous``, unless ``recall_ahead`` did so.
    """
    this = view(FreeKVState, at)
    _offload(this)
    memory = memory_of(Scratch, FreeKVBuffers, at, this.n_threads)
    run(this.thread, this.n_threads, at, 0, memory)


class FreeKVStep(KernelStep):
    """Runs the steps of one layer.

    tau: cosine of successive queries below which a kv head chooses again. sinks f32 (H,): scores
    without values, or empty.
    """

    def __init__(
        self, scale: np.float32, softcap: np.float32, sinks: np.ndarray, tau: float, n_threads: int
    ) -> None:
        state = FreeKVState(
            scale=scale, softcap=softcap, sinks=sinks if len(sinks) else None, tau=tau,
            n_threads=n_threads,
        )  # fmt: skip
        super().__init__(state, run_thread)
        self._pages: HostPages | None = None  # the pages that the record has

    def prepare(self, cache: PageCache, n: int, window: int, n_best: int) -> None:
        """Sets up ``run`` or ``ahead`` for a step of n rows, the new one included.

        The pool has room for n rows. window: the first page of the step's window; n_best: most
        pages that are chosen.
        """
        if cache.pages is not self._pages:
            self._pages = cache.pages
            self.state.set(
                pages=cache.pages, n_sink=cache.n_sink, n_ring=cache.n_ring, meanstd=cache.meanstd
            )
        self.state.set(n=n, window=window, offloaded=cache.offloaded, n_best=n_best)

    def ahead(self) -> Callable[[], None]:
        """Returns a call of ``recall_ahead`` with the arrays of the last ``run``.

        It keeps them alive: a thread may run it after the cache is gone.
        """
        return partial(self._ahead, recall_ahead)

    def _ahead(self, recall: Callable[[int], None]) -> None:
        recall(self.at)

    def run(self, current: bool, **arrays: np.ndarray | None) -> None:
        """Runs ``recall_step``. arrays: all from ``q`` to ``n_attended`` of FreeKVState."""
        self.state.set(current=current, **arrays)
        recall_step(self.at)
