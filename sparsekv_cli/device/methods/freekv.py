"""FreeKV on a device and its host (methods/freekv.py).

| paper | here |
|---|---|
| 3.2 speculative retrieval for the next step | _recall_ahead, on a second stream |
| 3.3 query-based identification, head-wise correction | kernels/freekv/correction.py enter_row |
| 4.2 hybrid layouts, NHD and HND; offloading | kernels/freekv/pages.py, offload_pages |
| 4.2 streamed recall | kernels/freekv/choice.py choose_pages, recall.py fetch_pages |

A step only launches. The device decides which kv heads choose again, what they choose, and which
pages are fetched. A kernel reads these pages from pinned host memory. A kv head that need not
choose skips the work, not the launch. While the budget covers the context, or no page has left the
window, attention is dense, and the rows lie in a store.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from sparsekv_cli.cache.spec import AttnInput, LayerSpec, Memory
from sparsekv_cli.device.cache import CachePlan, DeviceCache, DeviceInput, attend_all, count_dense
from sparsekv_cli.device.layers.store import DeviceStore
from sparsekv_cli.device.methods.freekv_pages import DevicePages, Workspace, resident_rows
from sparsekv_cli.device.streams import SideStream
from sparsekv_cli.kernels.attention import decode as attention
from sparsekv_cli.kernels.attention.arrivals import none_arrived
from sparsekv_cli.kernels.freekv import choice, correction, recall
from sparsekv_cli.kernels.freekv import pages as page_cache
from sparsekv_cli.kernels.freekv.choice import ChoiceBuffers
from sparsekv_cli.kernels.freekv.pages import Layout, PageTensors
from sparsekv_cli.kernels.quest import scores
from sparsekv_cli.methods.freekv import FreeKV, PagePlan

NEVER = 1 << 30  # the number of a page that no window reaches


class Recent(NamedTuple):
    """The least number of rows in the window, in this step and in the next."""

    now: int
    ahead: int


class DeviceFreeKV(DeviceCache):
    """One layer. Rows lie in a DeviceStore in dense steps and prefills, else in DevicePages."""

    takes_softcap = False

    side: SideStream

    def __init__(self, spec: LayerSpec, device: torch.device, method: FreeKV) -> None:
        super().__init__(spec, device, method)
        self._pages: DevicePages | None = None
        self._n = 0  # the number of rows while they lie in pages
        self.side = SideStream(device)
        self._ahead = (
            method.speculate and method.threshold != math.inf and method.overlap != "false"
        )
        self._previous = torch.zeros(1, spec.n_head, spec.head_dim, device=device)
        self._previous_n = 0  # rows of the context at that query's step
        self._statistics = torch.zeros(
            1, spec.n_head_kv, page_cache.N_STATISTICS.value, dtype=torch.int64, device=device
        )
        self._made = 0  # how often the workspace was made
        self._sizes: tuple[int, ...] = ()  # the sizes for which it was made
        self._pools: torch.Tensor | None = None  # see kernels/freekv/recall.py check_pools
        self._is_broken = False  # whether the last step was interrupted

    @property
    def n(self) -> int:
        return self.store.n if self._pages is None else self._n

    def reserve(self, n: int) -> None:
        if self._pages is None:
            super().reserve(n)

    # --- prefill ----------------------------------------------------------------------------------

    def extend(self, x: AttnInput) -> Any:
        self._leave_broken_step()
        self._leave_pages()
        return super().extend(x)

    def finish_prefill(self) -> None:
        self._previous_n = 0
        plan = self.method.plan(self.n + 1)
        if plan is not None:
            self._enter_pages(plan, self.bound(self.n + 1))  # what the first step needs

    def _layout(self, n_sink: int) -> Layout:
        method = self.method
        n_ring = -(-(method.window + method.page - 1) // method.page)
        return Layout(n_sink, n_ring, method.summary == "meanstd")

    def _recent_of(self, n: int) -> Recent:
        return Recent(*(self.method.recent(self.budget_rows(n + i)) for i in range(2)))

    def _enter_pages(self, plan: PagePlan, n_max: int) -> None:
        """Moves all rows from the store to pages, with room for n_max."""
        method = self.method
        self._n = self.store.n
        self._pages = DevicePages(
            self.store, self._statistics, self._layout(plan.n_sink), page=method.page,
            window=plan.window, n_page=(n_max + 1) // method.page,
            n_pool=self._n_pool(n_max), n_slot=method.slots(plan), n_best=plan.n_best,
        )  # fmt: skip
        self.store = DeviceStore(self.spec, self.device)

    def _n_pool(self, n_max: int) -> int:
        """Returns the number of pages to make room for on the host."""
        return (self.room_on_host(n_max) + 1) // self.method.page

    def tensors(self) -> list[torch.Tensor]:
        """Returns all but the pool, which keeps its place: kernels/freekv/recall.py check_pools."""
        rows = super().tensors() if self._pages is None else self._pages.arrays[1:]
        return [*rows, self._previous]

    def _arrays(self, tensors: Sequence[torch.Tensor]) -> PageTensors:
        assert self._pages is not None
        return PageTensors(self._pages.arrays.pool, *tensors)

    def replace_tensors(self, tensors: Sequence[torch.Tensor]) -> None:
        *rows, self._previous = tensors
        if self._pages is None:
            super().replace_tensors(rows)
        else:
            self._pages.arrays = self._arrays(rows)
            self._statistics = self._pages.arrays.statistics

    def begin_batch(self, caches: Sequence[DeviceFreeKV], n_rows: int) -> Hashable:
        """Makes a workspace for these rows if the last one does not fit."""
        if self._pages is not None:
            pools = [cache._pages.arrays.pool.data_ptr() for cache in caches if cache._pages]
            self._make_workspace(pools[0], n_rows)
            n_padded = n_rows - len(caches)
            if n_padded:
                *rows, _ = self.batch_tensors(n_rows)
                padding = self._arrays(rows).state[-n_padded:]
                padding.zero_()
                padding[..., page_cache.OFFLOADED.value] = NEVER  # no row of it goes to a pool
            if self._pools is not None:
                pools += [pools[0]] * n_padded
                apart = [(pool - pools[0]) // self._pages.arrays.pool.itemsize for pool in pools]
                self._pools.copy_(torch.tensor(apart, dtype=torch.int64))
        return super().begin_batch(caches, n_rows), self._made

    def rows_of_padding(self) -> int:
        if self._pages is None:
            return 1
        return self._pages.layout.n_sink * self.method.page + self._recent.now

    def _make_workspace(self, pool: int, n: int) -> None:
        """Makes a workspace for n rows. pool: the address of the first row's pool."""
        assert self._pages is not None
        spec, device, arrays = self.spec, self.device, self._pages.arrays
        n_sink, n_ring, _ = self._pages.layout
        n_kv, m = spec.n_head_kv, arrays.chosen.shape[2]
        n_page = max(1, arrays.hi.shape[2] - n_sink)
        sizes = n, n_page, m, n_sink, pool
        if self._sizes == sizes:
            return

        def numbers(*shape: int) -> torch.Tensor:
            return torch.zeros(n, n_kv, *shape, dtype=torch.int32, device=device)

        self._made += 1
        self._sizes = sizes
        self._pools = torch.zeros(n, dtype=torch.int64, device=device) if n > 1 else None
        self._work = Workspace(
            query=torch.zeros(n, spec.n_head, spec.head_dim, device=device),
            choice=ChoiceBuffers(
                wanted=numbers(),
                arrived=none_arrived(n, n_kv, device),
                fresh=numbers(m),
                scratch=scores.page_scratch(n, spec.n_head, n_kv, spec.head_dim, n_page, device),
            ),
            idx=numbers((n_sink + m + n_ring) * self.method.page),
            counts=numbers(),
        )

    def _leave_pages(self) -> None:
        """Moves all rows back to a store, bit for bit."""
        if self._pages is not None:
            store = DeviceStore(self.spec, self.device)
            self._pages.to_store(store, self._n)
            if self._sizes:  # ``begin_batch`` has made it
                del self._work
            self.store, self._pages, self._sizes = store, None, ()

    # --- decode -----------------------------------------------------------------------------------

    def begin_step(self, n: int, n_max: int) -> CachePlan:
        method = self.method
        self._leave_broken_step()
        plan = method.plan(n, None if self._pages is None else self._pages.layout.n_sink)
        if plan is None:
            self._leave_pages()
            until = n_max if method.plan(n_max) is None else n
            return CachePlan(("dense", super().begin_step(n, n_max).key), until)
        if self._pages is None:
            self._enter_pages(plan, n_max)
        assert self._pages is not None
        largest = method.plan(n_max, plan.n_sink)
        assert largest is not None
        n_page = (n_max + 1) // method.page
        self._pages.make_room(n_page, self._n_pool(n_max), method.slots(largest), largest.n_best)
        self._recent = self._recent_of(n)
        self._current = not method.speculate or self._previous_n != n - 1
        is_fixed = self._recent == self._recent_of(n_max)
        until = n if self._current or not is_fixed else n_max
        return CachePlan((self._pages.layout, self._recent, self._current), until)

    def drop_step(self, n: int) -> None:
        self._is_broken = True
        super().drop_step(n)

    def _leave_broken_step(self) -> None:
        """Leaves a step that was broken off, because slots may lack pages that they should hold."""
        if self._is_broken:
            self._leave_pages()
            self._previous_n, self._is_broken = 0, False

    def decode(self, x: DeviceInput, out: torch.Tensor | None = None) -> torch.Tensor:
        *rows, previous = self.batch_tensors(len(x.q))
        if self._pages is None:
            k, v = rows
            return self._decode_dense(x, k, v, previous, out)
        arrays, layout, work = self._arrays(rows), self._pages.layout, self._work
        n, budget = x.step.n, x.step.budget
        recent = self._recent.now
        reserved = layout.n_sink * self.method.page + recent
        if not self._ahead:
            recall.offload_pages(arrays, layout, n, recent, pools=self._pools)
        correction.enter_row(
            arrays, layout, x.q, previous, x.k, x.v, n, budget, recent, reserved,
            self.method.threshold, current=self._current, wanted=work.choice.wanted,
            query=work.query,
        )  # fmt: skip
        scale = float(self.spec.scale)
        choice.choose_pages(
            arrays, layout, work.query, n, budget, recent, reserved, scale, work.choice, q=x.q,
            previous=previous,
        )  # fmt: skip
        recall.fetch_pages(arrays, layout, n, recent, work.idx, work.counts, pools=self._pools)
        k, v = resident_rows(arrays)
        out = attention.attend_rows(
            x.q, k, v, work.idx, work.counts, self.softmax, out, arrived=x.step.arrived
        )
        if self.records_attended:
            self._note_positions(arrays, int(n[0]))
        if self._ahead:
            self._recall_ahead(arrays, previous, n, budget)
        return out

    def _decode_dense(
        self,
        x: DeviceInput,
        k: torch.Tensor,
        v: torch.Tensor,
        previous: torch.Tensor,
        out: torch.Tensor | None,
    ) -> torch.Tensor:
        """Runs a step that attends to all rows."""
        self.attended = None
        previous.copy_(x.q)
        return attend_all(x, k, v, self._n_max, self.softmax, out)

    def _note_positions(self, arrays: PageTensors, n: int) -> None:
        """Does ``keep_attended`` for a step at n rows of a sequence, before the next choice."""
        assert self._pages is not None
        p, n_sink = self.method.page, self._pages.layout.n_sink
        plan = self.method.plan(n, n_sink)
        assert plan is not None
        always = [*range(n_sink * p), *range(plan.window * p, n)]
        n_chosen = arrays.state[..., page_cache.N_CHOSEN.value]  # (1, G)
        in_page = torch.arange(p, dtype=torch.int32, device=self.device)
        chosen = (arrays.chosen[..., None] * p + in_page).flatten(2)  # (1, G, m p)
        rows = torch.tensor(always, dtype=torch.int32, device=self.device)
        rows = rows.expand(1, chosen.shape[1], -1)
        self.keep_attended(torch.cat([rows, chosen], dim=2), len(always) + n_chosen * p)

    def _recall_ahead(
        self, arrays: PageTensors, previous: torch.Tensor, n: torch.Tensor, budget: torch.Tensor
    ) -> None:
        """Chooses and recalls the next step's pages with this step's query, on a second stream.

        previous f32 (B, H, d): that query. n, budget int32 (B,) of this step. Kv heads whose number
        of pages changes with the next step's budget choose again then.
        """
        assert self._pages is not None
        layout, work = self._pages.layout, self._work
        recent = self._recent.ahead
        reserved = layout.n_sink * self.method.page + recent
        with self.side.fork():
            recall.offload_pages(
                arrays, layout, n, recent, ahead=1, budget=budget, reserved=reserved,
                wanted=work.choice.wanted, pools=self._pools,
            )  # fmt: skip
            choice.choose_pages(
                arrays, layout, previous, n, budget, recent, reserved, float(self.spec.scale),
                work.choice,
            )  # fmt: skip
            recall.fetch_pages(arrays, layout, pools=self._pools)

    def end_step(self, n: int) -> None:
        self._previous_n = n
        if self._pages is None:
            self.store.n = n
            count_dense(self, n, sparse=True)
        else:
            self._n = n
            self.ledger.step(self.spec.n_head * n, 0, 0, 0, True)

    # --- the rest ---------------------------------------------------------------------------------

    def truncate(self, n: int) -> int:
        if n < self.n:
            self._leave_broken_step()
            self._leave_pages()
            self.store.truncate(n)
            self._previous_n = 0
        return self.n

    def memory(self) -> Memory:
        if self._pages is None:
            return super().memory()
        work = self._work.nbytes if self._sizes else 0  # ``begin_batch`` makes it
        index = self._pages.index_bytes + self._previous.nbytes + work
        return Memory(host=self._pages.pool_bytes, device=self._pages.resident_bytes, index=index)

    def counters(self) -> Mapping[str, int]:
        """Returns the steps counted by the kernels, added to the dense ones."""
        spec = self.spec
        hit, recalled, sent, scored, corrected, stepped, attended = (
            self._statistics[0].sum(0).tolist()
        )
        row_bytes = 2 * (spec.head_dim + spec.value_dim)
        counts = self.ledger.counts.copy()
        for prefix in ("", "sparse_"):
            counts[f"{prefix}rows_scored"] += 2 * scored * spec.group  # hi and lo
            counts[f"{prefix}rows_attended"] += attended * spec.group
        moved = (recalled + sent) * self.method.page * row_bytes
        counts["bytes_moved"] += moved
        counts["bytes_read"] += attended * row_bytes + scored * 4 * spec.head_dim + moved
        counts.update(
            pages_hit=hit, pages_recalled=recalled, pages_offloaded=sent,
            heads_corrected=corrected, heads_stepped=stepped, us_waited=self.side.us_waited,
        )  # fmt: skip
        return counts
