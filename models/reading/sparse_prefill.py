"""Sparse attention of a prefill: a chunk attends to the past pages that fit it, and to itself.

A page is PAGE rows. Its summary is the mean and the deviation of its keys, as in Quest
(cpu/quest/pages.py). The mean queries of the chunk's blocks score all past pages. The chosen rows
are copied next to the chunk's rows, so the kernels of dense attention do the rest.

    past pages      0 | 1 2 3 4 5 6 7 8 9 10 11 | 12 13 14 15        chunk
    chosen          0 |     3     6 7           | 12 13 14 15
    attended        0 3 6 7 12 13 14 15 chunk     one causal attention over these rows

The first page and the last RECENT rows are always chosen. All rows stay in the cache: a method
builds its index from all of them.
"""

from __future__ import annotations

from collections.abc import Container, Iterable
from typing import Any

import numpy as np

from sparsekv_cli.cache.attend import attend_causal
from sparsekv_cli.cache.layer import ChunkAttention, LayerCache
from sparsekv_cli.cache.row_sizes import Sizes
from sparsekv_cli.cache.spec import FULL, AttnInput, LayerSpec
from sparsekv_cli.cache.store import KVStore, padded
from sparsekv_cli.cpu.jit import bf16
from sparsekv_cli.cpu.jit.floats import as_f32
from sparsekv_cli.cpu.jit.pointers import on_lines
from sparsekv_cli.cpu.jit.value import LANES
from sparsekv_cli.cpu.quest import byte_pages, pages
from sparsekv_cli.cpu.quest.best_pages import best_pages
from sparsekv_cli.cpu.quest.byte_pages import PAGE

CHUNK = 512  # rows that share a choice; a chunk begins at a multiple of it
RECENT = 1024  # last rows before a chunk, which are always attended
BLOCK = 128  # rows of a chunk whose mean query scores the pages
EVERY = 4  # rows of which one counts in a mean query
N_DENSE = 2  # first full layers, which stay dense
# Rows of the shortest prompt that ``auto`` reads sparsely, by whether the CPU has tiles (AMX). With
# them attention is a fifth of reading 16384 tokens, without them half of it.
SHORTEST = {True: 65536, False: 16384}
N_SAMPLES = 512  # rows whose mean is the keys' centre


def shortest_prompt(attention: str) -> int:
    """Returns the rows of the shortest prompt that is sparse by a value of --prefill-attention."""
    return SHORTEST[bf16.HAS_TILES] if attention == "auto" else 0


def first_dense(n: int) -> int:
    """Returns the position of the last rows of a prompt of n, which stay dense."""
    return (n // CHUNK - 1) * CHUNK


def summary_bytes(layers: Iterable[Sizes], n: int) -> int:
    """Returns the bytes of all page summaries at the end of a prompt of n rows."""
    sparse = [layer for layer in layers if layer.kind == FULL][N_DENSE:]
    of_page = sum(layer.n_head_kv * (2 * padded(layer.head_dim) + 4) for layer in sparse)
    return of_page * -(-n // PAGE)


class SparseAttention:
    """How the chunks of one prefill attend: see ``forward_steps(attend=)``."""

    def __init__(
        self, dense: ChunkAttention, budget: int, n: int, sources: Container[int] = ()
    ) -> None:
        """dense: attends to all rows. budget: past rows that a chunk attends to, more than RECENT.

        n: the rows of the sequence after the prefill. The last 512 to 1023 rows are dense, because
        the question lies there. sources: layers whose rows later layers read.
        """
        self._dense, self._budget = dense, budget // PAGE * PAGE
        self._end = first_dense(n)
        self._sources = sources
        self._chosen: dict[tuple[int, int], np.ndarray] = {}  # by layer in ``sources``, position
        self._summaries: dict[int, PageSummaries] = {}  # by layer, while it is sparse
        self._choice = PageChoice()
        self._rows: KVStore | None = None  # the attended rows of a chunk

    def __call__(self, cache: LayerCache, x: AttnInput) -> Any:
        """Adds a chunk's rows to a cache. Returns their attention (H, T, d_v), of x.q's type."""
        spec = cache.spec
        is_full = spec.kind == FULL and spec.full_place >= N_DENSE
        if not is_full or not self._budget < x.pos < self._end or x.pos % CHUNK:
            if x.pos >= self._end:
                self._summaries.pop(spec.layer, None)
            return self._dense(cache, x)
        store = cache.extend(x)
        if store.n != x.pos + x.q.shape[1]:  # a method has dropped rows of an earlier prompt
            return attend_causal(x.q, store, spec)
        chosen = self._choose(store, x, spec)
        return attend_causal(x.q, self._gathered(store, chosen, x.q.shape[1], spec), spec)

    def _choose(self, store: KVStore, x: AttnInput, spec: LayerSpec) -> np.ndarray:
        """Returns the pages that a chunk attends to, int32 (G, m), ascending.

        A layer that reads an earlier layer's rows takes that layer's pages, unless that is dense.
        """
        if (spec.source, x.pos) in self._chosen:
            return self._chosen[spec.source, x.pos]
        n_page, n_best = x.pos // PAGE, self._budget // PAGE
        if spec.layer not in self._summaries:
            self._summaries[spec.layer] = PageSummaries(self._end // PAGE)
        summaries = self._summaries[spec.layer]
        summaries.extend(store, n_page, spec)
        chosen = self._choice(mean_queries(x.q), summaries, n_page, n_best, spec)
        if spec.layer in self._sources:
            self._chosen[spec.layer, x.pos] = chosen
        return chosen

    def _gathered(self, store: KVStore, chosen: np.ndarray, n_new: int, spec: LayerSpec) -> KVStore:
        """Returns a store with the rows of the chosen pages and the last ``n_new`` rows."""
        n_past, first = chosen.shape[1] * PAGE, store.n - n_new
        if self._rows is None or _sizes(self._rows) != _sizes(store):
            self._rows = KVStore(spec)
        rows = self._rows
        rows.n = 0
        rows.reserve(n_past + n_new)
        for given, to in zip(store.arrays, rows.arrays, strict=True):
            for head, listed, of_head in zip(given, chosen, to, strict=True):
                in_pages = head[:first].reshape(-1, PAGE, head.shape[1])
                np.take(in_pages, listed, 0, of_head[:n_past].reshape(-1, PAGE, head.shape[1]))
                of_head[n_past : n_past + n_new] = head[first : store.n]
        rows.n = n_past + n_new
        return rows


def rows_attended(n: int, budget: int) -> float:
    """Returns how many rows all n rows of a prompt attend to in a sparse layer, together."""
    starts = np.arange(0, n, CHUNK)
    sizes = np.minimum(CHUNK, n - starts)
    is_sparse = (starts > budget) & (starts < first_dense(n))
    return float((sizes * (np.where(is_sparse, budget, starts) + sizes / 2)).sum())


def _sizes(store: KVStore) -> tuple[int, ...]:
    """Returns the kv heads of a store, and the items of a row of K and of V."""
    return len(store.k), store.k.shape[2], store.v.shape[2]


def mean_queries(q: np.ndarray) -> np.ndarray:
    """Returns the mean query of each block of a chunk, f32 (H, blocks, d); q f32 or bf16 (H, T, d).

    T is a multiple of EVERY. The last block may have fewer rows than BLOCK.
    """
    sample = as_f32(np.ascontiguousarray(q[:, EVERY - 1 :: EVERY]))
    starts = np.arange(0, sample.shape[1], BLOCK // EVERY)
    counts = np.diff(starts, append=sample.shape[1]).astype(np.float32)
    with np.errstate(all="ignore"):  # see PageSummaries.extend
        return np.add.reduceat(sample, starts, axis=1) / counts[:, None]


class PageSummaries:
    """The summaries of a layer's pages while its chunks are prefilled, as bytes.

    A page's summary is made once, when a chunk after the page comes.
    codes uint8 (G, tiles, words, 16, 4), scales f32 (G, tiles, 16): see cpu/quest/byte_pages.py.
    """

    def __init__(self, most: int) -> None:
        """most: pages, at most."""
        self._n_page, self._n_tiles = 0, -(-most // LANES)
        self._centre = np.empty((0, 0), np.float32)
        self.codes = np.empty((0, 0, 0, LANES, 4), np.uint8)
        self.scales = np.empty((0, 0, LANES), np.float32)

    def extend(self, store: KVStore, n_page: int, spec: LayerSpec) -> None:
        """Adds the pages up to n_page, of whole tiles. The first ones give the centre."""
        if not self._n_page:
            room = spec.n_head_kv, self._n_tiles
            self.codes = on_lines((*room, padded(spec.head_dim) // 2, LANES, 4), np.uint8)
            self.scales = on_lines((*room, LANES), np.float32)
            n = n_page * PAGE
            sample = np.ascontiguousarray(store.k[:, : n : max(1, n // N_SAMPLES)])
            with np.errstate(all="ignore"):  # of damaged weights: the last row's check names them
                self._centre = store.k_type.read(sample).astype(np.float32).mean(1)
        byte_pages.code_pages(
            store.layout, self._n_page // LANES, n_page // LANES,
            spec.head_dim if store.k_type.rotates else 0, self._centre, self.codes, self.scales,
            spec.n_threads,
        )  # fmt: skip
        self._n_page = n_page


class PageChoice:
    """Chooses pages. Its arrays serve all chunks of a prefill: new memory would take longer."""

    def __init__(self) -> None:
        self._scores = np.empty(0, np.float32)

    def __call__(
        self, q: np.ndarray, summaries: PageSummaries, n_page: int, n_best: int, spec: LayerSpec
    ) -> np.ndarray:
        """Returns the n_best pages of n_page for q f32 (H, R, d), int32 (G, n_best), ascending.

        A page's score is the largest over the queries of a kv head, after each query's best score
        is subtracted. Page 0 and those of the last RECENT rows come first, and earlier pages of a
        tie.
        """
        n_kv, width = spec.n_head_kv, 2 * summaries.codes.shape[2]
        rows = np.zeros((n_kv, q.size // q.shape[2] // n_kv, width), np.float32)
        rows[:, :, : q.shape[2]] = (q * np.float32(spec.scale)).reshape(n_kv, -1, q.shape[2])
        shape = rows.shape[:2]
        queries = np.empty((*shape, 2 * width), np.int8)
        starts, factors = np.empty(shape, np.int32), np.empty(shape, np.float32)
        byte_pages.round_queries(rows, queries, starts, factors)
        spans = -(-n_page // byte_pages.SPAN)
        size = spans * shape[0] * shape[1] * byte_pages.SPAN
        if self._scores.size < size:
            self._scores = on_lines(size + size // 4, np.float32)
        scores = self._scores[:size].reshape(spans, *shape, byte_pages.SPAN)
        best = np.empty((n_kv, n_page), np.float32)
        tops = np.empty((spans, *shape, LANES), np.float32)
        byte_pages.score_pages(
            queries, starts, factors, summaries.codes, summaries.scales, n_page, scores, tops,
            spec.n_threads,
        )  # fmt: skip
        chosen = np.empty((n_kv, n_best), np.int32)
        best_pages(scores, tops.max((0, 3)), n_page, RECENT // PAGE, best, chosen, spec.n_threads)
        return chosen


def mean_queries_ref(q):
    """numpy reference: q f32 (H, T, d)."""
    starts = range(0, q.shape[1], BLOCK)
    return np.stack([q[:, at : at + BLOCK][:, EVERY - 1 :: EVERY].mean(1) for at in starts], 1)


def choose_pages_ref(q, keys, n_best):
    """numpy reference: q (H, R, d), keys (G, n_page PAGE, d) -> int (G, n_best).

    Its summaries and queries are not rounded to bytes, so pages near the last one differ.
    """
    hi, lo = pages.page_summaries_ref(keys, PAGE, True)
    n_page, n_kv_head = hi.shape[1], len(hi)
    scores = pages.page_scores_ref(q.reshape(-1, q.shape[2]), hi, lo, 1.0)
    best = (scores - scores.max(1, keepdims=True)).reshape(n_kv_head, -1, n_page).max(1)
    best[:, 0] = best[:, n_page - RECENT // PAGE :] = np.inf
    return np.sort(np.argsort(-best, axis=1, kind="stable")[:, :n_best], axis=1)
