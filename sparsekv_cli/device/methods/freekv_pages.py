"""One layer's rows as FreeKV's pages on a device and its host: made from a store, and back."""

from collections.abc import Iterator
from typing import NamedTuple

import torch

from sparsekv_cli.device.layers.store import DeviceStore
from sparsekv_cli.kernels.freekv import pages as page_cache
from sparsekv_cli.kernels.freekv.choice import ChoiceBuffers
from sparsekv_cli.kernels.freekv.pages import Layout, PageTensors
from sparsekv_cli.kernels.pinned import zeros_on_host
from sparsekv_cli.kernels.quest import pages

COPIED = 1 << 26  # bytes of a store that are copied to the host at a time


class Workspace(NamedTuple):
    """Buffers between the launches of a choice. They are made again only if one of them grows."""

    query: torch.Tensor  # f32 (B, H, d): see correction.enter_row
    choice: ChoiceBuffers
    idx: torch.Tensor  # int32 (B, G, rows): resident rows attended to
    counts: torch.Tensor  # int32 (B, G)

    @property
    def nbytes(self) -> int:
        query, choice, *lists = self
        return sum(tensor.nbytes for tensor in [query, *choice[:3], *choice.scratch, *lists])


class DevicePages:
    """The pages of one sequence. The pool has the pages from n_sink to ``offloaded`` - 1."""

    def __init__(
        self,
        store: DeviceStore,
        statistics: torch.Tensor,
        layout: Layout,
        *,
        page: int,
        window: int,
        n_page: int,
        n_pool: int,
        n_slot: int,
        n_best: int,
    ) -> None:
        """window: the first page of the window; n_page: the number of pages to make room for.

        n_pool: the number of pages to make room for on the host.
        """
        _, n_kv, _, d = store.k.shape
        self.layout, self.page = layout, page
        arrays = page_cache.empty_pages(
            1, n_kv, d, store.v.shape[3], page, n_page - layout.n_sink, n_slot, n_best, layout,
            store.k.device, n_pool - layout.n_sink,
        )  # fmt: skip
        self.arrays = arrays._replace(statistics=statistics)
        pages.page_summaries(store.k, arrays.hi, arrays.lo, page, layout.meanstd, 0, window)
        for theirs, ours in self._resident(store, window, store.n):
            ours.copy_(theirs)
        for k, v, units in self._pooled(store, window):
            units.copy_(torch.cat((k, v), dim=2).transpose(0, 1))
        arrays.state[..., page_cache.OFFLOADED.value] = window
        page_cache.check_pages(self.arrays, layout)

    @property
    def offloaded(self) -> int:
        """The number of the first page that is not in the pool. Waits for the device."""
        return int(self.arrays.state[0, 0, page_cache.OFFLOADED.value])

    def to_store(self, store: DeviceStore, n: int) -> None:
        """Writes all n rows into an empty store, bit for bit as they came."""
        store.reserve(n)
        offloaded = self.offloaded
        for theirs, ours in self._resident(store, offloaded, n):
            theirs.copy_(ours)
        for k, v, units in self._pooled(store, offloaded):
            of_head = units.to(k.device).transpose(0, 1)
            k.copy_(of_head[..., : k.shape[2]])
            v.copy_(of_head[..., k.shape[2] :])
        store.n = n

    def _resident(
        self, store: DeviceStore, offloaded: int, n: int
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yields the rows of sinks and window, in the store and here: views (rows, G, d)."""
        p, (n_sink, n_ring, _) = self.page, self.layout
        blocks = [(0, n_sink * p, 0)]  # first row, rows, first resident row
        for j in range(offloaded, -(-n // p)):
            blocks.append((j * p, p, (n_sink + j % n_ring) * p))
        for rows, ours in ((store.k, self.arrays.k), (store.v, self.arrays.v)):
            resident = ours[0].flatten(0, 1)
            for start, size, at in blocks:
                size = min(size, n - start)
                yield rows[0, :, start : start + size].transpose(0, 1), resident[at : at + size]

    def _pooled(
        self, store: DeviceStore, offloaded: int
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """Yields the pages in the pool as views, some pages at a time.

        These are K of the store (G, pages, p d), V of the store (G, pages, p d_v), and both in the
        pool (pages, G, p (d + d_v)), contiguous.
        """
        p, n_sink, pool = self.page, self.layout.n_sink, self.arrays.pool[0]
        n_kv = pool.shape[1]
        step = max(1, COPIED // (2 * n_kv * pool.shape[2]))
        for first in range(n_sink, offloaded, step):
            last = min(first + step, offloaded)
            k, v = (
                x[0, :, first * p : last * p].unflatten(1, (last - first, p)).flatten(2)
                for x in (store.k, store.v)
            )
            yield k, v, pool[first - n_sink : last - n_sink]

    def make_room(self, n_page: int, n_pool: int, n_slot: int, n_best: int) -> None:
        """Makes room for pages below ``n_page``; a kv head caches n_slot and chooses n_best.

        n_pool: the number of pages to make room for on the host, if that room has to grow.
        """
        a, n_sink = self.arrays, self.layout.n_sink
        old = a
        if n_page > n_sink + a.pool.shape[1]:
            if a.k.device.type == "cuda":  # the device writes to the pool
                torch.cuda.synchronize(a.k.device)
            a = a._replace(pool=_grown_pool(a.pool, max(n_page, n_pool) - n_sink, a.k.device))
        if n_page > a.hi.shape[2]:
            a = a._replace(
                hi=_grown(a.hi, 2, n_page),
                lo=_grown(a.lo, 2, n_page),
                slot_of=_grown(a.slot_of, 2, n_page, -1),
            )
        if n_slot > a.stamps.shape[2]:
            n_resident = n_sink + self.layout.n_ring + n_slot
            a = a._replace(
                k=_grown(a.k, 1, n_resident),
                v=_grown(a.v, 1, n_resident),
                page_in=_grown(a.page_in, 2, n_slot, -1),
                stamps=_grown(a.stamps, 2, n_slot),
            )
        if n_best > a.chosen.shape[2]:
            names = ("chosen", "slots", "missing")
            a = a._replace(**{name: _grown(getattr(a, name), 2, n_best) for name in names})
        if a is not old:
            page_cache.check_pages(a, self.layout)
            self.arrays = a

    @property
    def pool_bytes(self) -> int:
        return self.arrays.pool.nbytes

    @property
    def resident_bytes(self) -> int:
        return self.arrays.k.nbytes + self.arrays.v.nbytes

    @property
    def index_bytes(self) -> int:
        """The bytes of summaries and tables."""
        return sum(x.nbytes for x in self.arrays[PageTensors._fields.index("hi") :])


def resident_rows(pages: PageTensors) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the resident rows as attention takes them: k (B, G, rows, d), v (B, G, rows, d_v)."""
    return pages.k.flatten(1, 2).transpose(1, 2), pages.v.flatten(1, 2).transpose(1, 2)


def _grown(old: torch.Tensor, dim: int, size: int, fill: int = 0) -> torch.Tensor:
    """Returns ``old`` with at least ``size`` entries along a dimension; new ones hold ``fill``."""
    if size <= old.shape[dim]:
        return old
    shape = list(old.shape)
    shape[dim] = size
    new = torch.full(shape, fill, dtype=old.dtype, device=old.device)
    new.narrow(dim, 0, old.shape[dim]).copy_(old)
    return new


def _grown_pool(old: torch.Tensor, n_page: int, device: torch.device) -> torch.Tensor:
    new = zeros_on_host((old.shape[0], n_page, *old.shape[2:]), device)
    new[:, : old.shape[1]].copy_(old)
    return new
