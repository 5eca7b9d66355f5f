"""The cache of a window layer on a device: a step attends to the last ``spec.window`` rows."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, NamedTuple

import torch

from sparsekv_cli.cache.spec import N_SPARE, AttnInput, LayerSpec, Memory
from sparsekv_cli.device.cache import CachePlan, DeviceCache, DeviceInput, attend_all
from sparsekv_cli.device.layers.store import UNLIMITED, DeviceStore
from sparsekv_cli.kernels.attention.softmax import RingWindow


class _Copy(NamedTuple):
    """Copies of the rows from position ``first`` on: k and v (G, T, items)."""

    first: int
    k: torch.Tensor
    v: torch.Tensor


class WindowStore(DeviceStore):
    """The rows of a window and up to N_SPARE rows before them. Row i lies in slot i % ``slots``.

    So no row moves, and a captured step stays valid for sequences of any length. n: the rows of the
    sequence. first: the first position whose row has not been overwritten.
    """

    def __init__(self, spec: LayerSpec, device: torch.device) -> None:
        super().__init__(spec, device)
        self.first, self._window = 0, spec.window
        self.slots = self.most = spec.window + N_SPARE

    def rows_of(self, n: int) -> range:
        """Returns the positions before n to which the query at position n attends."""
        return range(max(0, n - self._window + 1), n)

    def has_rows_of(self, n: int) -> bool:
        return self.rows_of(n).start >= self.first

    def grow(self, n: int) -> None:
        """Sets the number of rows, after new ones have been written."""
        self.n, self.first = n, max(self.first, n - self.slots)

    def append(self, k: torch.Tensor, v: torch.Tensor) -> DeviceStore:
        """Adds T rows. Returns them after the rows to which the first of them attends."""
        past, n_new = self.copy_of(self.rows_of(self.n)), k.shape[1]
        k, v = self.packed(k, v)
        seen = DeviceStore.__new__(DeviceStore)
        seen.n = past.k.shape[1] + n_new
        seen.k, seen.v = (torch.cat(parts, dim=1)[None] for parts in ((past.k, k), (past.v, v)))
        self.reserve(self.n + n_new)
        kept = min(n_new, self.slots)
        self.put(self.n + n_new - kept, k[:, n_new - kept :], v[:, n_new - kept :])
        self.grow(self.n + n_new)
        return seen

    def copy_of(self, rows: range) -> _Copy:
        places = self._places(rows.start, len(rows))
        return _Copy(rows.start, *(x[0].index_select(1, places) for x in (self.k, self.v)))

    def put(self, first: int, k: torch.Tensor, v: torch.Tensor) -> None:
        """Writes rows from position ``first`` on, at most as many as there are slots."""
        places = self._places(first, k.shape[1])
        self.k[0, :, places], self.v[0, :, places] = k, v

    def _places(self, first: int, n: int) -> torch.Tensor:
        return torch.arange(first, first + n, device=self.k.device) % self.slots


class DeviceWindow(DeviceCache):
    """K and V of one window layer.

    A sequence can go back by N_SPARE rows, and to the start and end of its last prefill. The rows
    for these two lengths are copied before they are overwritten. The ledger counts only the bytes
    that steps read.
    """

    attends_to_some = False
    can_prefill_in_parts = True
    has_index = False
    takes_drafts = True

    def __init__(self, spec: LayerSpec, device: torch.device, _method: Any = None) -> None:
        super().__init__(spec, device)
        self.store: WindowStore = WindowStore(spec, device)
        self._ring_slots = self.store.slots
        self._is_prefilling = False
        # Lengths to which the sequence can always go back, with rows that ``store`` lacks, if any.
        self._marks: dict[int, _Copy | None] = {}

    def extend(self, x: AttnInput) -> DeviceStore:
        store = self.store
        if not self._is_prefilling:
            self._is_prefilling = True
            self._marks = {store.n: None} if store.n else {}
        self._keep_marks(store.n + x.k.shape[1])
        return store.append(x.k, x.v)

    def finish_prefill(self) -> None:
        self._is_prefilling = False
        self._marks[self.store.n] = None

    def begin_step(self, n: int, n_max: int) -> CachePlan:
        store, window = self.store, self.spec.window
        store.reserve(n_max)
        self._n_max = min(n_max, window)
        is_whole = n_max >= window and store.capacity >= store.slots
        return CachePlan(self._n_max, min(UNLIMITED if is_whole else n_max, self._keep_marks(n)))

    def begin_draft(self, n: int, n_rows: int) -> Hashable:
        """See DeviceCache. All rows overwrite older ones, padding too."""
        store, last = self.store, n + n_rows - 1
        self._keep_marks(last)
        key = super().begin_draft(n, n_rows)
        store.first = max(store.first, last - store.slots)
        return key

    def decode(self, x: DeviceInput, out: torch.Tensor | None = None) -> torch.Tensor:
        k, v = self.batch_tensors(len(x.q))
        window = RingWindow(self.spec.window, self.store.slots)
        return attend_all(x, k, v, self._n_max, self.softmax, out, window)

    def end_step(self, n: int) -> None:
        self.store.grow(n)
        rows = self.spec.n_head_kv * min(n, self.spec.window)
        self.ledger.counts["bytes_read"] += rows * self.store.row_bytes

    def drop_step(self, n: int) -> None:
        self.store.grow(n + 1)  # the step may have overwritten a row
        super().drop_step(n)

    def reach(self, n: int) -> int:
        if self.store.has_rows_of(n):
            return n
        return max((mark for mark in self._marks if mark <= n), default=0)

    def truncate(self, n: int) -> int:
        """See StoreContract (contracts.py). Returns 0 if rows of the window before n are lost."""
        store = self.store
        if n >= store.n:
            return store.n
        if not store.has_rows_of(n):
            kept = self._marks.get(n)
            if kept is None:
                return 0
            store.put(*kept)
            store.first, self._marks[n] = kept.first, None
        store.n, self._is_prefilling = n, False
        self._marks = {mark: rows for mark, rows in self._marks.items() if mark <= n}
        return n

    def memory(self) -> Memory:
        kept = sum(rows.k.nbytes + rows.v.nbytes for rows in self._marks.values() if rows)
        return Memory(device=self.store.nbytes + kept)

    def _keep_marks(self, n: int) -> int:
        """Copies the rows of ``_marks`` that the steps to n rows overwrite.

        Returns the number of rows up to which steps overwrite no other row of them.
        """
        store, until = self.store, UNLIMITED
        for mark, kept in self._marks.items():
            needed = store.rows_of(mark)
            if kept is None and needed.start + store.slots < n:
                self._marks[mark] = store.copy_of(needed)
            elif kept is None:
                until = min(until, needed.start + store.slots)
        return until
