"""The five contracts of a layer's cache: store, prefill, step, undo, ledger.

A decoder, an engine and a sequence call only the functions of these classes. LayerCache (layer.py)
derives from all five. To know what a cache can do, callers ask its attributes, not its class.
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
    """The rows of a sequence in memory: their number, room for more, and how rows are removed."""

    spec: LayerSpec
    store: Any  # a KVStore; on a device a DeviceStore, or a method's own

    @property
    def n(self) -> int:
        """The number of the sequence's rows that the cache has, in any form."""
        n: int = self.store.n
        return n

    @property
    def spared_bytes(self) -> int:
        """Bytes of the shared prefix that other sequences' caches count.

        If 3 caches share a prefix, each counts a third of its bytes and spares two thirds.
        """
        n: int = self.store.spared_bytes
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
        """Calls ``write(k, v)`` with memory for rows first .. stop - 1, each (G, T, items).

        The store must have room for these rows. The items are those of ``spec``'s types of rows, as
        in a KVStore. If V is K, v has no items. ``n`` stays as it is.
        """
        write(self.store.k[:, first:stop], self.store.own_v[:, first:stop])

    @abstractmethod
    def rows_of(self, first: int, stop: int) -> Callable[[], tuple[np.ndarray, np.ndarray]]:
        """Returns a function that returns rows first .. stop - 1: K and V, as in ``fill_rows``.

        The function returns the rows as they are now. It may be called later and by any thread,
        while steps add rows.
        """

    def mark(self, lengths: Sequence[int]) -> None:  # noqa: B027 - most can go back anywhere
        """Announces at which lengths messages end in the next prefill. A cache can save them.

        Most caches can go back to every length and do nothing here.
        """

    def reach(self, n: int) -> int:
        """Returns the largest known length, at most n, to which ``truncate`` can go back."""
        return n

    def truncate(self, n: int) -> int:
        """Removes all rows but the first n. Returns n; or 0 if it cannot, and then changes nothing.

        If n is the end of the last finished prefill, the cache is then as it was at that moment.
        For other n it also drops what its method has computed in steps. The next prefill or step
        then builds a new index.
        """
        self.store.truncate(n)
        left: int = self.store.n
        return left


class PrefillContract(ABC):
    """Adds a prefill's rows in chunks. The decoder computes the attention of the chunks.

    can_prefill_in_parts: whether ``finish_prefill`` leaves the size of the rows as it is. If all
    caches have it, a long prompt goes through all layers part by part. Otherwise each layer
    finishes the whole prompt before the next layer begins.

    queries_read: the number of a chunk's last queries that ``extend`` reads. None: it reads all
    queries, and q_nope and k_nope. A decoder may leave out inputs that are not read.

    has_index: whether the cache has more memory than its rows: an index, or rows in another form.

    reads_on_gpu: whether a GPU reads the prompt. It is so fast that no layer waits for the disk.
    """

    can_prefill_in_parts: ClassVar[bool] = False
    reads_on_gpu: ClassVar[bool] = False
    queries_read: int | None = None
    has_index: ClassVar[bool] = True

    @abstractmethod
    def extend(self, x: Any) -> Any:
        """Adds the rows of a chunk. Returns the store of all rows; the chunk's rows are its last.

        The store is a KVStore, or a DeviceStore on a device. The decoder attends to it with the
        chunk.
        """

    def finish_prefill(self) -> None:  # noqa: B027 - most methods have nothing to do here
        """Builds the index, evicts or compresses. Called once after the last chunk."""

    def copy_index(self, of: Any, n: int) -> None:  # noqa: B027 - few methods keep any
        """Copies the index of the first n rows from ``of``, a cache of this type with these rows.

        Without this copy the next prefill computes the same index from the rows.
        """


class StepContract(ABC):
    """Adds one row or several rows in a step and returns their attention.

    attends_to_some: whether a decode step attends exactly to some rows and leaves the others out.
    Only then does ``attended`` list these rows. False for caches that attend to all rows, exactly
    or approximately. A prefill may change it for the steps that follow.

    attends_together: whether a step is attention to all rows of ``store`` and no more. Then several
    sequences attend in one kernel call.
    """

    attends_to_some: bool = True
    attends_together: ClassVar[bool] = False

    @abstractmethod
    def decode(self, x: Any) -> Any:
        """Adds one row and returns its attention, f32 (H, >= d_v), valid until the next call.

        device/cache.py gives the types of x and of the result on a device.
        """

    @abstractmethod
    def decode_rows(self, rows: Sequence[Any]) -> Any:
        """Adds T rows of one step: the first by ``decode``, the others by ``decode_draft``.

        It calls ``end_step`` after each row. Returns their attention, f32 (T H, >= d_v): H rows for
        the first token, then H for the second. Each token's attention has the same bits as in a
        step alone.
        """

    def most_rows(self, n: int) -> int:
        """Returns how many of the next n rows one step can add; all but the first are a draft."""
        return n

    def end_step(self, n: int) -> None:  # noqa: B027 - most methods have nothing to do here
        """Does the work of row n - 1 that only later steps need.

        Called after the decoder has passed on the output of ``decode``. On a device, other work
        runs at the same time.
        """


class LedgerContract(ABC):
    """Counts the work that steps do, and names the rows that they attend to.

    records_attended: whether steps must set ``attended``. attended: the rows to which the last
    decode step attended; None: all rows.
    """

    ledger: Ledger
    records_attended: bool
    attended: Attended | None

    def counters(self) -> Mapping[str, int]:
        """Returns the ledger's counts so far."""
        return self.ledger.counts


class Undo(NamedTuple):
    """The fields of a cache before a step, as far as the step changes them.

    own: the fields that only the cache's class has, a NamedTuple; None if the step changes none.
    """

    n: int  # rows of the sequence
    store: Any
    n_stored: int  # rows in ``store``
    counts: Mapping[str, int]
    attended: Attended | None
    own: Any


class UndoContract(StoreContract, StepContract, LedgerContract):
    """Adds the rows of a draft, and removes those that the model rejects."""

    _saved: list[Undo]  # one for each row of the draft

    def decode_draft(self, x: Any) -> Any:
        """Adds a row as ``decode`` does, but ``keep`` can remove it later."""
        self.save_draft()
        return self.decode(x)

    def save_draft(self) -> None:
        """Announces that the next row is of a draft."""
        self._saved.append(self.save())

    def keep(self, n: int) -> None:
        """Removes the rows of the last draft from row n on. The draft's other rows are then final.

        All tables, indexes and counters are then as if the removed rows had never been added. With
        100 rows before a draft of 4 rows, ``keep(102)`` leaves two of the draft's rows. After an
        interrupt it can be called again.
        """
        while self._saved:
            undo = self._saved[-1]
            if undo.n >= n:
                self.take_back(undo)
            self._saved.pop()

    def save(self) -> Undo:
        """Returns the fields that the next step changes, for ``take_back``."""
        counts, own = dict(self.ledger.counts), self.save_own()
        return Undo(self.n, self.store, self.store.n, counts, self.attended, own)

    def save_own(self) -> Any:
        """Returns the fields that the next step changes and that Undo does not have, or None.

        A step may add rows after the existing ones. These rows need not be in the result.
        """

    def take_back(self, undo: Undo) -> None:
        """Removes the last row. undo: the result of ``save`` before the row's step."""
        self.store, self.store.n, self.attended = undo.store, undo.n_stored, undo.attended
        self.ledger.counts = Counter(undo.counts)
        if undo.own is not None:
            self.take_back_own(undo.own)

    def take_back_own(self, own: Any) -> None:
        """Restores the fields in ``own``, a result of ``save_own``, after Undo's other fields."""
        raise NotImplementedError
