"""FreeKV's arrays: a layer's K and V in pages. Attention reads resident pages, a pool has all.

    resident   sinks' pages, the window's ring, slots   NHD (page, p, kv head, d), K and V apart
    pool       all rows, the layer's KVStore            HND (kv head, page, p, d), K and V apart

A prompt is extended in the pool. The kernels are in freekv/choice.py and freekv/recall.py.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import DTypeLike

from sparsekv_cli.cpu.attention.load import widen_halves
from sparsekv_cli.cpu.attention.rows import K_HEAD, K_ROW, K
from sparsekv_cli.cpu.attention.store import store_halves
from sparsekv_cli.cpu.jit.kernel import njit
from sparsekv_cli.cpu.jit.pointers import grown, on_lines
from sparsekv_cli.cpu.quest.pages import page_summaries
from sparsekv_cli.cpu.vector.declared import f16, i32, i64, u64

ELEMENTS = 4  # f16 elements in a uint64
GROUPED = 8  # pages of a group
# Columns of ``state``, a row a kv head: the LRU cache's time, the number of chosen pages, and the
# choice's arguments: rows when its query was current, end of the candidates, most pages to choose.
CLOCK, N_CHOSEN, QUERY, END, BEST = range(5)
N_STATE = 5
# Columns of ``statistics``, a row a kv head: pages, then steps, then rows attended.
HIT, RECALLED, OFFLOADED, SCORED, CORRECTED, STEPPED, ATTENDED = range(7)
N_STATISTICS = 7


class HostPages(NamedTuple):
    """The kernels' arrays, a part of FreeKVState; f16 rows as uint64 words of four."""

    pool_k: np.ndarray = u64("n_kv", "n_pool_k")  # row i from i d / 4 on
    pool_v: np.ndarray = u64("n_kv", "n_pool_v")  # row i from i d_v / 4 on
    k: np.ndarray = u64("n_resident", "page", "n_kv", "k_words")  # d / 4 words
    v: np.ndarray = u64("n_resident", "page", "n_kv", "v_words")
    hi: np.ndarray = f16("n_kv", "n_page", "d")  # see quest/pages.py
    lo: np.ndarray = f16("n_kv", "n_page", "d")
    # A bound a group of GROUPED pages; empty without groups.
    group_hi: np.ndarray = f16("n_kv", "n_group", "d")
    group_lo: np.ndarray = f16("n_kv", "n_group", "d")
    slot_of: np.ndarray = i32("n_kv", "n_page")  # the slot that holds a page, or -1
    page_in: np.ndarray = i32("n_kv", "n_slot")  # the page in a slot, or -1
    stamps: np.ndarray = i64("n_kv", "n_slot")  # when a slot was last used
    chosen: np.ndarray = i32("n_kv", "n_slot")  # pages chosen, ascending
    state: np.ndarray = i64("n_kv", N_STATE)
    statistics: np.ndarray = i64("n_kv", N_STATISTICS)


TABLES = HostPages._fields.index("slot_of")  # the first of the arrays that a step changes anywhere


class SavedPages(NamedTuple):
    """A layer's pages before a step. The step overwrites an old row of the ring with its own."""

    offloaded: int
    n: int  # rows
    pages: HostPages  # the step may replace them by larger arrays
    k: np.ndarray  # the old row, uint64 (G, d / 4)
    v: np.ndarray  # uint64 (G, d_v / 4)
    tables: tuple[np.ndarray, ...]  # copies of ``pages`` from TABLES on


class Summaries(NamedTuple):
    """The summaries of a layer's first n pages, as in HostPages."""

    hi: np.ndarray
    lo: np.ndarray
    group_hi: np.ndarray
    group_lo: np.ndarray
    n: int

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self[:-1])


class PageCache:
    """One layer's pages. The pool is the memory of a KVStore, which has every row at once.

    ``offloaded``: pages n_sink..offloaded - 1 are summarised, later ones are in the ring.
    """

    def __init__(
        self,
        store: Any,
        statistics: np.ndarray,
        *,
        page: int,
        n_sink: int,
        n_ring: int,
        n_slot: int,
        window: int,
        meanstd: bool,
        groups: bool = False,
        known: Summaries | None = None,
    ) -> None:
        """n_sink, n_ring, n_slot: numbers of pages; window: the first page of the window.

        groups: whether groups of pages are summarised, too. known: summaries that serve again.
        """
        n_kv_head, _, d = store.k.shape
        d_v = store.v.shape[2]
        self.store, self._layout = store, store.layout
        self.page, self.n_sink, self.n_ring, self.meanstd = page, n_sink, n_ring, meanstd
        self.offloaded = window
        n_resident = n_sink + n_ring + n_slot
        if known is None:
            n_page = max(window, -(-store.capacity // page))
            n_groups = n_page // GROUPED if groups else 0
            shapes = ((n_kv_head, count, d) for count in (n_page, n_page, n_groups, n_groups))
            hi, lo, group_hi, group_lo = (_zeros(shape, np.uint16) for shape in shapes)
            known = Summaries(hi, lo, group_hi, group_lo, n=0)
        self.pages = HostPages(
            pool_k=_words(store.k),
            pool_v=_words(store.v),
            k=_zeros((n_resident, page, n_kv_head, d // ELEMENTS), np.uint64),
            v=_zeros((n_resident, page, n_kv_head, d_v // ELEMENTS), np.uint64),
            hi=known.hi,
            lo=known.lo,
            group_hi=known.group_hi,
            group_lo=known.group_lo,
            slot_of=np.full((n_kv_head, known.hi.shape[1]), -1, np.int32),
            page_in=np.full((n_kv_head, n_slot), -1, np.int32),
            stamps=np.zeros((n_kv_head, n_slot), np.int64),
            chosen=np.zeros((n_kv_head, n_slot), np.int32),
            state=np.zeros((n_kv_head, N_STATE), np.int64),
            statistics=statistics,
        )
        self.make_room(window, n_slot)
        pages, place = self.pages, store.layout[[K, K_HEAD, K_ROW]].tolist()
        first = min(known.n, window)
        page_summaries(*place, first, window, page, n_kv_head, d, meanstd, pages.hi, pages.lo)
        if groups:
            group_summaries(pages, first // GROUPED, window // GROUPED, meanstd)
        self._fill_residents()

    def _fill_residents(self) -> None:
        """Copies the rows of the sinks and of the window."""
        p, n = self.page, self.n
        blocks = [(0, self.n_sink * p, 0)]  # first row, rows, first resident row
        for j in range(self.offloaded, -(-n // p)):
            blocks.append((j * p, p, (self.n_sink + j % self.n_ring) * p))
        of_k, of_v = (self.store.k, self.pages.k), (self.store.v, self.pages.v)
        for rows, resident in (of_k, of_v):
            nhd = resident.view(np.float16).reshape(-1, len(rows), rows.shape[2])
            for start, size, at in blocks:
                size = min(size, n - start)
                nhd[at : at + size] = rows[:, start : start + size].transpose(1, 0, 2)

    @property
    def n(self) -> int:
        """Rows of the sequence."""
        return self.store.n

    @property
    def summaries(self) -> Summaries:
        pages = self.pages
        return Summaries(pages.hi, pages.lo, pages.group_hi, pages.group_lo, self.offloaded)

    def save(self) -> SavedPages:
        """Returns copies of all that the next step changes."""
        pages, row = self.pages, self._row(self.n)
        tables = tuple(table.copy() for table in pages[TABLES:])
        return SavedPages(
            self.offloaded, self.n, pages, pages.k[row].copy(), pages.v[row].copy(), tables
        )

    def take_back(self, saved: SavedPages) -> None:
        """Restores the pages of a store with as many rows as then.

        Pages that have left their slots are copied from the pool.
        """
        self.offloaded, n, pages, k, v, tables = saved
        pages = pages._replace(pool_k=self.pages.pool_k, pool_v=self.pages.pool_v)
        row, first_slot = self._row(n), self.n_sink + self.n_ring
        pages.k[row], pages.v[row] = k, v
        before, now = tables[HostPages._fields.index("page_in") - TABLES], pages.page_in
        for g, slot in np.argwhere((before != now) & (before >= 0)):
            at, j = first_slot + slot, before[g, slot]
            for pool, resident in ((pages.pool_k, pages.k), (pages.pool_v, pages.v)):
                size = resident[at, :, g].size
                resident[at, :, g] = pool[g, j * size : (j + 1) * size].reshape(self.page, -1)
        for table, held in zip(pages[TABLES:], tables, strict=True):
            table[:] = held
        self.pages = pages

    def _row(self, n: int) -> tuple[int, int]:
        """Returns the place of the row at position n in the window's ring: page, row."""
        return self.n_sink + n // self.page % self.n_ring, n % self.page

    def make_room(self, n_page: int, n_slot: int) -> None:
        """Makes room for summaries below ``n_page``, and for n_slot cached pages a kv head.

        Arrays of summaries that grow become at least an eighth larger. The store may have moved.
        """
        if self.store.layout is not self._layout:
            self._layout = self.store.layout
            pool_k, pool_v = _words(self.store.k), _words(self.store.v)
            self.pages = self.pages._replace(pool_k=pool_k, pool_v=pool_v)
        pages = self.pages
        have = pages.hi.shape[1]
        if n_page > have:
            n_page = max(n_page, have + have // 8 + 16)
            self.pages = pages = pages._replace(
                hi=grown(pages.hi, 1, n_page),
                lo=grown(pages.lo, 1, n_page),
                group_hi=grown(pages.group_hi, 1, self._n_group(n_page)),
                group_lo=grown(pages.group_lo, 1, self._n_group(n_page)),
                slot_of=grown(pages.slot_of, 1, n_page, -1),
            )
        if n_slot > pages.stamps.shape[1]:
            n_resident = self.n_sink + self.n_ring + n_slot
            self.pages = pages._replace(
                k=grown(pages.k, 0, n_resident),
                v=grown(pages.v, 0, n_resident),
                page_in=grown(pages.page_in, 1, n_slot, -1),
                stamps=grown(pages.stamps, 1, n_slot),
                chosen=grown(pages.chosen, 1, n_slot),
            )

    def _n_group(self, n_page: int) -> int:
        """Returns the number of groups to make room for, next to ``n_page`` pages."""
        return n_page // GROUPED if self.pages.group_hi.shape[1] else 0

    @property
    def resident_bytes(self) -> int:
        return self.pages.k.nbytes + self.pages.v.nbytes

    @property
    def index_bytes(self) -> int:
        """Summaries and tables."""
        return sum(a.nbytes for a in self.pages[HostPages._fields.index("hi") :])


@njit(cache=True, nogil=True)
def group_summaries(pages, first, last, meanstd):
    """Makes the summaries of groups first..last - 1 from the summaries of their pages.

    meanstd: mean + std and mean - std of all rows of a group, else their bounds.
    """
    d = pages.hi.shape[2]
    hi, lo = np.empty(d, np.float32), np.empty(d, np.float32)
    top, bottom = np.empty(d, np.float32), np.empty(d, np.float32)
    for g in range(pages.hi.shape[0]):
        for i in range(first, last):
            for j in range(i * GROUPED, (i + 1) * GROUPED):
                widen_halves(pages.hi[g, j], d, hi)
                widen_halves(pages.lo[g, j], d, lo)
                is_first = j == i * GROUPED
                for c in range(d):
                    if meanstd:  # top: sum of means, bottom: of squares
                        mean, std = (hi[c] + lo[c]) / 2, (hi[c] - lo[c]) / 2
                        top[c] = mean + (0 if is_first else top[c])
                        bottom[c] = mean * mean + std * std + (0 if is_first else bottom[c])
                    else:
                        top[c] = hi[c] if is_first else max(top[c], hi[c])
                        bottom[c] = lo[c] if is_first else min(bottom[c], lo[c])
            if meanstd:
                for c in range(d):
                    mean = top[c] / GROUPED
                    std = np.sqrt(max(bottom[c] / GROUPED - mean * mean, np.float32(0)))
                    top[c], bottom[c] = mean + std, mean - std
            store_halves(top, pages.group_hi[g, i], d)
            store_halves(bottom, pages.group_lo[g, i], d)


def group_summaries_ref(hi, lo, meanstd):
    """numpy reference in f64: hi, lo f16 (G, n_page, d) of whole groups -> (G, groups, d) each."""
    hi, lo = (x.astype(np.float64).reshape(x.shape[0], -1, GROUPED, x.shape[2]) for x in (hi, lo))
    if not meanstd:
        return hi.max(2), lo.min(2)
    mean, std = (hi + lo) / 2, (hi - lo) / 2
    middle = mean.mean(2)
    spread = np.sqrt(np.maximum((mean**2 + std**2).mean(2) - middle**2, 0))
    return middle + spread, middle - spread


def _words(rows: np.ndarray) -> np.ndarray:
    """Returns K or V of a store as uint64 (G, room): each head's rows lie end to end."""
    words = rows.view(np.uint64)
    of_head = words.strides[0]
    return np.lib.stride_tricks.as_strided(words, (len(words), of_head // 8), (of_head, 8))


def _zeros(shape: Sequence[int], dtype: DTypeLike) -> np.ndarray:
    return on_lines(shape, dtype, zeros=True)
