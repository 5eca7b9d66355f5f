"""FreeKV: "Boosting KV Cache Retrieval for Efficient LLM Inference" (Liu et al.).

Attention reads sinks, a window and a few pages between them. The query of the previous step chooses
the pages, so that they are copied to the device a step ahead. If a query differs much from the
previous one, its kv head chooses again with the new query. A pool on the host has all pages.

| paper | here |
|---|---|
| 3.2 page summaries (min-max pooled keys), page scores | cpu/quest/pages.py |
| 3.2 group-consistent selection, mean of softmax(P) | cpu/freekv/choice.py choose_pages |
| 3.2 speculative retrieval for the next step | cpu/freekv/step.py recall_ahead, on a thread |
| 3.3 query-based identification, C_i < tau; head-wise correction | mean_cosine, recall_step |
| 4.2 hybrid layouts, NHD and HND | cpu/freekv/pages.py |
| 4.2 streamed recall | recall_pages |

Departures; docs/methods.md has their reasons and figures:
(1) Pages hold 4 rows and have mean + std and mean - std. tau is .9. ``preset=paper``: largest and
    smallest element, 32 rows, .8, 64 sinks, no groups.
(2) The window starts at a page, so it holds W to W + p - 1 rows. A choice made a step ahead counts
    the pages that leave the window by then.
(3) Recalled pages stay in an LRU cache of twice the pages that are chosen.
(4) A recall converts as it copies, without the paper's two buffers. On a CPU the pool is the store
    of all rows. A step writes its row there, and a prompt is extended where it lies.
(5) Without a core to spare (``overlap``) no page is chosen ahead; the results are the same.
(6) On a CPU, pages are summarised again in groups of 8. If the best groups hold less than half of
    the pages, only their pages are scored (``groups``).
(7) Sinks and window take a quarter of the budget each at most.
(8) While the budget covers the context, or no page has left the window, attention is dense.
(9) The first step after a prefill chooses with its own query, not with the prefill's last one.
On a CPU the device's memory is the host's: a recall is a copy within it.
"""

import math
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, NamedTuple

import numpy as np

from sparsekv_cli.cache.contracts import Undo
from sparsekv_cli.cache.layer import LayerCache, rows_alike
from sparsekv_cli.cache.spec import AttnInput, Budget, LayerSpec, Memory
from sparsekv_cli.cache.store import padded
from sparsekv_cli.cpu.freekv.pages import (
    ATTENDED,
    CORRECTED,
    GROUPED,
    HIT,
    N_STATISTICS,
    OFFLOADED,
    RECALLED,
    SCORED,
    STEPPED,
    PageCache,
    SavedPages,
    Summaries,
)
from sparsekv_cli.cpu.freekv.step import FreeKVStep
from sparsekv_cli.methods.base import DENSE_HELP, Method
from sparsekv_cli.settings.option import option
from sparsekv_cli.system.work import usable_cores

MOST_ROWS = 1 << 30  # largest value of an option that is a number of rows


class PagePlan(NamedTuple):
    """The numbers of pages that a step attends to, and where its window begins."""

    n_sink: int  # number of pages with sinks
    n_best: int  # number of chosen pages, k
    window: int  # number of the window's first page


@dataclass(frozen=True)
class FreeKV(Method):
    """Options of FreeKV; symbols as in the paper."""

    paper: ClassVar[str] = "arXiv:2505.13109"
    description: ClassVar[str] = "pages recalled a step ahead, and corrected if the query changes"
    use: ClassVar[str] = "rows that are far from the processor; it misses some of many similar keys"
    work_of_a_head: ClassVar[int] = 2048
    cache_types: ClassVar[tuple[str, ...]] = ("f16",)
    device_cache: ClassVar[str] = "freekv:DeviceFreeKV"
    presets: ClassVar[dict[str, dict[str, Any]]] = {
        "tuned": {},
        "paper": {"page": 32, "summary": "minmax", "sinks": 64, "tau": 0.8, "groups": False},
    }

    dense_layers: tuple[int, ...] = option((0,), DENSE_HELP)
    preset: str = option("tuned", "a set of values; -o overrides them", choices=tuple(presets))
    budget: Budget = option(Budget(tokens=512), "B: rows attended a head, with S and W: N or P%")
    page: int = option(4, "p: rows of a page", at_least=1, at_most=MOST_ROWS)
    summary: str = option("meanstd", "summary of a page's keys", choices=("meanstd", "minmax"))
    tau: float = option(0.9, "cosine of successive queries below which a kv head is corrected")
    sinks: int = option(
        16,
        "S: first rows, always attended (in whole pages; at most B/4)",
        at_least=0,
        at_most=MOST_ROWS,
    )
    window: int = option(
        64, "W: last rows, always attended, at least (at most B/4)", at_least=1, at_most=MOST_ROWS
    )
    groups: bool = option(
        True, "in a long context, score only pages of the best groups of 8 (on the host)"
    )
    speculate: bool = option(True, "choose pages with the query of the step before")
    correct: bool = option(True, "choose again for kv heads whose query has turned away")
    cache_pages: float = option(
        2.0, "size of the cache of recalled pages, in chosen pages", at_least=1, at_most=MOST_ROWS
    )
    overlap: str = option(
        "auto", "choose pages on a second thread; auto: if a core is free",
        choices=("auto", "true", "false"),
    )  # fmt: skip

    def plan(self, n: int, n_sink: int | None = None) -> PagePlan | None:
        """Returns the pages that a step attends to in a context of n rows; None: all rows.

        n_sink: the number of pages with sinks, if it is fixed already. If the budget is a share,
        the window and the number of chosen pages grow with the context.
        """
        budget, page = self.budget.rows(n), self.page
        if n_sink is None:
            n_sink = min(-(-self.sinks // page), max(1, budget // (4 * page)))
        recent = self.recent(budget)
        window = (n - recent) // page
        if budget >= n or window <= n_sink:
            return None
        return PagePlan(n_sink, max(1, (budget - n_sink * page - recent) // page), window)

    def recent(self, budget: int) -> int:
        """Returns the least number of rows in the window. budget: rows attended a head."""
        return min(self.window, max(1, budget // 4))

    def slots(self, plan: PagePlan) -> int:
        """Returns how many pages a kv head's cache of recalled pages has room for."""
        return max(plan.n_best, round(self.cache_pages * plan.n_best))

    @property
    def threshold(self) -> float:
        """tau. It is -inf for -1 and below, and inf above 1, so that rounding decides nothing."""
        if not self.correct or self.tau <= -1:
            return -math.inf
        return math.inf if self.tau > 1 else self.tau

    def overlaps(self, n_threads: int) -> bool:
        """Returns whether a second thread chooses pages while the decoder's threads compute."""
        if not self.speculate or self.threshold == math.inf or self.overlap == "false":
            return False
        return self.overlap == "true" or self._n_core > n_threads

    @cached_property
    def _n_core(self) -> int:
        return usable_cores()

    @cached_property
    def worker(self) -> ThreadPoolExecutor:
        """The thread that chooses pages ahead, for all layers. It ends with the method."""
        return ThreadPoolExecutor(1, "freekv")

    def sparse_layer(self, spec: LayerSpec) -> LayerCache:
        return FreeKVCache(spec, self)


class _Before(NamedTuple):
    """The fields of FreeKVCache before a step. pages: None while attention is dense."""

    pages: SavedPages | None
    previous: np.ndarray
    previous_n: int


class FreeKVCache(LayerCache):
    """The rows of one layer: a KVStore with all rows, and a PageCache while attention is sparse."""

    can_prefill_in_parts = True
    queries_read = 0

    def __init__(self, spec: LayerSpec, method: FreeKV) -> None:
        super().__init__(spec)
        self.method = method
        self._cache: PageCache | None = None
        self._known: Summaries | None = None  # summaries of pages while there is no PageCache
        self._overlaps = method.overlaps(spec.n_threads)
        # The running choice of pages for the next step, and the first page of that step's window.
        self._ahead: tuple[Future[None], int] | None = None
        self._previous = np.zeros((spec.n_head, padded(spec.head_dim)), np.float32)
        self._previous_n = 0  # rows in context when ``_previous`` was the query; 0: unknown
        self._statistics = np.zeros((spec.n_head_kv, N_STATISTICS), np.int64)
        self._step = FreeKVStep(
            spec.scale, spec.softcap, spec.sinks, method.threshold, spec.n_threads
        )
        self._waited = 0  # ns that steps have waited for the thread that chooses pages

    # --- prefill ----------------------------------------------------------------------------------

    def extend(self, x: AttnInput) -> Any:
        self._leave_pages()
        return super().extend(x)

    def finish_prefill(self) -> None:
        self._previous_n = 0
        plan = self.method.plan(self.n + 1)
        if plan is not None:
            self._enter_pages(plan)

    def _enter_pages(self, plan: PagePlan) -> PageCache:
        """Makes a PageCache for the pages of ``plan`` and gives it the summaries in ``_known``."""
        method = self.method
        self._cache = cache = PageCache(
            self.store, self._statistics, page=method.page, n_sink=plan.n_sink,
            n_ring=-(-(method.window + method.page - 1) // method.page), n_slot=method.slots(plan),
            window=plan.window, meanstd=method.summary == "meanstd",
            groups=method.groups, known=self._known,
        )  # fmt: skip
        self._known = None
        return cache

    def _leave_pages(self) -> None:
        """Drops the PageCache, if there is one, and keeps its summaries in ``_known``."""
        self._wait()
        if self._cache is not None:
            self._known, self._cache = self._cache.summaries, None

    # --- decode -----------------------------------------------------------------------------------

    def decode(self, x: AttnInput) -> np.ndarray:
        self._wait()
        spec, method, cache = self.spec, self.method, self._cache
        n, q, rows = self.n + 1, x.q[:, 0], spec.n_head * (self.n + 1)
        plan = method.plan(n, None if cache is None else cache.n_sink)
        if plan is None:
            return self._decode_dense(x)
        if cache is None:
            cache = self._enter_pages(plan)
        self.store.reserve(n)
        cache.make_room(plan.window, method.slots(plan))
        attended, counts = None, np.empty(spec.n_head_kv, np.int64)
        if self.records_attended:
            width = (plan.n_sink + plan.n_best) * method.page + n - plan.window * method.page
            attended = np.empty((spec.n_head_kv, width), np.int32)
            self.attended = attended, counts
        out = np.empty((spec.n_head, padded(spec.value_dim)), np.float32)
        current = not method.speculate or self._previous_n != n - 1
        self._step.prepare(cache, n, plan.window, plan.n_best)
        self._step.run(
            current, q=x.q, previous=self._previous, k=x.k, v=x.v, out=out, attended=attended,
            n_attended=counts,
        )  # fmt: skip
        cache.offloaded, self.store.n = plan.window, n
        self._remember(q, n)
        self.ledger.step(rows, 0, 0, 0, True)
        if self._overlaps:
            self._recall_ahead(cache)
        return out

    def _decode_dense(self, x: AttnInput) -> np.ndarray:
        """Runs a step that attends to all rows."""
        self._leave_pages()
        self.store.append_row(x.k, x.v)
        self._remember(x.q[:, 0], self.store.n)
        return self.attend_all(x.q)

    def _remember(self, q: np.ndarray, n: int) -> None:
        self._previous_n = 0  # unknown if the step is interrupted
        self._previous[:] = q
        self._previous_n = n

    def _recall_ahead(self, cache: PageCache) -> None:
        """Chooses and copies the next step's pages with this step's query, on the second thread."""
        n = cache.n + 1
        plan = self.method.plan(n, cache.n_sink)
        if plan is None:
            return
        cache.make_room(plan.window, self.method.slots(plan))
        self._step.prepare(cache, n, plan.window, plan.n_best)
        self._ahead = self.method.worker.submit(self._step.ahead()), plan.window

    def _wait(self) -> None:
        """Waits until the second thread has copied the next step's pages. Raises its error once."""
        if self._ahead is None:
            return
        future, window = self._ahead
        begin = time.perf_counter_ns()
        try:
            future.result()
        except Exception:
            self._ahead = None
            raise
        self._waited += time.perf_counter_ns() - begin
        if self._cache is not None:
            self._cache.offloaded = window
        self._ahead = None

    # --- the rest ---------------------------------------------------------------------------------

    def most_rows(self, n: int) -> int:
        n_sink = None if self._cache is None else self._cache.n_sink
        return rows_alike(lambda rows: self.method.plan(rows, n_sink) is None, self.n + 1, n)

    def save_own(self) -> _Before:
        self._wait()
        pages = None if self._cache is None else self._cache.save()
        return _Before(pages, self._previous.copy(), self._previous_n)

    def take_back(self, undo: Undo) -> None:
        self._wait()
        super().take_back(undo)

    def take_back_own(self, own: _Before) -> None:
        pages, self._previous[:], self._previous_n = own
        if self._cache is not None:
            assert pages is not None
            self._cache.take_back(pages)

    def truncate(self, n: int) -> int:
        if n < self.n:
            self._leave_pages()
            self.store.truncate(n)
            if self._known is not None:
                self._known = self._known._replace(n=min(self._known.n, n // self.method.page))
            self._previous_n = 0
        return self.n

    def held_bytes(self, n: int) -> int:
        plan, method, spec = self.method.plan(n), self.method, self.spec
        rows = super().held_bytes(n)
        if plan is None:
            return rows
        n_resident = (plan.n_sink + method.slots(plan)) * method.page + method.window
        share = 1 + 1 / GROUPED if method.groups else 1
        summaries = 2 * 2 * padded(spec.head_dim) * share + 4  # f16, and an entry of ``slot_of``
        return (
            rows
            + super().held_bytes(n_resident)
            + int(spec.n_head_kv * (n // method.page) * summaries)
        )

    def memory(self) -> Memory:
        host, cache = self.store.nbytes, self._cache
        if cache is None:
            return Memory(host=host, index=0 if self._known is None else self._known.nbytes)
        index = cache.index_bytes + self._previous.nbytes
        return Memory(host=host, device=cache.resident_bytes, index=index)

    def counters(self) -> Mapping[str, int]:
        """Returns the counts of dense steps plus those that the kernels counted in sparse steps."""
        self._wait()
        total = [int(count) for count in self._statistics.sum(0)]
        group, width = self.spec.group, padded(self.spec.head_dim)
        row_bytes = 2 * (width + padded(self.spec.value_dim))
        counts = self.ledger.counts.copy()
        for prefix in ("", "sparse_"):
            counts[f"{prefix}rows_scored"] += 2 * total[SCORED] * group  # hi and lo
            counts[f"{prefix}rows_attended"] += total[ATTENDED] * group
        moved = (total[RECALLED] + total[OFFLOADED]) * self.method.page * row_bytes
        counts["bytes_moved"] += moved
        counts["bytes_read"] += total[ATTENDED] * row_bytes + total[SCORED] * 4 * width + moved
        for name, column in (
            ("pages_hit", HIT), ("pages_recalled", RECALLED), ("pages_offloaded", OFFLOADED),
            ("heads_corrected", CORRECTED), ("heads_stepped", STEPPED),
        ):  # fmt: skip
            counts[name] += total[column]
        counts["us_waited"] += self._waited // 1000
        return counts
