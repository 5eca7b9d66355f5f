"""Caches that drop rows for good.

A later prefill is dense over the rows that are left and its own. Keys are stored rotated to their
absolute positions, so nothing is renumbered.
"""

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

import numpy as np

from sparsekv_cli.cache.layer import LayerCache
from sparsekv_cli.cache.spec import AttnInput, LayerSpec
from sparsekv_cli.cache.store import KVStore, padded
from sparsekv_cli.cpu.jit.floats import as_f32


class EvictingCache(LayerCache):
    """``store`` holds some rows of the sequence, as many for each kv head. Decode attends to them.

    ``n`` counts the rows of the sequence, ``store.n`` the rows held. A method implements
    ``positions`` and calls ``keep_slots`` with its choice.
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
        """Returns the absolute positions of the held rows, int32 (G, store.n)."""

    @abstractmethod
    def most_held(self, n: int) -> int:
        """Returns the most rows that it holds after a prefill that ends at n rows."""

    def held_bytes(self, n: int) -> int:
        return super().held_bytes(min(n, self.most_held(n)))

    def keep_slots(self, slots: np.ndarray, n_room: int) -> None:
        """Keeps only the rows ``slots`` int (G, m), in that order, and frees the others' memory.

        n_room: number of further rows that the new memory has room for.
        """
        old, n, m = self.store, self.n, slots.shape[1]
        store = KVStore(self.spec)
        store.reserve(m + n_room)
        for source, target in ((old.k, store.k), (old.v, store.v)):
            for kv_head, rows in enumerate(slots):
                target[kv_head, :m] = source[kv_head, rows]
        store.n = m
        self.store, self._n_dropped, self._n_settled = store, n - m, n

    def attend_held(self, x: AttnInput, chooses: bool) -> np.ndarray:
        """Adds the row of a decode step. Returns attention to all held rows.

        chooses: whether the step reads the keys again, to score them.
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
        """See LayerCache. Returns 0 if later rows have replaced rows that it needs."""
        if n < self._n_settled:
            return 0
        self.store.truncate(n - self._n_dropped)
        return self.n

    def counters(self) -> Mapping[str, int]:
        counts = self.ledger.counts.copy()
        counts["rows_dropped"] += self.spec.n_head_kv * self._n_dropped
        return counts


def by_kv_head(q: Any, spec: LayerSpec) -> np.ndarray:
    """Returns queries (H, T, d), without padding, as f32 (G, T H/G, padded d), by position."""
    n_head_kv, n_position, d = spec.n_head_kv, q.shape[1], spec.head_dim
    rows = np.zeros((n_head_kv, n_position, spec.group, padded(d)), np.float32)
    rows[..., :d] = as_f32(q).reshape(n_head_kv, spec.group, n_position, d).swapaxes(1, 2)
    return rows.reshape(n_head_kv, -1, rows.shape[-1])
