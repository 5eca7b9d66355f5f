"""Quest: "Query-Aware Sparsity for Efficient Long-Context LLM Inference" (Tang et al., 2024).

Rows are read in pages. Each page has a summary: the smallest and largest key element of every
channel. The summary bounds the score of all keys of the page. A step reads the pages with the
highest bounds.

| paper | here |
|---|---|
| 3.3 min and max of a page's keys, kept as pages fill | cpu/quest/pages.py page_summaries |
| 3.3 criticality of a page, sum_c max(q_c min_c, q_c max_c) | cpu/quest/pages.py page_scores |
| 3.4 top-k pages, then attention over their rows | cpu/quest/pages.py select_pages, attend_rows |

Departures; docs/methods.md has their reasons:
(1) The query heads of a kv head share its pages. They are chosen by the mean of the heads' softmax
    over the scores, as in FreeKV. (The paper's models have one query head a kv head.)
(2) Sinks are attended to in addition to the budget. Page 0 is summarised without them.
(3) The budget is rounded up to whole pages. The page of the current token is one of them. It is
    always read.
(4) ``summary=meanstd`` (default) scores q . mean + |q| . std instead of the paper's bound (minmax).
(5) While the budget covers the context, attention is dense.
(6) Keys of other types than f16 are rounded to f16 for the summaries.
(7) A page has 8 rows (paper: 16). Larger pages miss one row among many that look alike. The budget
    is 1024 rows at every depth.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np

from sparsekv_cli.cache.layer import DenseCache, LayerCache, SelectingCache
from sparsekv_cli.cache.spec import N_SINKS, AttnInput, Budget, LayerSpec, Memory
from sparsekv_cli.cache.store import padded
from sparsekv_cli.cpu.jit.pointers import on_lines
from sparsekv_cli.cpu.jit.value import LANES
from sparsekv_cli.cpu.quest import pages
from sparsekv_cli.methods.base import Method
from sparsekv_cli.settings.option import option

LARGEST_PAGE = 4096


@dataclass(frozen=True)
class Quest(Method):
    """Options of Quest."""

    paper: ClassVar[str] = "arXiv:2406.10774"
    description: ClassVar[str] = "whole pages, chosen by summaries of their keys"
    use: ClassVar[str] = (
        "long contexts, without a calibration; it misses a few of many similar keys"
    )
    work_of_a_head: ClassVar[int] = 512
    device_cache: ClassVar[str] = "quest:DeviceQuest"

    budget: Budget = option(Budget(tokens=1024), "rows attended a head, in whole pages: N or P%")
    page: int = option(
        8, "rows of a page, more than the 4 sinks", at_least=N_SINKS + 1, at_most=LARGEST_PAGE
    )
    summary: str = option(
        "meanstd", "summary of a page's keys; minmax is the paper's", choices=("minmax", "meanstd")
    )

    def sparse_layer(self, spec: LayerSpec) -> LayerCache:
        return QuestCache(spec, self)


class _Before(NamedTuple):
    """The fields of QuestCache before a step."""

    n_page: int  # pages with a summary


class QuestCache(SelectingCache):
    def __init__(self, spec: LayerSpec, method: Quest) -> None:
        super().__init__(spec)
        self.method = method
        self._n_page = 0  # number of pages, from the first on, that have a summary
        # Summaries as f16 bits, (G, pages, d).
        shape = (spec.n_head_kv, 0, padded(spec.head_dim))
        self._hi, self._lo = np.empty(shape, np.uint16), np.empty(shape, np.uint16)

    def finish_prefill(self) -> None:
        if not self.is_dense_at(self.store.n + 1):
            self._summarise((self.store.n - 1) // self.method.page)

    def _summarise(self, n_page: int) -> None:
        """Summarises the whole pages below ``n_page`` that have no summary yet."""
        if n_page <= self._n_page:
            return
        store, spec, page = self.store, self.spec, self.method.page
        if n_page > self._hi.shape[1]:
            self._grow(max(n_page, store.capacity // page))
        keys, first = store.k, 0
        if spec.cache_type_k != "f16":  # an f16 copy of the new pages' keys
            first = self._n_page * page
            keys = store.k_type.read(store.k[:, first : store.n]).astype(np.float16)
        at = keys.__array_interface__["data"][0] - first * keys.strides[1]
        pages.page_summaries(
            at, keys.strides[0], keys.strides[1], self._n_page, n_page, page, spec.n_head_kv,
            self._hi.shape[2], self.method.summary == "meanstd", self._hi, self._lo, N_SINKS,
        )  # fmt: skip
        self._n_page = n_page

    def _grow(self, n_page: int) -> None:
        """Makes room for the summaries of ``n_page`` pages."""
        n_kv_head, _, width = self._hi.shape
        grown = []
        for old in (self._hi, self._lo):
            new = on_lines((n_kv_head, n_page, width), np.uint16)
            new[:, : self._n_page] = old[:, : self._n_page]
            grown.append(new)
        self._hi, self._lo = grown

    def is_dense_at(self, n: int) -> bool:
        return self.method.budget.rows(n) + N_SINKS >= n

    def select(self, q: np.ndarray, n: int) -> tuple[np.ndarray, np.ndarray, int]:
        spec, page = self.spec, self.method.page
        n_page = (n - 1) // page  # whole pages before the current token's page
        self._summarise(n_page)
        n_best = min(n_page, (self.method.budget.rows(n) - 1) // page)
        scores = np.empty((spec.n_head, n_page + LANES), np.float32)
        pages.page_scores(
            q, self._hi, self._lo, n_page, spec.n_head_kv, spec.scale, scores, spec.n_threads
        )
        idx = np.empty((spec.n_head_kv, N_SINKS + n_best * page + n - n_page * page), np.int32)
        counts = np.empty(spec.n_head_kv, np.int64)
        pages.select_pages(
            scores, n_page, n_best, page, n, N_SINKS, spec.softcap, idx, counts, spec.n_threads
        )
        return idx, counts, 2 * spec.n_head * n_page  # two summary vectors a page

    def bytes_to_select(self, n: int) -> int:
        n_page = (n - 1) // self.method.page
        return self.spec.n_head_kv * n_page * (self._hi.strides[1] + self._lo.strides[1])

    def held_bytes(self, n: int) -> int:
        n_page = 0 if self.is_dense_at(n) else n // self.method.page
        heads, _, width = self._hi.shape
        return super().held_bytes(n) + 2 * self._hi.itemsize * heads * n_page * width

    def save_own(self) -> _Before:
        return _Before(self._n_page)

    def take_back_own(self, own: _Before) -> None:
        self._n_page = own.n_page

    def truncate(self, n: int) -> int:
        self._n_page = min(self._n_page, n // self.method.page)
        return super().truncate(n)

    def memory(self) -> Memory:
        return Memory(host=self.store.nbytes, index=self._hi.nbytes + self._lo.nbytes)


class DenseThenPages(QuestCache, DenseCache):
    """A dense layer of lfps.

    In contexts of more than ``pages_from`` rows it attends to chosen pages.
    """

    def __init__(self, spec: LayerSpec, pages: Quest, pages_from: int) -> None:
        super().__init__(spec, pages)
        self._pages_from = pages_from
        self.attends_to_some = False

    def is_dense_at(self, n: int) -> bool:
        return n <= self._pages_from or super().is_dense_at(n)

    def finish_prefill(self) -> None:
        super().finish_prefill()
        self.attends_to_some = not self.is_dense_at(self.store.n + 1)

    def decode(self, x: AttnInput) -> np.ndarray:
        is_dense = self.is_dense_at(self.store.n + 1)
        return DenseCache.decode(self, x) if is_dense else super().decode(x)

    def decode_rows(self, rows: Sequence[AttnInput]) -> np.ndarray:
        dense = DenseCache if self.is_dense_at(self.store.n + len(rows)) else LayerCache
        return dense.decode_rows(self, rows)
