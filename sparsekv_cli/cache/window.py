"""The cache of a window layer: a step attends to the last ``spec.window`` rows of a sequence."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from sparsekv_cli.cache.attend import attend_dense
from sparsekv_cli.cache.layer import BoundedCache, Snapshot
from sparsekv_cli.cache.spec import N_SPARE, AttnInput, LayerSpec, Memory, window_rows
from sparsekv_cli.cache.store import KVStore


class _Place(NamedTuple):
    """The fields of a WindowCache before a step that may move its rows."""

    first: int
    marks: dict[int, tuple[int, KVStore] | None]


class WindowCache(BoundedCache):
    """Stores the window's rows and up to ``N_SPARE`` rows before them.

    When the memory is full, the rows that stay move to its start. ``store`` has the sequence's rows
    from position ``first`` on. A sequence can go back by ``N_SPARE`` rows, and to the start and end
    of its last prefill. The rows for these two lengths are copied before they are dropped. The
    ledger counts only the bytes that steps read.
    """

    def __init__(self, spec: LayerSpec) -> None:
        super().__init__(spec)
        self.first = 0
        self._is_prefilling = False
        # Lengths to which the sequence can always go back. Each has the first position and the rows
        # that it needs and that ``store`` lacks. If a length has such rows, all smaller ones do.
        self._marks: dict[int, tuple[int, KVStore] | None] = {}

    @property
    def n(self) -> int:
        return self.first + self.store.n

    def extend(self, x: AttnInput) -> Any:
        before = self.n
        if not self._is_prefilling:
            self._is_prefilling = True
            self._marks = {before: None} if before else {}
        self._make_room(x.k.shape[1])
        self.store.append(x.k, x.v)
        self._tell_snapshots(before, self.n)
        return self.store

    def finish_prefill(self) -> None:
        super().finish_prefill()
        self._is_prefilling = False
        self._marks[self.n] = None
        if self.store.capacity > self._capacity:
            self._move(self._rows_to_keep(), self._capacity)

    def decode(self, x: AttnInput) -> np.ndarray:
        self._make_room(1)
        self.store.append_row(x.k, x.v)
        self._count()
        return attend_dense(x.q[None, :, 0], [self.store], [1], self.spec)[0]

    def decode_rows(self, rows: Sequence[AttnInput]) -> np.ndarray:
        has_room = self.store.n + len(rows) <= max(self._capacity, self.store.capacity)
        return self._decode_all(rows, self._count) if has_room else super().decode_rows(rows)

    def _count(self) -> None:
        n = min(self.store.n, self.spec.window)
        self.ledger.counts["bytes_read"] += self.spec.n_head_kv * n * self.store.row_bytes

    def save_own(self) -> _Place:
        return _Place(self.first, self._marks.copy())  # rows move to another store

    def take_back_own(self, own: _Place) -> None:
        self.first, self._marks = own

    def reserve(self, n: int) -> None:
        self.store.reserve(min(n, self._capacity))

    def reach(self, n: int) -> int:
        if self._has_rows_of(n):
            return n
        return max((mark for mark in self._marks if mark <= n), default=0)

    def truncate(self, n: int) -> int:
        """See StoreContract (contracts.py). Returns 0 if rows of the window before n are lost."""
        if n >= self.n:
            return self.n
        if not self._has_rows_of(n):
            kept = self._marks.get(n)
            if kept is None:
                return 0
            first, rows = kept
            self.store, self.first = rows.copy(rows.n, self._capacity - rows.n), first
            self._marks[n] = None
        self.store.truncate(n - self.first)
        self._is_prefilling = False
        self._marks = {mark: rows for mark, rows in self._marks.items() if mark <= n}
        return n

    def memory(self) -> Memory:
        kept = sum(rows[1].nbytes for rows in self._marks.values() if rows is not None)
        return Memory(host=self.store.nbytes + kept)

    def snapshot(self, n: int) -> Snapshot:
        rows = self._rows_of(n)
        held = slice(rows.start - self.first, rows.stop - self.first)
        return self.store.k[:, held], self.store.v[:, held]

    def empty_snapshot(self, n: int) -> Snapshot:
        k, v = (
            np.empty((len(rows), len(self._rows_of(n)), rows.shape[2]), rows.dtype)
            for rows in (self.store.k, self.store.v)
        )
        return k, v

    def restore(self, n: int, held: Snapshot) -> None:
        rows = self._rows_of(n)
        self.store.reserve(self._capacity)
        self.store.k[:, : len(rows)], self.store.v[:, : len(rows)] = held
        self.first, self.store.n = rows.start, len(rows)

    @property
    def _capacity(self) -> int:
        return window_rows(self.spec.window)

    def _rows_of(self, n: int) -> range:
        """Returns the positions before n to which the query at position n attends."""
        return range(max(0, n - self.spec.window + 1), n)

    def _has_rows_of(self, n: int) -> bool:
        """Returns whether ``store`` has all rows that the query at position n needs."""
        return self._rows_of(n).start >= self.first

    def _rows_to_keep(self) -> range:
        """Returns the positions of the rows that stay when rows move."""
        start = max(self.first, self._rows_of(self.n).start - N_SPARE)
        return range(start, self.n)

    def _make_room(self, n_new: int) -> None:
        """Makes room for ``n_new`` rows. Drops rows before the window if necessary."""
        if self.store.n + n_new <= max(self._capacity, self.store.capacity):
            return
        kept = self._rows_to_keep()
        self._move(kept, max(self._capacity, len(kept) + n_new))

    def _move(self, kept: range, n_room: int) -> None:
        """Moves the rows at positions ``kept`` to memory for ``n_room`` rows, and drops the others.

        Before that it copies dropped rows that a length in ``_marks`` needs.
        """
        for mark, rows in self._marks.items():
            needed = self._rows_of(mark)
            if rows is None and needed.start < kept.start:
                self._marks[mark] = needed.start, _cut(self.store, self.first, needed)
        self.store, self.first = _cut(self.store, self.first, kept, n_room), kept.start


def _cut(store: KVStore, first: int, kept: range, n_room: int = 0) -> KVStore:
    """Returns a store with copies of the rows at positions ``kept``.

    store: its first row has position ``first``. n_room: the least capacity of the new store.
    """
    new = copy.copy(store)
    rows = slice(kept.start - first, kept.stop - first)
    k, v = store.k[:, rows], store.v[:, rows]
    new.k, new.v, new.n = store.k[:, :0], store.v[:, :0], 0
    new.reserve(max(n_room, len(kept)))
    new.k[:, : len(kept)], new.v[:, : len(kept)], new.n = k, v, len(kept)
    return new
