"""The base classes of all caches: one cache has the state of one layer of one sequence.

contracts.py says what a decoder may ask of a cache. In prefill the decoder adds the new rows to the
cache and computes dense attention itself. In decode the cache adds a row and computes its
attention.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from sparsekv_cli.cache.attend import attend_dense, attend_rows
from sparsekv_cli.cache.contracts import PrefillContract, UndoContract
from sparsekv_cli.cache.counters import Ledger
from sparsekv_cli.cache.spec import AttnInput, LayerSpec
from sparsekv_cli.cache.store import KVStore, padded
from sparsekv_cli.cpu.jit.floats import as_f32

# Attention of a chunk of a prefill: (cache, input) -> (H, T, d_v). The result has the type of the
# input's q.
ChunkAttention = Callable[[Any, AttnInput], Any]
Snapshot = tuple[np.ndarray, np.ndarray]  # two arrays (heads, rows, items)


class LayerCache(PrefillContract, UndoContract):
    """The state of one layer of one sequence: it fulfils all contracts with one store of rows.

    The cache of a method derives from this class or from a class below.
    """

    def __init__(self, spec: LayerSpec, store: Any = None, ledger: Ledger | None = None) -> None:
        """store: the rows; None: a new KVStore. ledger: the counts; None: a new Ledger."""
        self.spec = spec
        self.store = KVStore(spec) if store is None else store
        self.ledger = Ledger() if ledger is None else ledger
        self.records_attended = False
        self.attended = None
        self._saved = []

    def extend(self, x: AttnInput) -> Any:
        self.store.append(x.k, x.v)
        return self.store

    def rows_of(self, first: int, stop: int) -> Callable[[], tuple[np.ndarray, np.ndarray]]:
        store = self.store
        if self.can_prefill_in_parts:  # the rows stay where they are
            return lambda: (store.k[:, first:stop], store.own_v[:, first:stop])
        k, v = (rows[:, first:stop].copy() for rows in (store.k, store.own_v))
        return lambda: (k, v)

    def decode_rows(self, rows: Sequence[Any]) -> Any:
        attended = []
        for t, x in enumerate(rows):
            attended.append((self.decode_draft(x) if t else self.decode(x)).copy())
            self.end_step(self.n)
        return np.concatenate(attended)

    def attend_all(
        self, q: np.ndarray, *, scored: int | None = None, n_bytes: int = 0, sparse: bool = True
    ) -> np.ndarray:
        """Attends to all stored rows and counts them: q (H, 1, d) -> f32 (H, >= d_v).

        scored: the count of scored (query head, key) pairs; None: all pairs. n_bytes: bytes read in
        addition to the rows. sparse: whether other steps of this cache may leave out rows.
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
        """Adds T rows and returns their attention, f32 (T H, >= d_v), by one kernel call.

        Each row attends to all rows before it and to itself. count: is called after each new row,
        while that row is the store's last.
        """
        out = attend_dense(self._add_all(rows, count), [self.store], [len(rows)], self.spec)
        return out.reshape(-1, out.shape[2])

    def _add_all(self, rows: Sequence[AttnInput], count: Callable[[], None]) -> np.ndarray:
        """Adds T rows and calls ``count`` after each. Returns their queries, f32 (T, H, d)."""
        store, n = self.store, self.store.n
        q, k, v = (np.concatenate([x[i] for x in rows]) for i in range(3))  # (T heads, 1, d)
        store.append_rows(*(part.reshape(len(rows), -1, part.shape[2]) for part in (k, v)))
        for t in range(len(rows)):
            store.n = n + t
            if t:
                self._saved.append(self.save())
            store.n += 1
            count()
        return q.reshape(len(rows), -1, q.shape[2])


class DenseCache(LayerCache):
    """Attends to every row: the method ``full``, and the dense layers of every other method."""

    attends_to_some = False
    attends_together = True
    can_prefill_in_parts = True
    queries_read = 0
    has_index = False

    def decode(self, x: AttnInput) -> np.ndarray:
        self.store.append_row(x.k, x.v)
        return self.attend_all(x.q, sparse=False)

    def decode_rows(self, rows: Sequence[AttnInput]) -> np.ndarray:
        return self._decode_all(rows, self._count_all)


class SelectingCache(LayerCache):
    """Adds a row, selects rows and attends to them.

    A method implements ``select`` and ``is_dense_at``.
    """

    attends_together = False  # also of a class that is dense up to some depth
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
        """Returns whether a step attends to all rows of a context of n rows."""

    @abstractmethod
    def select(self, q: np.ndarray, n: int) -> tuple[np.ndarray, np.ndarray, int]:
        """Selects rows of the n rows for q f32 (H, d). Returns (idx, counts, scored).

        idx: int32 (U, m), counts: int64 (U,). U is H (one list a query head) or G (one a kv head).
        The first ``counts[u]`` rows of list u are valid, in any order, without repeats. scored: the
        number of (query head, key) pairs that were scored.
        """

    def bytes_to_select(self, n: int) -> int:
        """Returns the bytes that one ``select`` reads."""
        return 0


class BoundedCache(LayerCache):
    """A cache whose memory does not grow with the sequence: a window or a recurrent state.

    It can go back to some lengths only. A snapshot is a copy of its memory at one length, from
    which an empty cache can continue. Methods do not change these caches.
    """

    attends_to_some = False
    can_prefill_in_parts = True
    has_index = False

    def __init__(self, spec: LayerSpec) -> None:
        super().__init__(spec)
        self._snapshot_lengths: frozenset[int] = frozenset()
        self._on_snapshot: Callable[[int, Snapshot], None] | None = None

    def take_snapshots(
        self, lengths: Iterable[int], on_snapshot: Callable[[int, Snapshot], None]
    ) -> None:
        """Asks for a snapshot at each of ``lengths`` in the next prefill.

        The prefill calls ``on_snapshot(n, snapshot)`` for each length n. The snapshot is valid
        during that call only.
        """
        self._snapshot_lengths, self._on_snapshot = frozenset(lengths), on_snapshot

    def finish_prefill(self) -> None:
        self._snapshot_lengths, self._on_snapshot = frozenset(), None

    @abstractmethod
    def snapshot(self, n: int) -> Snapshot:
        """Returns the snapshot of length n, which ``extend`` has just reached. It is no copy."""

    @abstractmethod
    def empty_snapshot(self, n: int) -> Snapshot:
        """Returns uninitialised memory for a snapshot of length n."""

    @abstractmethod
    def restore(self, n: int, held: Snapshot) -> None:
        """Fills an empty cache with ``held``, a snapshot of length n."""

    def _tell_snapshots(self, first: int, last: int) -> None:
        """Calls ``on_snapshot`` for each asked length n with first < n <= last."""
        for n in sorted(self._snapshot_lengths):
            if first < n <= last and self._on_snapshot is not None:
                self._on_snapshot(n, self.snapshot(n))


class EvictingCache(LayerCache):
    """Drops rows for good. ``store`` has the rows that remain, the same number in each kv head.

    Decode attends to these rows. A later prefill attends to them and to its own rows. Keys stay
    rotated to their positions in the sequence. ``n`` counts all rows of the sequence, ``store.n``
    only the stored rows. A method implements ``positions`` and calls ``keep_slots`` with its
    choice.
    """

    def __init__(self, spec: LayerSpec) -> None:
        super().__init__(spec)
        self._n_dropped = 0  # rows dropped in every kv head
        self._n_settled = 0  # rows that a rewind cannot cut off

    @property
    def n(self) -> int:
        return self.store.n + self._n_dropped

    @abstractmethod
    def positions(self) -> np.ndarray:
        """Returns the positions in the sequence of the stored rows, int32 (G, store.n)."""

    @abstractmethod
    def most_held(self, n: int) -> int:
        """Returns the most rows that the store can have after a prefill that ends at n rows."""

    def held_bytes(self, n: int) -> int:
        return super().held_bytes(min(n, self.most_held(n)))

    def keep_slots(self, slots: np.ndarray, n_room: int) -> None:
        """Keeps the stored rows ``slots`` int (G, m), in that order, and drops the others.

        The rows move to new memory with room for ``n_room`` further rows.
        """
        old, n, m = self.store, self.n, slots.shape[1]
        store = KVStore(self.spec)
        store.reserve(m + n_room)
        for source, target in zip(old.arrays, store.arrays, strict=True):
            for kv_head, rows in enumerate(slots):
                target[kv_head, :m] = source[kv_head, rows]
        store.n = m
        self.store, self._n_dropped, self._n_settled = store, n - m, n

    def attend_held(self, x: AttnInput, chooses: bool) -> np.ndarray:
        """Adds the row of a decode step. Returns its attention to all stored rows, f32 (H, >= d_v).

        chooses: whether the step reads the keys a second time, to score them.
        """
        store, spec = self.store, self.spec
        store.append_row(x.k, x.v)
        scored = None if chooses or not self._n_dropped else 0
        n_again = spec.n_head_kv * store.n if chooses else 0  # keys
        out = self.attend_all(x.q, scored=scored, n_bytes=n_again * store.k.strides[1])
        if self.records_attended and self._n_dropped:
            held = np.full(spec.n_head_kv, store.n)
            self.attended = self.positions().copy(), held
        return out

    def reserve(self, n: int) -> None:
        self.store.reserve(n - self._n_dropped)

    def truncate(self, n: int) -> int:
        """Removes all rows but the first n; returns n. See StoreContract (contracts.py).

        Returns 0 if n is below the length at which rows were last dropped, because these rows are
        lost.
        """
        if n < self._n_settled:
            return 0
        self.store.truncate(n - self._n_dropped)
        return self.n

    def counters(self) -> Mapping[str, int]:
        counts = self.ledger.counts.copy()
        counts["rows_dropped"] += self.spec.n_head_kv * self._n_dropped
        return counts


def by_kv_head(q: Any, spec: LayerSpec) -> np.ndarray:
    """Returns queries (H, T, d) as f32 (G, T H/G, padded d): queries of a kv head are neighbours.

    Row t (H/G) + i of kv head g is query head g (H/G) + i at position t. H = 8, G = 2, T = 3 give
    two times 12 rows: first the four heads at position 0. q has no padding; the result has zeros.
    """
    n_head_kv, n_position, d = spec.n_head_kv, q.shape[1], spec.head_dim
    rows = np.zeros((n_head_kv, n_position, spec.group, padded(d)), np.float32)
    rows[..., :d] = as_f32(q).reshape(n_head_kv, spec.group, n_position, d).swapaxes(1, 2)
    return rows.reshape(n_head_kv, -1, rows.shape[-1])


def decode_caches(
    caches: Sequence[LayerCache], rows: Sequence[Sequence[Any]], failed: dict[int, Exception]
) -> Any:
    """Runs one layer's step for several sequences: adds each sequence's new rows to its cache.

    rows: for each sequence, one or several AttnInput. failed: errors of earlier layers by sequence;
    this layer's errors are added to it. The attention of a failed sequence is zeros. A single
    sequence raises its error instead. Returns the attention of all rows, f32 (rows H, >= d_v).
    """
    if len(caches) == 1:
        return _decode_one(caches[0], rows[0])
    attended: list[Any] = [None] * len(caches)
    dense: dict[Any, list[int]] = {}  # caches that attend in one kernel call, by their row types
    queries: dict[int, np.ndarray] = {}  # the queries of these caches
    for i, cache in enumerate(caches):
        if i in failed:
            continue
        try:
            if cache.attends_together:
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
    """Attends with the last rows of ``caches[i]``, i in ``places``, in one kernel call.

    The result has one array for each place. If neighbouring sequences share a prefix, it is read
    once.
    """
    q = [queries[i] for i in places]
    stores, counts = [caches[i].store for i in places], [len(rows[i]) for i in places]
    out = attend_dense(np.concatenate(q), stores, counts, caches[places[0]].spec)
    ends = np.cumsum(counts)[:-1] * out.shape[1]
    return np.split(out.reshape(-1, out.shape[2]), ends)


def rows_alike(is_dense_at: Callable[[int], bool], first: int, n: int) -> int:
    """Returns the number of steps, from the first on, that are all dense or all sparse.

    The n steps have contexts of first, first + 1 .. first + n - 1 rows. Dense steps come before
    sparse steps. If the contexts 10 and 11 are dense and 12 is not, ``rows_alike(f, 10, 5)`` is 2.
    """
    if n < 2 or is_dense_at(first) == is_dense_at(first + n - 1):
        return n
    return next(i for i in range(n) if not is_dense_at(first + i))
