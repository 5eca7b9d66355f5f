"""The cache of a window layer: the last rows of a sequence, to all of which a step attends."""

from __future__ import annotations

import copy
from typing import Any, ClassVar

import numpy as np

from sparsekv_cli.cache.attend import attend_dense
from sparsekv_cli.cache.layer import LayerCache
from sparsekv_cli.cache.spec import N_SPARE, AttnInput, LayerSpec, Memory, window_rows
from sparsekv_cli.cache.store import KVStore


class WindowCache(LayerCache):
    """Keeps the window's rows and a few more; when their memory is full, they move to its start.

    ``store`` holds the sequence's rows from ``first`` on. A sequence goes back where its window is
    still there: by ``N_SPARE`` rows, and to where its last prefill began, while that runs, or
    ended, because those rows are copied when they would go. Of its steps only the bytes that they
    read are counted, because no method has a part in them.
    """

    attends_to_some = False
    can_prefill_in_parts: ClassVar[bool] = True

    def __init__(self, spec: LayerSpec) -> None:
        super().__init__(spec)
        self.first = 0
        self._is_prefilling = False
        self._mark = 0  # a length to which the sequence can always go back
        self._kept: tuple[int, KVStore] | None = None  # what is left of ``_mark``: first, its rows

    @property
    def n(self) -> int:
        return self.first + self.store.n

    def extend(self, x: AttnInput) -> Any:
        if not self._is_prefilling:
            self._is_prefilling = True
            self._set_mark()
        self._make_room(x.k.shape[1])
        self.store.append(x.k, x.v)
        return self.store

    def finish_prefill(self) -> None:
        self._is_prefilling = False
        self._set_mark()
        if self.store.capacity > self._capacity:
            self._move(self._rows_to_keep(), self._capacity)

    def decode(self, x: AttnInput) -> np.ndarray:
        self._make_room(1)
        self.store.append_row(x.k, x.v)
        n = min(self.store.n, self.spec.window)
        self.ledger.counts["bytes_read"] += self.spec.n_head_kv * n * self.store.row_bytes
        return attend_dense(x.q[:, 0], self.store, self.spec)

    def reserve(self, n: int) -> None:
        self.store.reserve(min(n, self._capacity))

    def truncate(self, n: int) -> int:
        """As LayerCache; 0 where rows of the window are gone."""
        if n >= self.n:
            return self.n
        if self._rows_of(n).start < self.first:
            if self._kept is None or n != self._mark:
                return 0
            self.first, kept = self._kept
            self.store, self._kept = kept.copy(kept.n, self._capacity - kept.n), None
        self.store.truncate(n - self.first)
        self._is_prefilling = False
        if n < self._mark:
            self._set_mark()
        return n

    def memory(self) -> Memory:
        kept = 0 if self._kept is None else self._kept[1].nbytes
        return Memory(host=self.store.nbytes + kept)

    @property
    def _capacity(self) -> int:
        return window_rows(self.spec.window)

    def _rows_of(self, n: int) -> range:
        """The positions below n that the query at n sees."""
        return range(max(0, n - self.spec.window + 1), n)

    def _rows_to_keep(self) -> range:
        """The positions that stay when rows move."""
        start = max(self.first, self._rows_of(self.n).start - N_SPARE)
        return range(start, self.n)

    def _set_mark(self) -> None:
        self._mark, self._kept = self.n, None

    def _make_room(self, n_new: int) -> None:
        """Room for new rows: drops those ahead of the window, if that is needed."""
        if self.store.n + n_new <= max(self._capacity, self.store.capacity):
            return
        kept = self._rows_to_keep()
        self._move(kept, max(self._capacity, len(kept) + n_new))

    def _move(self, kept: range, n_room: int) -> None:
        """Keeps these positions, in memory for ``n_room`` rows, and what ``_mark`` needs."""
        marked = self._rows_of(self._mark)
        if self._kept is None and marked.start < kept.start and self._mark:
            self._kept = marked.start, _cut(self.store, self.first, marked)
        self.store = _cut(self.store, self.first, kept, n_room)
        self.first = kept.start


def _cut(store: KVStore, first: int, kept: range, n_room: int = 0) -> KVStore:
    """A store with the rows of these positions of one that begins at ``first``."""
    new = copy.copy(store)
    rows = slice(kept.start - first, kept.stop - first)
    k, v = store.k[:, rows], store.v[:, rows]
    new.k, new.v, new.n = store.k[:, :0], store.v[:, :0], 0
    new.reserve(max(n_room, len(kept)))
    new.k[:, : len(kept)], new.v[:, : len(kept)], new.n = k, v, len(kept)
    return new
