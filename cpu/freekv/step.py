"""FreeKV's step of a layer on the host, and the choice of pages for the next step.

The arguments are a record of ``FREEKV`` and addresses, because an array as an argument costs half a
microsecond.
"""

from collections.abc import Callable
from functools import partial

import numpy as np
from numba import carray, prange

from sparsekv_cli.cpu.attention.decode import BLOCK, TILE
from sparsekv_cli.cpu.attention.store import store_halves
from sparsekv_cli.cpu.attention.tile import PAD
from sparsekv_cli.cpu.freekv.pages import (
    ATTENDED,
    BEST,
    CORRECTED,
    END,
    N_STATE,
    N_STATISTICS,
    QUERY,
    STEPPED,
    HostPages,
    PageCache,
)
from sparsekv_cli.cpu.freekv.recall import (
    attend_head,
    mean_cosine,
    offload_pages,
    resident_rows,
    select_pages,
)
from sparsekv_cli.cpu.jit.kernel import njit
from sparsekv_cli.cpu.jit.llvm import next_task
from sparsekv_cli.cpu.jit.pointers import (
    address,
    addresses_of,
    bits_pointer,
    float_pointer,
    half_pointer,
    index_pointer,
    integer_pointer,
    record_at,
)
from sparsekv_cli.cpu.jit.threads import PRANGE_ONLY

# The arguments of a step of one layer's cache: sizes, and addresses of contiguous arrays. H: heads,
# G: kv heads.
FREEKV = np.dtype(
    [
        ("pages", [(name, np.int64) for name in HostPages._fields]),  # addresses
        *(
            (name, np.int64)
            for name in (
                *("n_head", "n_kv"),
                *("d", "d_v"),  # padded
                "page",  # rows of a page
                *("pool_k", "pool_v"),  # words of a kv head in the pool
                *("n_resident", "n_page", "n_group", "n_slot"),  # room in the arrays
                *("n_sink", "n_ring"),  # pages
                "meanstd",  # whether summaries are mean + std and mean - std
                "sinks",  # f32 (n_scored_sinks,): scores without values, in the attention only
                "n_scored_sinks",  # H or 0
                "n_threads",
                "n",  # rows of the step, the new one included
                "window",  # the first page of the step's window
                "offloaded",  # pages from this one to the window are summarised before the step
                "n_best",  # most pages that are chosen
                "current",  # whether all kv heads choose with the step's own query
                "n_listed",  # columns of ``attended``; 0: rows are not listed
            )
        ),
        ("tau", np.float64),
        ("scale", np.float32),
        ("softcap", np.float32),  # 0 for none
    ]
)
_record = record_at(FREEKV)


@njit(cache=True, nogil=True)
def _host_pages(this):
    """Returns the arrays of a PageCache."""
    at, n_kv, page, d, d_v = this.pages, this.n_kv, this.page, this.d // 4, this.d_v // 4
    summaries, groups = (n_kv, this.n_page, this.d), (n_kv, this.n_group, this.d)
    return HostPages(
        carray(bits_pointer(at.pool_k), (n_kv, this.pool_k)),
        carray(bits_pointer(at.pool_v), (n_kv, this.pool_v)),
        carray(bits_pointer(at.k), (this.n_resident, page, n_kv, d)),
        carray(bits_pointer(at.v), (this.n_resident, page, n_kv, d_v)),
        carray(half_pointer(at.hi), summaries),
        carray(half_pointer(at.lo), summaries),
        carray(half_pointer(at.group_hi), groups),
        carray(half_pointer(at.group_lo), groups),
        carray(index_pointer(at.slot_of), (n_kv, this.n_page)),
        carray(index_pointer(at.page_in), (n_kv, this.n_slot)),
        carray(integer_pointer(at.stamps), (n_kv, this.n_slot)),
        carray(index_pointer(at.chosen), (n_kv, this.n_slot)),
        carray(integer_pointer(at.state), (n_kv, N_STATE)),
        carray(integer_pointer(at.statistics), (n_kv, N_STATISTICS)),
    )


@njit(cache=True, nogil=True)
def _select(this, pages, g, query, n):
    """Chooses and recalls kv head g's pages with a query f32 (H, d), current at n rows."""
    group = this.n_head // this.n_kv
    select_pages(
        pages, g, query[g * group : (g + 1) * group], n, this.window, this.n_best, this.scale,
        this.softcap, this.n_sink, this.n_sink + this.n_ring,
    )  # fmt: skip


@njit(cache=True, nogil=True)
def _has_chosen(this, state):
    """Returns whether a kv head has already chosen with the query of the previous step."""
    return state[QUERY] == this.n - 1 and state[END] == this.window and state[BEST] == this.n_best


@njit(cache=True, nogil=True)
def recall_ahead(at, previous):
    """Retrieves pages speculatively for a step of n rows, with the query of the previous step.

    Arguments are addresses: of a record of ``FREEKV``; of previous f32 (H, d), current at n - 1
    rows. Pages that have left the window are summarised first. Kv heads that have already chosen
    with that query are skipped.
    """
    this = _record(at)
    pages, query = _host_pages(this), carray(float_pointer(previous), (this.n_head, this.d))
    offload_pages(pages, this.offloaded, this.window, this.n_sink, this.n_ring, this.meanstd != 0)
    for g in range(this.n_kv):
        if not _has_chosen(this, pages.state[g]):
            _select(this, pages, g, query, this.n - 1)


@njit(cache=True, nogil=True)
def _step_heads(counter, at, q, previous, k_new, v_new, attended, counts, out):
    """Runs kv heads until none is left; see ``recall_step``. at: the record's address."""
    this = _record(at)
    pages, n, n_kv, group = _host_pages(this), this.n, this.n_kv, this.n_head // this.n_kv
    sinks = carray(float_pointer(this.sinks), this.n_scored_sinks)
    page, n_sink, n_ring, window = this.page, this.n_sink, this.n_ring, this.window
    width, width_v = this.d // 4, this.d_v // 4
    current = this.current != 0
    scores = np.empty((TILE, BLOCK + PAD), np.float32)
    rows = np.empty((n_sink + this.n_best) * page + n - window * page, np.int32)
    resident = n_sink + ((n - 1) // page) % n_ring
    row = (resident * page + (n - 1) % page) * n_kv
    k_row = np.int64(pages.k.ctypes.data) + row * 8 * width
    v_row = np.int64(pages.v.ctypes.data) + row * 8 * width_v
    g = next_task(counter)
    while g < n_kv:
        statistics = pages.statistics[g]
        store_halves(k_new[g].ctypes.data, k_row + g * 8 * width, 4 * width)
        store_halves(v_new[g].ctypes.data, v_row + g * 8 * width_v, 4 * width_v)
        for c in range(width):
            pages.pool_k[g, (n - 1) * width + c] = pages.k[resident, (n - 1) % page, g, c]
        for c in range(width_v):
            pages.pool_v[g, (n - 1) * width_v + c] = pages.v[resident, (n - 1) % page, g, c]
        first, last = g * group, (g + 1) * group
        corrected = not current and mean_cosine(q[first:last], previous[first:last]) < this.tau
        if current or corrected:
            _select(this, pages, g, q, n)
        elif not _has_chosen(this, pages.state[g]):
            _select(this, pages, g, previous, n - 1)
        count = resident_rows(pages, g, n, window, n_sink, n_ring, rows, attended[g])
        counts[g] = count
        attend_head(
            pages, g, q[first:last], rows, count, this.scale, this.softcap, sinks[first:last],
            scores, out[first:last],
        )  # fmt: skip
        statistics[CORRECTED] += corrected
        statistics[STEPPED] += 1
        statistics[ATTENDED] += count
        g = next_task(counter)


@njit(cache=True, nogil=True, parallel=PRANGE_ONLY)
def recall_step(at, q, previous, k, v, attended, counts, out):
    """Runs one decode step of a layer: attends to the sinks' pages, chosen pages and the window.

    Arguments are addresses: of a record of ``FREEKV``; of q, previous f32 (H, d), k (G, d), v (G,
    d_v). Pages that have left the window are summarised first. A kv head chooses with q if
    ``current``, or if its queries' mean cosine is below tau. Otherwise it chooses with
    ``previous``, unless ``recall_ahead`` did so. attended int32 (G, n_listed): rows attended to;
    counts int64 (G,). out f32 (H, d_v).
    """
    this = _record(at)
    n_head, n_kv, d, d_v = this.n_head, this.n_kv, this.d, this.d_v
    offload_pages(
        _host_pages(this), this.offloaded, this.window, this.n_sink, this.n_ring, this.meanstd != 0
    )
    query, before = (
        carray(float_pointer(q), (n_head, d)),
        carray(float_pointer(previous), (n_head, d)),
    )
    k_new, v_new = carray(float_pointer(k), (n_kv, d)), carray(float_pointer(v), (n_kv, d_v))
    listed = carray(index_pointer(attended), (n_kv, this.n_listed))
    counted, output = (
        carray(integer_pointer(counts), n_kv),
        carray(float_pointer(out), (n_head, d_v)),
    )
    counter = np.zeros(1, np.int64)
    for _thread in prange(this.n_threads):
        _step_heads(counter, at, query, before, k_new, v_new, listed, counted, output)


class FreeKVStep:
    """Runs the steps of one layer. The caller keeps all arguments of the methods alive.

    tau: cosine of successive queries below which a kv head chooses again. sinks f32 (H,): scores
    without values, or empty.
    """

    def __init__(
        self, n_head: int, scale: np.float32, softcap: np.float32, sinks: np.ndarray, tau: float,
        n_threads: int,
    ) -> None:  # fmt: skip
        assert sinks.flags.c_contiguous
        self._sinks = sinks  # kept alive, because the record has only its address
        self._record = record = np.zeros((), FREEKV)
        self._at = address(record)  # cached, because numpy describes all fields each time
        self._pages: HostPages | None = None  # the pages whose addresses the record has
        record["n_head"], record["n_threads"] = n_head, n_threads
        record["scale"], record["softcap"], record["tau"] = scale, softcap, tau
        record["sinks"], record["n_scored_sinks"] = address(sinks), len(sinks)

    def _use(self, cache: PageCache) -> None:
        pages, record = cache.pages, self._record
        assert all(array.flags.c_contiguous for array in pages)
        self._pages = pages
        record["pages"] = addresses_of(pages)
        record["n_resident"], record["page"], record["n_kv"] = pages.k.shape[:3]
        record["d"], record["d_v"] = 4 * pages.k.shape[3], 4 * pages.v.shape[3]
        record["pool_k"], record["pool_v"] = pages.pool_k.shape[1], pages.pool_v.shape[1]
        record["n_page"] = pages.hi.shape[1]
        record["n_group"], record["n_slot"] = pages.group_hi.shape[1], pages.stamps.shape[1]
        record["n_sink"], record["n_ring"] = cache.n_sink, cache.n_ring
        record["meanstd"] = cache.meanstd

    def at(self, cache: PageCache, n: int, window: int, n_best: int) -> None:
        """Sets up ``run`` or ``ahead`` for a step of n rows, the new one included.

        The pool has room for n rows. window: the first page of the step's window; n_best: most
        pages that are chosen.
        """
        if cache.pages is not self._pages:
            self._use(cache)
        record = self._record
        record["n"], record["window"], record["offloaded"] = n, window, cache.offloaded
        record["n_best"] = n_best

    def ahead(self, previous: np.ndarray) -> Callable[[], None]:
        """Returns a call of ``recall_ahead`` with the query f32 (H, d) of the previous step.

        It keeps its arrays alive: a thread may run it after the cache is gone.
        """
        assert previous.flags.c_contiguous
        return partial(self._ahead, recall_ahead, previous)

    def _ahead(self, recall: Callable[[int, int], None], previous: np.ndarray) -> None:
        recall(self._at, address(previous))

    def run(
        self, q: np.ndarray, previous: np.ndarray, k: np.ndarray, v: np.ndarray, current: bool,
        attended: np.ndarray, counts: np.ndarray, out: np.ndarray,
    ) -> None:  # fmt: skip
        """``recall_step``: f32 q (H, 1, d), k (G, 1, d), v (G, 1, d_v), contiguous."""
        assert q.flags.c_contiguous and k.flags.c_contiguous and v.flags.c_contiguous
        assert previous.flags.c_contiguous
        record = self._record
        record["current"], record["n_listed"] = current, attended.shape[1]
        recall_step(
            self._at, address(q), address(previous), address(k), address(v), address(attended),
            address(counts), address(out),
        )  # fmt: skip
