"""The cache of one layer of one sequence: the decoder's interface and the base classes.

In prefill the decoder gives a layer's cache the new rows (``extend``) and computes dense attention
itself. In decode the cache adds one row and returns its attention (``decode``).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from sparsekv_cli.cache.attend import attend_dense, attend_rows
from sparsekv_cli.cache.counters import Ledger
from sparsekv_cli.cache.row_sizes import layer_bytes
from sparsekv_cli.cache.spec import FULL, AttnInput, LayerSpec, Memory
from sparsekv_cli.cache.store import KVStore

# Attention of a chunk of a prefill: (cache, input) -> (H, T, d_v), of the type of the input's q.
ChunkAttention = Callable[[Any, AttnInput], Any]
Snapshot = tuple[np.ndarray, np.ndarray]  # two arrays (heads, rows, items)


class LayerCache(ABC):
    """The mutable state of one layer of one sequence.

    attends_to_some: whether a decode step attends exactly to some rows and leaves the others out.
    Only then does ``attended`` list them. False for caches that attend to all rows, exactly or
    approximately. A prefill may change it for the steps that follow.

    can_prefill_in_parts: whether ``finish_prefill`` leaves the size of the rows as it is. If all
    caches do, a long prompt goes through all layers part by part. Otherwise each layer is finished
    before the next.

    queries_read: how many of a chunk's last queries ``extend`` reads. None: it reads all queries,
    q_nope and k_nope. A decoder may leave out what is not read.
    """

    attends_to_some: bool = True
    queries_read: int | None = None
    can_prefill_in_parts: ClassVar[bool] = False

    def __init__(self, spec: LayerSpec) -> None:
        self.spec = spec
        self.store = KVStore(spec)
        self.ledger = Ledger()
        self.records_attended = False  # whether ``attended`` must be kept
        # Rows attended in the last decode step, int32 (H or G, m), with counts int64; None: all.
        self.attended: tuple[np.ndarray, np.ndarray] | None = None
        self._saved: list[tuple[int, Any]] = []  # for each draft row: ``n``, and a ``save``

    @property
    def n(self) -> int:
        """The number of the sequence's rows that the cache has, in any form."""
        return self.store.n

    @property
    def n_spared(self) -> int:
        """Bytes of shared rows that count in another sequence's cache."""
        return self.store.n_spared

    def extend(self, x: AttnInput) -> Any:
        """Adds the rows of a prefill's chunk; returns the store of all rows, which end with these.

        The store is a KVStore, or a DeviceStore on a device. The chunk attends to it.
        """
        self.store.append(x.k, x.v)
        return self.store

    def finish_prefill(self) -> None:  # noqa: B027 - most methods have nothing to do here
        """Builds the index, evicts or compresses. Called once after the last chunk."""

    @abstractmethod
    def decode(self, x: Any) -> Any:
        """Adds one row and returns its attention, f32 (H, >= d_v), valid until the next call.

        device/cache.py says what caches on a device take and return.
        """

    def decode_draft(self, x: Any) -> Any:
        """Adds a row as ``decode`` does. ``keep`` can remove the row."""
        self._saved.append((self.n, self.save()))
        return self.decode(x)

    def decode_rows(self, rows: Sequence[Any]) -> Any:
        """Adds rows by ``decode``, or ``decode_draft`` after the first, and ``end_step`` for each.

        Returns their attention, f32 (T H, >= d_v): the heads of the first row, then those of the
        next. Each row has the same bits as when it comes alone.
        """
        attended = []
        for t, x in enumerate(rows):
            attended.append((self.decode_draft(x) if t else self.decode(x)).copy())
            self.end_step(self.n)
        return np.concatenate(attended)

    def most_rows(self, n: int) -> int:
        """Returns how many of the next n rows fit one step; all but the first are a draft."""
        return n

    def keep(self, n: int) -> None:
        """Removes the rows of the last draft after the first n rows. The others stay for good.

        Every table, index and counter is then as if those rows had never been added. After an
        interrupt it can be called again.
        """
        while self._saved:
            before, saved = self._saved[-1]
            if before >= n:
                self.take_back(saved)
            self._saved.pop()

    def save(self) -> Any:
        """Returns all that the next step changes.

        Rows that a step adds after the others need not be in it.
        """
        return self.store, self.store.n, dict(self.ledger.counts), self.attended

    def take_back(self, saved: Any) -> None:
        """Takes back the last row. saved: the result of ``save`` before its step."""
        self.store, self.store.n, counts, self.attended = saved
        self.ledger.counts = Counter(counts)

    def end_step(self, n: int) -> None:  # noqa: B027 - most methods have nothing to do here
        """Finishes the step of row n - 1. Called after the output of ``decode`` was sent.

        It does the work that only later steps need. On a device, other work runs meanwhile.
        """

    def attend_all(
        self, q: np.ndarray, *, scored: int | None = None, n_bytes: int = 0, sparse: bool = True
    ) -> np.ndarray:
        """Attends to all stored rows and counts them: q (H, 1, d) -> f32 (H, >= d_v).

        scored: as ``Ledger.step`` counts it; None: all. n_bytes: bytes read in addition to the
        rows. sparse: whether other steps may leave out rows.
        """
        self._count_all(scored, n_bytes, sparse)
        return attend_dense(q[None, :, 0], [self.store], [1], self.spec)[0]

    def _count_all(self, scored: int | None = None, n_bytes: int = 0, sparse: bool = False) -> None:
        store, spec = self.store, self.spec
        attended = spec.n_head * store.n
        n_bytes += spec.n_head_kv * store.n * store.row_bytes
        scored = attended if scored is None else scored
        self.ledger.step(spec.n_head * self.n, scored, attended, n_bytes, sparse)
        self.attended = None

    def _decode_all(self, rows: Sequence[AttnInput], count: Callable[[], None]) -> np.ndarray:
        """Does ``decode_rows`` in one kernel call, for rows that attend to all rows up to their
        own.

        count: called after each row, while the store ends with it.
        """
        out = attend_dense(self._add_all(rows, count), [self.store], [len(rows)], self.spec)
        return out.reshape(-1, out.shape[2])

    def _add_all(self, rows: Sequence[AttnInput], count: Callable[[], None]) -> np.ndarray:
        """Adds rows as ``_decode_all`` does. Returns their queries, f32 (T, H, d)."""
        store, n = self.store, self.store.n
        q, k, v = (np.concatenate([x[i] for x in rows]) for i in range(3))  # (T heads, 1, d)
        store.append_rows(*(part.reshape(len(rows), -1, part.shape[2]) for part in (k, v)))
        for t in range(len(rows)):
            store.n = n + t
            if t:
                self._saved.append((self.n, self.save()))
            store.n += 1
            count()
        return q.reshape(len(rows), -1, q.shape[2])

    def reserve(self, n: int) -> None:
        """Announces that the cache will hold ``n`` rows."""
        self.store.reserve(n)

    def held_bytes(self, n: int) -> int:
        """Returns the estimated bytes of rows and index after a prefill that ends at n rows."""
        spec = self.spec
        if spec.kind != FULL or self.store.is_shared:
            return 0
        return n * layer_bytes(spec, spec.cache_type_k, spec.cache_type_v)

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
        return self.store.n

    def copy_index(self, of: LayerCache, n: int) -> None:  # noqa: B027 - few methods keep any
        """Copies the index of the first n rows from a cache of the same type that has them.

        Without it the next prefill computes the same index from the rows.
        """

    def memory(self) -> Memory:
        return Memory(host=self.store.nbytes)

    def counters(self) -> Mapping[str, int]:
        """Returns the ledger's counts so far."""
        return self.ledger.counts


class DenseCache(LayerCache):
    """Attends to every row: the method ``full``, and the dense layers of every other method."""

    attends_to_some = False
    can_prefill_in_parts = True
    queries_read = 0

    def decode(self, x: AttnInput) -> np.ndarray:
        self.store.append_row(x.k, x.v)
        return self.attend_all(x.q, sparse=False)

    def decode_rows(self, rows: Sequence[AttnInput]) -> np.ndarray:
        return self._decode_all(rows, self._count_all)


class SelectingCache(LayerCache):
    """Adds a row, selects rows, attends to them; a method writes ``select`` and ``is_dense_at``."""

    can_prefill_in_parts = True
    queries_read = 0

    def decode(self, x: AttnInput) -> np.ndarray:
        store, spec = self.store, self.spec
        store.append_row(x.k, x.v)
        q, n = x.q[:, 0], store.n
        if self.is_dense_at(n):
            return self.attend_all(x.q)
        idx, counts, scored = self.select(q, n)
        self.attended = (idx, counts)
        attended = int(counts.sum()) * (spec.n_head // len(counts))
        n_bytes = int(counts.sum()) * store.row_bytes + self.bytes_to_select(n)
        self.ledger.step(spec.n_head * n, scored, attended, n_bytes, True)
        return attend_rows(q, store, idx, counts, spec)

    @abstractmethod
    def is_dense_at(self, n: int) -> bool:
        """Returns whether the budget covers a context of n rows, so that attention is dense."""

    @abstractmethod
    def select(self, q: np.ndarray, n: int) -> tuple[np.ndarray, np.ndarray, int]:
        """Returns the rows of n for q f32 (H, d): idx int32 (U, m), counts int64 (U,), rows scored.

        U is H (one list a query head) or G (one a kv head). The first ``counts`` rows of a list are
        valid, in any order, without repeats. Rows scored: query heads times keys.
        """

    def bytes_to_select(self, n: int) -> int:
        """Returns the bytes that one ``select`` reads."""
        return 0


class BoundedCache(LayerCache):
    """A cache whose memory does not grow with the sequence: a window or a recurrent state.

    It cannot go back to every length. A snapshot is the cache's memory at some length. An empty
    cache continues from a snapshot that it gets. Methods do not change it.
    """

    attends_to_some = False
    can_prefill_in_parts = True

    def __init__(self, spec: LayerSpec) -> None:
        super().__init__(spec)
        self._snapshot_lengths: frozenset[int] = frozenset()
        self._on_snapshot: Callable[[int, Snapshot], None] | None = None

    def take_snapshots(
        self, lengths: Iterable[int], on_snapshot: Callable[[int, Snapshot], None]
    ) -> None:
        """Announces lengths of the next prefill; ``on_snapshot`` gets each, valid until it ends."""
        self._snapshot_lengths, self._on_snapshot = frozenset(lengths), on_snapshot

    def finish_prefill(self) -> None:
        self._snapshot_lengths, self._on_snapshot = frozenset(), None

    @abstractmethod
    def snapshot(self, n: int) -> Snapshot:
        """Returns the snapshot of length n, which ``extend`` has just passed. It is not copied."""

    @abstractmethod
    def empty_snapshot(self, n: int) -> Snapshot:
        """Returns memory for the snapshot of length n."""

    @abstractmethod
    def restore(self, n: int, held: Snapshot) -> None:
        """Fills an empty cache with the snapshot of length n."""

    def _tell_snapshots(self, first: int, last: int) -> None:
        """Passes on the snapshots of lengths above ``first`` and up to ``last``."""
        for n in sorted(self._snapshot_lengths):
            if first < n <= last and self._on_snapshot is not None:
                self._on_snapshot(n, self.snapshot(n))


def decode_caches(
    caches: Sequence[LayerCache], rows: Sequence[Sequence[Any]], failed: dict[int, Exception]
) -> Any:
    """Runs one layer's step: adds each sequence's new rows to its cache.

    rows: one or several a sequence. failed: the errors of earlier layers by sequence, whose rows
    attend to nothing; it gets this layer's. A single sequence raises its error. Returns the
    attention of all rows, f32 (rows H, >= d_v).
    """
    if len(caches) == 1:
        return _decode_one(caches[0], rows[0])
    attended: list[Any] = [None] * len(caches)
    dense: dict[Any, list[int]] = {}  # dense caches, by types of rows
    queries: dict[int, np.ndarray] = {}  # of dense caches
    for i, cache in enumerate(caches):
        if i in failed:
            continue
        try:
            if type(cache) is DenseCache:
                queries[i] = cache._add_all(rows[i], cache._count_all)
                types = cache.spec.cache_type_k, cache.spec.cache_type_v
                dense.setdefault(types, []).append(i)
            else:
                attended[i] = _decode_one(cache, rows[i])
        except Exception as error:
            failed[i] = error
    for places in dense.values():
        places.sort(key=lambda i: caches[i].store.owner)
        for i, part in zip(places, _attend_dense(caches, rows, queries, places), strict=True):
            attended[i] = part
    if len(failed) == len(caches):
        raise next(reversed(failed.values()))
    for i in failed:
        n_rows, other = next((len(rows[j]), of) for j, of in enumerate(attended) if of is not None)
        attended[i] = np.zeros((len(rows[i]) * len(other) // n_rows, other.shape[1]), np.float32)
    return np.concatenate(attended)


def _decode_one(cache: LayerCache, rows: Sequence[Any]) -> Any:
    if len(rows) > 1:
        return cache.decode_rows(rows)
    attended = cache.decode(rows[0])
    cache.end_step(cache.n)
    return attended


def _attend_dense(
    caches: Sequence[LayerCache],
    rows: Sequence[Sequence[AttnInput]],
    queries: Mapping[int, np.ndarray],
    places: Sequence[int],
) -> list[np.ndarray]:
    """Attends with the last rows of the dense caches at ``places`` in one kernel call.

    Sequences that share a prefix are adjacent and read it once.
    """
    q = [queries[i] for i in places]
    stores, counts = [caches[i].store for i in places], [len(rows[i]) for i in places]
    out = attend_dense(np.concatenate(q), stores, counts, caches[places[0]].spec)
    ends = np.cumsum(counts)[:-1] * out.shape[1]
    return np.split(out.reshape(-1, out.shape[2]), ends)


def rows_alike(is_dense_at: Callable[[int], bool], first: int, n: int) -> int:
    """Returns how many of the steps to first .. first + n - 1 rows are of the first one's kind.

    A step attends to all rows, or chooses rows if there are many.
    """
    if n < 2 or is_dense_at(first) == is_dense_at(first + n - 1):
        return n
    return next(i for i in range(n) if not is_dense_at(first + i))
