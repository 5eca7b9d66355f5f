"""The cache of one layer of one sequence: what the decoder asks of it, and the parts methods share.

The decoder hands a layer's q, k, v to its LayerCache and gets the attention's output back.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, Protocol

import numpy as np

from sparsekv_cli.cache.counters import Ledger
from sparsekv_cli.cache.spec import AttnInput, LayerSpec, Memory
from sparsekv_cli.cache.store import KVStore


class Backend(Protocol):
    """The operations that methods call by name; cpu/ops.py on the host."""

    def dense_prefill(self, store: KVStore, x: AttnInput, spec: LayerSpec) -> Any: ...
    def append_row(self, store: KVStore, x: AttnInput) -> None: ...
    def attend_dense(self, store: KVStore, q: np.ndarray, spec: LayerSpec) -> np.ndarray: ...
    def attend_rows(
        self, store: KVStore, q: np.ndarray, idx: np.ndarray, counts: np.ndarray, spec: LayerSpec
    ) -> np.ndarray: ...
    def score_rows(self, store: KVStore, q: np.ndarray, spec: LayerSpec) -> np.ndarray: ...


class LayerCache(ABC):
    """The mutable state of one layer of one sequence.

    selects: whether a step attends to some rows exactly and leaves the others out, so that it can
    be asked which (``attended``). Not so in a cache that attends to all, exactly or roughly. What
    it is after a prefill holds for the steps that follow.
    keeps_rows: whether the rows of a prefill take as much memory before ``finish_prefill`` as after
    it. A prompt then takes the layers in parts; otherwise a layer is finished before the next.
    """

    selects: bool = True
    keeps_rows: ClassVar[bool] = False

    def __init__(self, spec: LayerSpec, backend: Backend) -> None:
        self.spec = spec
        self.backend = backend
        self.store = KVStore(spec)
        self.ledger = Ledger()
        self.traced = False  # whether ``attended`` must be kept
        # Rows of the last decode step, int32 (H or G, m) with counts int64; None: all of them.
        self.attended: tuple[np.ndarray, np.ndarray] | None = None

    @property
    def n(self) -> int:
        """Rows of the sequence that the cache holds, in whatever form."""
        return self.store.n

    def prefill(self, x: AttnInput) -> Any:
        """Stores a chunk's K and V; returns its dense causal attention (H, T, d_v), as x.q is."""
        self.store.append(x.k, x.v)
        return self.backend.dense_prefill(self.store, x, self.spec)

    def finish_prefill(self) -> None:  # noqa: B027 - most methods have nothing to do here
        """Called once after the last chunk: build indexes, evict, compress."""

    @abstractmethod
    def decode(self, x: Any) -> Any:
        """Adds the row of an AttnInput; its attention f32 (H, >= d_v), valid until the next call.

        A cache on a device takes and gives what device/cache.py says.
        """

    def reserve(self, n: int) -> None:
        """Announces that ``n`` rows in all are coming."""
        self.store.reserve(n)

    def truncate(self, n: int) -> int:
        """Forgets all but the first n rows if it can; returns how many are kept (n or 0).

        The index goes with the rows: the next prefill, or else the next decode, builds a new one.
        """
        self.store.truncate(n)
        return self.store.n

    def memory(self) -> Memory:
        return Memory(host=self.store.nbytes)

    def counters(self) -> Mapping[str, int]:
        """The ledger's counts so far."""
        return self.ledger.counts


class DenseCache(LayerCache):
    """Attends to every row: the method ``full``, and the dense layers of every other method."""

    selects = False
    keeps_rows = True

    def decode(self, x: AttnInput) -> np.ndarray:
        store, spec = self.store, self.spec
        self.backend.append_row(store, x)
        rows = spec.n_head * store.n
        self.ledger.step(rows, rows, rows, spec.n_head_kv * store.n * store.row_bytes, False)
        return self.backend.attend_dense(store, x.q[:, 0], spec)


class SelectingCache(LayerCache):
    """append -> select -> attend over the selected rows; a method writes ``select`` only."""

    keeps_rows = True

    def decode(self, x: AttnInput) -> np.ndarray:
        store, spec = self.store, self.spec
        self.backend.append_row(store, x)
        q, n = x.q[:, 0], store.n
        rows = spec.n_head * n
        if self.selects_all(n):
            n_bytes = spec.n_head_kv * n * store.row_bytes
            self.ledger.step(rows, rows, rows, n_bytes, True)
            self.attended = None
            return self.backend.attend_dense(store, q, spec)
        idx, counts, scored = self.select(q, n)
        self.attended = (idx, counts)
        attended = int(counts.sum()) * (spec.n_head // len(counts))
        n_bytes = int(counts.sum()) * store.row_bytes + self.bytes_to_select(n)
        self.ledger.step(rows, scored, attended, n_bytes, True)
        return self.backend.attend_rows(store, q, idx, counts, spec)

    @abstractmethod
    def selects_all(self, n: int) -> bool:
        """Whether the budget covers a context of n rows, so that attention is dense."""

    @abstractmethod
    def select(self, q: np.ndarray, n: int) -> tuple[np.ndarray, np.ndarray, int]:
        """Rows for q f32 (H, d) among n: idx int32 (U, m), counts int64 (U,), rows scored.

        U is H (a list a query head) or G (a list a kv head); rows in any order, without repeats.
        """

    def bytes_to_select(self, n: int) -> int:
        """Bytes that one ``select`` reads."""
        return 0
