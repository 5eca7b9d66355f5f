"""The contracts of a layer's cache, each with its name: store, prefill, step, undo, ledger.

A decoder, an engine and a sequence use a cache through these only. LayerCache (layer.py) has all
five. Attributes, not its class, say what a cache can do.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np

from sparsekv_cli.cache.counters import Ledger
from sparsekv_cli.cache.row_sizes import layer_bytes
from sparsekv_cli.cache.spec import FULL, LayerSpec, Memory

# Rows that a step attends to, int32 (H or G, m), with their counts int64.
Attended = tuple[np.ndarray, np.ndarray]


class StoreContract(ABC):
    """The rows of a sequence in memory: how many, room for more, and ways back."""

    spec: LayerSpec
    store: Any  # a KVStore; on a device a DeviceStore, or a method's own

    @property
    def n(self) -> int:
        """The number of the sequence's rows that the cache has, in any form."""
        n: int = self.store.n
        return n

    @property
    def n_spared(self) -> int:
        """Bytes of shared rows that count in another sequence's cache."""
        n: int = self.store.n_spared
        return n

    def reserve(self, n: int) -> None:
        """Announces that the cache will hold ``n`` rows."""
        self.store.reserve(n)

    def held_bytes(self, n: int) -> int:
        """Returns the estimated bytes of rows and index after a prefill that ends at n rows."""
        spec = self.spec
        if spec.kind != FULL or self.store.is_shared:
            return 0
        return n * layer_bytes(spec, spec.cache_type_k, spec.cache_type_v)

    def memory(self) -> Memory:
        return Memory(host=self.store.nbytes)

    def fill_rows(
        self, first: int, stop: int, write: Callable[[np.ndarray, np.ndarray], None]
    ) -> None:
        """Lets ``write`` write rows that the store has room for: K and V, each (G, T, items).

        The items are those of the types of ``spec``, as a KVStore has them. ``n`` stays.
        """
        write(self.store.k[:, first:stop], self.store.v[:, first:stop])

    @abstractmethod
    def rows_of(self, first: int, stop: int) -> Callable[[], tuple[np.ndarray, np.ndarray]]:
        """Returns a function that gives these rows, K and V, in the form of ``fill_rows``.

        They are the rows of now. It may be called later, from any thread, while steps add rows.
        """

    def mark(self, lengths: Sequence[int]) -> None:  # noqa: B027 - most can go back anywhere
        """Announces the lengths at which messages end in the next prefill."""

    def reach(self, n: int) -> int:
        """Returns the largest known length, at most n, to which ``truncate`` can go back."""
        return n

    def truncate(self, n: int) -> int:
        """Forgets all but the first n rows; returns n, or 0 if it cannot and has forgotten nothing.

        At the end of the last finished prefill the cache is then as it was at that moment. At
        another length it also drops its state from steps. The next prefill or step builds a new
        index.
        """
        self.store.truncate(n)
        left: int = self.store.n
        return left


class PrefillContract(ABC):
    """New rows in chunks. The decoder itself attends with a chunk to all rows.

    can_prefill_in_parts: whether ``finish_prefill`` leaves the size of the rows as it is. If all
    caches do, a long prompt goes through all layers part by part. Otherwise each layer is finished
    before the next.

    queries_read: how many of a chunk's last queries ``extend`` reads. None: it reads all queries,
    q_nope and k_nope. A decoder may leave out what is not read.

    has_index: whether the cache keeps more than the rows: an index, or rows in another form.

    reads_on_gpu: whether a GPU reads the prompt. It is so fast that no layer waits for the disk.
    """

    can_prefill_in_parts: ClassVar[bool] = False
    reads_on_gpu: ClassVar[bool] = False
    queries_read: int | None = None
    has_index: ClassVar[bool] = True

    @abstractmethod
    def extend(self, x: Any) -> Any:
        """Adds the rows of a prefill's chunk; returns the store of all rows, which end with these.

        The store is a KVStore, or a DeviceStore on a device. The chunk attends to it.
        """

    def finish_prefill(self) -> None:  # noqa: B027 - most methods have nothing to do here
        """Builds the index, evicts or compresses. Called once after the last chunk."""

    def copy_index(self, of: Any, n: int) -> None:  # noqa: B027 - few methods keep any
        """Copies the index of the first n rows from a cache of the same type that has them.

        Without it the next prefill computes the same index from the rows.
        """


class StepContract(ABC):
    """One new row a step, or several, and their attention.

    attends_to_some: whether a decode step attends exactly to some rows and leaves the others out.
    Only then does ``attended`` list them. False for caches that attend to all rows, exactly or
    approximately. A prefill may change it for the steps that follow.

    attends_together: whether a step is attention to all rows of ``store`` and no more. Then several
    sequences attend in one kernel call.
    """

    attends_to_some: bool = True
    attends_together: ClassVar[bool] = False

    @abstractmethod
    def decode(self, x: Any) -> Any:
        """Adds one row and returns its attention, f32 (H, >= d_v), valid until the next call.

        device/cache.py says what caches on a device take and return.
        """

    @abstractmethod
    def decode_rows(self, rows: Sequence[Any]) -> Any:
        """Adds rows by ``decode``, or ``decode_draft`` after the first, and ``end_step`` for each.

        Returns their attention, f32 (T H, >= d_v): the heads of the first row, then those of the
        next. Each row has the same bits as when it comes alone.
        """

    def most_rows(self, n: int) -> int:
        """Returns how many of the next n rows fit one step; all but the first are a draft."""
        return n

    def end_step(self, n: int) -> None:  # noqa: B027 - most methods have nothing to do here
        """Finishes the step of row n - 1. Called after the output of ``decode`` was sent.

        It does the work that only later steps need. On a device, other work runs meanwhile.
        """


class LedgerContract(ABC):
    """Counts of the work that steps do, and the rows that they attend to.

    records_attended: whether ``attended`` must be kept. attended: the rows of the last decode step;
    None: all.
    """

    ledger: Ledger
    records_attended: bool
    attended: Attended | None

    def counters(self) -> Mapping[str, int]:
        """Returns the ledger's counts so far."""
        return self.ledger.counts


class Undo(NamedTuple):
    """A cache before a step: all that the step changes.

    own: fields of the cache's class, a NamedTuple; None if it has none.
    """

    n: int  # rows of the sequence
    store: Any
    n_stored: int  # rows in ``store``
    counts: Mapping[str, int]
    attended: Attended | None
    own: Any


class UndoContract(StoreContract, StepContract, LedgerContract):
    """Drafts: rows that may be removed again, with every trace of them."""

    _saved: list[Undo]  # one for each row of the draft

    def decode_draft(self, x: Any) -> Any:
        """Adds a row as ``decode`` does. ``keep`` can remove the row."""
        self._saved.append(self.save())
        return self.decode(x)

    def keep(self, n: int) -> None:
        """Removes the rows of the last draft after the first n rows. The others stay for good.

        Every table, index and counter is then as if those rows had never been added. After an
        interrupt it can be called again.
        """
        while self._saved:
            undo = self._saved[-1]
            if undo.n >= n:
                self.take_back(undo)
            self._saved.pop()

    def save(self) -> Undo:
        """Returns all that the next step changes."""
        counts, own = dict(self.ledger.counts), self.save_own()
        return Undo(self.n, self.store, self.store.n, counts, self.attended, own)

    def save_own(self) -> Any:
        """Returns what the next step changes besides the fields of Undo.

        Rows that a step adds after the others need not be in it.
        """

    def take_back(self, undo: Undo) -> None:
        """Takes back the last row. undo: the result of ``save`` before its step."""
        self.store, self.store.n, self.attended = undo.store, undo.n_stored, undo.attended
        self.ledger.counts = Counter(undo.counts)
        if undo.own is not None:
            self.take_back_own(undo.own)

    def take_back_own(self, own: Any) -> None:
        """Takes back what ``save_own`` has returned. Called after the other fields of Undo."""
        raise NotImplementedError
