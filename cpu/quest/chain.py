"""Attention over pages (quest/pages.py) as compiled code of a chain of layers (layer/chain.py)."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray, njit

from sparsekv_cli.cpu.attention.decode import append_row, attend_rows
from sparsekv_cli.cpu.jit.pointers import (
    address,
    double_pointer,
    float_pointer,
    half_pointer,
    integer_pointer,
)
from sparsekv_cli.cpu.layer.chain import N_LAYOUT, CompiledStep
from sparsekv_cli.cpu.quest.pages import page_scores, select_pages

# Words behind the layout: what a step changes, sizes, addresses.
N, N_PAGE, N_BEST, N_SUMMARIES, HI, LO = range(N_LAYOUT, N_LAYOUT + 6)
N_HEAD, N_HEAD_KV, K_WIDTH, V_WIDTH, PAGE, N_SINKS, N_THREADS, SCALE, COUNTS = range(14, 23)
N_WORDS = 23


@njit(cache=True, nogil=True)
def _compiled_step(words, q, k, v, out):
    """Stores row N - 1, attends to the best pages. q f32 (H, d), k (G, d), v (G, d_v)."""
    word = carray(integer_pointer(words), N_WORDS)
    layout, n, n_page, n_best = word[:N_LAYOUT], word[N], word[N_PAGE], word[N_BEST]
    n_head, n_kv, page, n_sinks = word[N_HEAD], word[N_HEAD_KV], word[PAGE], word[N_SINKS]
    k_width, v_width, n_threads = word[K_WIDTH], word[V_WIDTH], word[N_THREADS]
    scale = np.float32(carray(double_pointer(words), N_WORDS)[SCALE])
    queries = carray(float_pointer(q), (n_head, k_width))
    append_row(
        carray(float_pointer(k), (n_kv, k_width)), carray(float_pointer(v), (n_kv, v_width)),
        layout, n - 1,
    )  # fmt: skip
    summaries = (n_kv, word[N_SUMMARIES], k_width)
    scores = np.empty((n_head, n_page), np.float32)
    page_scores(
        queries, carray(half_pointer(word[HI]), summaries),
        carray(half_pointer(word[LO]), summaries), n_page, n_kv, scale, scores, n_threads,
    )  # fmt: skip
    idx = np.empty((n_kv, n_sinks + n_best * page + n - n_page * page), np.int32)
    counts = carray(integer_pointer(word[COUNTS]), n_kv)
    select_pages(scores, n_page, n_best, page, n, n_sinks, idx, counts)
    attend_rows(
        queries, layout, idx, counts, n_kv, scale, carray(float_pointer(out), (n_head, v_width)),
        n_threads,
    )  # fmt: skip


class PagesStep(CompiledStep):
    """A step of a layer that chooses pages; ``counts`` int64 (G,) are the rows that it attended to.

    store, spec: a KVStore and a LayerSpec.
    """

    def __init__(self, store: Any, spec: Any, page: int, n_sinks: int) -> None:
        super().__init__(_compiled_step, N_WORDS)
        self.counts = np.zeros(spec.n_head_kv, np.int64)
        self.words[N_HEAD : N_THREADS + 1] = (
            spec.n_head, spec.n_head_kv, store.k_type.width, store.v_type.width, page, n_sinks,
            spec.n_threads,
        )  # fmt: skip
        self.words.view(np.float64)[SCALE] = spec.scale
        self.words[COUNTS] = address(self.counts)

    def at(
        self, layout: np.ndarray, n: int, n_page: int, n_best: int, hi: np.ndarray, lo: np.ndarray
    ) -> tuple[int, int]:
        """``step`` to n rows, of which ``n_best`` of the first ``n_page`` pages are attended to.

        hi, lo: their summaries, uint16 (G, >= n_page, d).
        """
        self.words[:N_LAYOUT] = layout
        self.words[N : LO + 1] = n, n_page, n_best, hi.shape[1], address(hi), address(lo)
        return self.step
