"""H2O: "Heavy-Hitter Oracle for Efficient Generative Inference" (Zhang et al., arXiv:2306.14048).

Every key collects the attention that queries pay to it. A cache of fixed size keeps the keys that
collected most and the most recent ones, half of each. A step that adds a row drops another one for
good. Memory and work of a step do not grow with the text.

| paper | here |
|---|---|
| section 4, F_score: attention accumulated | cpu/eviction/scores.py add_attention |
| Algorithm 1, lines 4 to 8: the row to drop | cpu/eviction/scores.py least_attended |
| section 5, half heavy hitters and half recent rows | H2O.limits |

Departures; docs/methods.md has their reasons:
(1) The query heads of a kv head share one choice, by the sum of their scores.
(2) Sinks are kept in addition to the budget.
(3) A row is dropped after the step that makes it too many, so that the next step's row fits.
(4) ``window`` sums only the last queries of a prefill.
(5) A later prefill, a turn of a chat, is dense over the rows that are left and its own.
(6) Summed attention cannot be taken back. A sequence goes back to the end of its last prefill,
    which is copied, or it is read again.
"""

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np

from sparsekv_cli.cache.layer import EvictingCache, LayerCache, by_kv_head
from sparsekv_cli.cache.queries import LastQueries
from sparsekv_cli.cache.spec import DEFAULT_BUDGET, N_SINKS, AttnInput, Budget, LayerSpec, Memory
from sparsekv_cli.cache.store import KVStore
from sparsekv_cli.cpu.attention.select import select_rows
from sparsekv_cli.cpu.eviction import scores as evict
from sparsekv_cli.methods.base import Method
from sparsekv_cli.settings.option import option


@dataclass(frozen=True)
class H2O(Method):
    """Options of H2O."""

    paper: ClassVar[str] = "arXiv:2306.14048"
    description: ClassVar[str] = "keeps the most attended and the recent rows, drops others"
    use: ClassVar[str] = "memory that must not grow; facts of a long prompt are lost"
    holds_all_rows: ClassVar[bool] = False

    budget: Budget = option(DEFAULT_BUDGET, "rows held for a head, half of them recent: N or P%")
    window: int = option(0, "last queries of a prefill whose attention counts; 0 = all", at_least=0)

    @property
    def n_queried(self) -> None:
        """None: every query of the prompt adds attention."""

    def limits(self, n: int) -> tuple[int, int]:
        """Returns how many of n rows to hold, and the position from which rows count as recent.

        Both leave room for row n, which the next step adds. With a budget of 64 rows and n = 1000:
        67 rows (63 and 4 sinks), and 969.
        """
        budget = self.budget.rows(n + 1)
        return N_SINKS + budget - 1, n + 1 - max(1, budget // 2)

    def sparse_layer(self, spec: LayerSpec) -> LayerCache:
        return H2OCache(spec, self)


class _Held(NamedTuple):
    """The rows that a cache holds in a sequence of n rows."""

    n: int
    store: KVStore
    positions: np.ndarray  # int32 (G, store.n)
    mass: np.ndarray  # f32 (G, store.n)


class _Before(NamedTuple):
    """The fields of H2OCache before a step."""

    held: _Held
    n_dropped: int
    n_settled: int
    start: _Held | None


class H2OCache(EvictingCache):
    """The rows that one layer holds, in any order, and the attention that each has received."""

    def __init__(self, spec: LayerSpec, method: H2O) -> None:
        super().__init__(spec)
        self.method = method
        self._queries = LastQueries(method.window)
        self.queries_read = method.window or None
        shape = (spec.n_head_kv, 0)
        # (G, rows of the store) each: position, attention received, and attention in the running
        # prefill
        self._positions = np.empty(shape, np.int32)
        self._mass, self._new_mass = np.empty(shape, np.float32), np.empty(shape, np.float32)
        self._start: _Held | None = None  # a copy of the prefill's end, once a step has followed

    def positions(self) -> np.ndarray:
        return self._positions[:, : self.store.n]

    def most_held(self, n: int) -> int:
        return self.method.limits(n)[0] + 1

    def extend(self, x: AttnInput) -> Any:
        rows = super().extend(x)
        if self.method.window:
            self._queries.add(x.q)
        else:
            self._add(by_kv_head(x.q, self.spec))
        return rows

    def _add(self, queries: np.ndarray) -> None:
        """Adds attention to ``_new_mass``: of queries (G, R, d), those of the last rows."""
        store, spec = self.store, self.spec
        self._new_mass = _widened(self._new_mass, store.n)
        evict.add_attention(
            store.k_type.rotated(queries), store.layout, store.n, spec.group, spec.scale,
            spec.softcap, spec.sinks, self._new_mass, spec.n_threads,
        )  # fmt: skip

    def finish_prefill(self) -> None:
        self._start = None
        n_settled, n, n_seen = self._n_settled, self.store.n, self.n
        n_old = n_settled - self._n_dropped
        self._n_settled = n_seen  # the next lines change the rows for good
        if self.method.window:
            self._add(by_kv_head(self._queries.take(), self.spec))
        self._positions = _widened(self._positions[:, :n_old], n)
        self._positions[:, n_old:] = np.arange(n_settled, n_seen)
        self._mass = _widened(self._mass[:, :n_old], n)
        self._mass += self._new_mass
        self._new_mass = self._new_mass[:, :0]
        limit, first_recent = self.method.limits(n_seen)
        if n > limit:
            forced = (self._positions < N_SINKS) | (self._positions >= first_recent)
            scores = np.where(forced, np.float32(np.inf), self._mass)
            slots = np.empty((len(scores), limit), np.int32)
            select_rows(scores, n, 0, 0, limit, slots)
            self._positions = np.take_along_axis(self._positions, slots, 1)
            self._mass = np.take_along_axis(self._mass, slots, 1)
            self.keep_slots(slots, 1)

    def decode(self, x: AttnInput) -> np.ndarray:
        if self._start is None:
            self._start = self._held()
        spec, n, n_seen = self.spec, self.store.n + 1, self.n + 1
        if n > self._mass.shape[1]:
            self.store.reserve(n)
            self._positions = _widened(self._positions, self.store.capacity)
            self._mass = _widened(self._mass, self.store.capacity)
        self._positions[:, n - 1], self._mass[:, n - 1] = n_seen - 1, 0
        out = self.attend_held(x, chooses=True)
        limit, first_recent = self.method.limits(n_seen)
        store, self._n_settled = self.store, n_seen
        q = store.k_type.rotated(x.q).reshape(spec.n_head_kv, spec.group, -1)
        evict.heavy_hitter_step(
            q, store.layout, n, spec.scale, spec.softcap, spec.sinks, n > limit, N_SINKS,
            first_recent, self._positions, self._mass, spec.n_threads,
        )  # fmt: skip
        if n > limit:
            store.truncate(n - 1)
            self._n_dropped += 1
        return out

    def save_own(self) -> _Before:
        return _Before(self._held(), self._n_dropped, self._n_settled, self._start)

    def take_back_own(self, own: _Before) -> None:
        held, self._n_dropped, self._n_settled, self._start = own
        _, self.store, self._positions, self._mass = held

    def _held(self) -> _Held:
        n = self.store.n
        store = self.store.copy(n, n_room=1)
        return _Held(self.n, store, self.positions().copy(), self._mass[:, :n].copy())

    def truncate(self, n: int) -> int:
        self._queries.clear()
        self._new_mass = self._new_mass[:, :0]
        if self._start is None or n != self._start.n:
            return super().truncate(n)
        (_, self.store, self._positions, self._mass), self._start = self._start, None
        self._n_dropped, self._n_settled = n - self.store.n, n
        return n

    def memory(self) -> Memory:
        """Returns the bytes of rows and sums, and of their copy at the prefill's end."""
        stores, tables = [self.store], [self._positions, self._mass]
        if self._start is not None:
            stores.append(self._start.store)
            tables += [self._start.positions, self._start.mass]
        return Memory(
            host=sum(store.nbytes for store in stores), index=sum(table.nbytes for table in tables)
        )


def _widened(old: np.ndarray, n: int) -> np.ndarray:
    """Returns a copy of ``old`` (G, m) with zeros added after each row, (G, n)."""
    new = np.zeros((len(old), n), old.dtype)
    new[:, : old.shape[1]] = old
    return new
