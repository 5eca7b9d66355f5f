"""LFPS: "Learn from the Past: Fast Sparse Indexing for Large Language Model Decoding" (Yao, Wang).

A head's past attention predicts its next attention. One table stores it by position (vertical
pattern), the other by distance (slash pattern). Each step chooses candidates from the tables and
scores only these exactly. It attends to the best ones, and adds their weights to the tables.

| paper | here |
|---|---|
| eq 4, initial tables from the last s prefill queries | cpu/lfps/start.py start_tables |
| eq 5, 6, high-sparsity test (sink, global, local mass) | cpu/lfps/bypass.py bypass |
| eq 7, 8, candidates C0 above tau = a mean / kappa | cpu/lfps/history.py threshold, mark_* |
| eq 9, expansion by {-1, 0, 1, 2} to C1 | cpu/lfps/history.py expand, filter_expansion |
| Algorithm 1 line 10, top-k of C1 by exact q . k | cpu/lfps/attend.py _score_part, _attend_rows |
| eq 10, decay and update of the tables | cpu/lfps/history.py add_entries (lazily: u = Phi / g) |

Departures; docs/methods.md has their reasons and figures:
(1) A bypassed head returns the mean of sinks, local rows and the mean value, by their masses.
(2) The slash table is indexed by distance, so that nothing is shifted.
(3) Neighbours are not filtered. R is larger. A score's variance is from the keys' covariance.
(4) At most ``candidates`` rows are scored a head. If more pass, the thresholds rise.
(5) a is .3 (paper: .2), and epsilon is .95 (paper: .85). (6) Layer 0 is dense; beyond
``pages_from`` rows it attends to 1024 rows in pages, as Quest does. (7) The mean of eq 8 is over
at most ``horizon`` entries. (8) Beyond 8192 rows the heads of a kv group score each other's
candidates (``scored_by``). (9) A scout makes candidates of rows without history, by codes of
their keys: of all in the first step, then of a slice. ``preset=paper`` undoes 3 to 9.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np

from sparsekv_cli.cache.attend import score_rows
from sparsekv_cli.cache.layer import LayerCache, rows_alike
from sparsekv_cli.cache.queries import PastQueries
from sparsekv_cli.cache.spec import DEFAULT_BUDGET, N_SINKS, AttnInput, Budget, LayerSpec, Memory
from sparsekv_cli.cache.store import padded
from sparsekv_cli.cpu.lfps import scout, state
from sparsekv_cli.cpu.lfps.bypass import Constants
from sparsekv_cli.cpu.lfps.covariance import RowSums
from sparsekv_cli.cpu.lfps.history import Tables
from sparsekv_cli.cpu.lfps.saved import Indexed, SavedStep, SavedTables
from sparsekv_cli.cpu.lfps.start import start_tables
from sparsekv_cli.cpu.lfps.step import LFPSPlan, LFPSStep
from sparsekv_cli.methods.base import DENSE_HELP, Method
from sparsekv_cli.methods.quest import DenseThenPages, Quest
from sparsekv_cli.settings.option import option

ALL = np.float32(1e30)  # a log-sum-exp so large that other rows get no weight
NO_HORIZON = 1 << 62
LARGEST_FACTOR = 10**9  # largest value of a factor
PAGES = Quest(page=32, budget=Budget(tokens=1024))  # of dense layers beyond ``pages_from`` rows
GROUP_ROWS = 8192  # beyond so many rows the heads of a kv group share candidates
SHARED = 0.855, 2  # added to the factor of ``a`` for each other head; at most 2 heads


@dataclass(frozen=True)
class LFPS(Method):
    """Options of LFPS; symbols as in the paper."""

    paper: ClassVar[str] = "arXiv:2506.15704"
    description: ClassVar[str] = "candidates from tables of past attention (vertical and slash)"
    use: ClassVar[str] = "long answers after long contexts; it misses a few of many similar keys"
    host_cache: ClassVar[str] = "lfps:HostLFPS"
    work_of_a_head: ClassVar[int] = 1280
    renamed: ClassVar[dict[str, str]] = {"dense_rows": "pages_from"}
    presets: ClassVar[dict[str, dict[str, Any]]] = {
        "tuned": {},
        "paper": {
            "pages_from": 0,
            "scored_by": "head",
            "expand": "filtered",
            "recent": 8,
            "candidates": 0,
            "a": 0.2,
            "horizon": 0,
            "sigma": "ratio",
            "epsilon": 0.85,
            "scout": 0,
            "dense_layers": (),
        },
    }

    dense_layers: tuple[int, ...] = option((0,), DENSE_HELP)
    pages_from: int = option(
        4096, "rows beyond which dense layers on the host choose pages; 0 = never", at_least=0
    )
    preset: str = option("tuned", "a set of values; -o overrides them", choices=tuple(presets))
    budget: Budget = option(DEFAULT_BUDGET, "k: rows attended a head: N or P%")
    scored_by: str = option(
        "auto", "who scores a candidate: its head, its kv group; auto: a group beyond 8192 rows",
        choices=("auto", "head", "group"),
    )  # fmt: skip
    expand: str = option(
        "plain", "neighbours of candidates; filtered: as in eq 9", choices=("plain", "filtered")
    )
    recent: int = option(
        32, "R: last rows, always candidates (at most half the budget)", at_least=1
    )
    candidates: int = option(
        2048, "most rows scored a head (a group: twice), at least twice the budget; 0 = no limit",
        at_least=0,
    )  # fmt: skip
    a: float = option(
        0.3, "factor of the candidate threshold (eq 8)", above=0, at_most=LARGEST_FACTOR
    )
    horizon: int = option(6144, "most entries in the mean of eq 8; 0 = all", at_least=0)
    decay: float = option(0.95, "r: factor of the tables in each step (eq 10)", above=0, below=1)
    window: int = option(32, "s: last prefill queries, which start the tables (eq 4)", at_least=1)
    epsilon: float = option(
        0.95,
        "sink share above which a head is bypassed; 1 = never (eq 6)",
        above=0,
        at_most=LARGEST_FACTOR,
    )
    sigma: str = option(
        "cov", "variance of scores: cov (q' C q) or ratio (of the last query)",
        choices=("cov", "ratio"),
    )  # fmt: skip
    scout: int = option(65536, "rows whose codes a step scores; 0 = none", at_least=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.scout and self.sigma != "cov":
            raise ValueError(f"scout = {self.scout}: needs sigma=cov; with ratio take scout=0")

    @property
    def n_queried(self) -> int:
        return self.window

    def rows_scouted(self, n: int, n_start: int) -> int:
        """Returns how many codes a step to n rows scores. n_start: rows at the prefill's end."""
        return max(self.scout, n) if self.scout and n <= n_start + 1 else self.scout

    def sparse_layer(self, spec: LayerSpec) -> LayerCache:
        return LFPSCache(spec, self)

    def dense_layer(self, spec: LayerSpec) -> LayerCache:
        if not self.pages_from:
            return super().dense_layer(spec)
        pages = replace(PAGES, budget=self.budget.at_least(PAGES.budget.rows(1)))
        return DenseThenPages(spec, pages, self.pages_from)

    def used(self) -> Sequence[Method]:
        return (PAGES,)


class LFPSCache(LayerCache):
    """The rows of one layer, its tables of past attention, and constants of its keys."""

    can_prefill_in_parts = True

    def __init__(self, spec: LayerSpec, method: LFPS) -> None:
        super().__init__(spec)
        self.method = method
        self._queries = PastQueries(method.window, spec.n_head, spec.head_dim)
        self.queries_read = method.window
        n_kv, width = spec.n_head_kv, padded(spec.head_dim)
        size = width if method.sigma == "cov" else 0
        self._constants = Constants(
            mean_k=np.zeros((n_kv, width), np.float32),
            mean_v=np.zeros((n_kv, padded(spec.value_dim)), np.float32),
            covariance=np.zeros((n_kv, size, size), np.float32),
            ratio=np.zeros(spec.n_head, np.float32),
        )
        self._sums = RowSums(n_kv, width, padded(spec.value_dim), covariance=size > 0)
        self._a_of_group = float(method.a * (1 + SHARED[0] * min(spec.group - 1, SHARED[1])))
        self._rules = state.Rules(
            float(spec.scale), n_kv, method.recent, float(method.a), method.horizon or NO_HORIZON,
            float(method.decay), float(method.epsilon), method.expand == "filtered",
            by_group=False, softcap=float(spec.softcap),
        )  # fmt: skip
        none, sums = np.zeros((spec.n_head, 0), np.float32), np.zeros((spec.n_head, 2, 4))
        self._tables = Tables(none, none, none, none, sums, np.ones(spec.n_head))
        self._raised = np.ones(spec.n_head)
        self._statistics = np.zeros((spec.n_head, state.N_STATISTICS), np.int64)
        self._indexed = Indexed()
        self._step = LFPSStep(
            self._rules, self._constants, spec.sinks, self._raised, self._statistics, self._tables,
            spec.n_threads,
        )  # fmt: skip
        self._scout = scout.Scout(n_kv, width) if method.scout else None
        self.lse = np.empty(0, np.float32)  # see ``exclude_sinks``

    def exclude_sinks(self) -> None:
        """Makes ``decode`` leave the sinks out of its output, because a device attends to them.

        ``lse`` f32 (H,) is then the log of the sum of e^score over the rows in a head's output.
        After a dense step, whose output includes the sinks, it is ALL.
        """
        self.lse = np.empty(self.spec.n_head, np.float32)
        self._step.exclude_sinks(self.lse)

    def update_later(self) -> None:
        """Lets ``end_step`` update the tables (eq 10) and choose the next candidates (eq 7, 8)."""
        self._step.defers = True

    def end_step(self, n: int) -> None:
        if not self._indexed.n_pending:
            return
        indexed = self._indexed._replace(n=n, n_pending=0)
        self._indexed = indexed._replace(n=0)  # if it is interrupted
        self._step.finish(self._plan(n + 1, indexed.n_start), self.store.layout)
        self._indexed = indexed

    def _allocate(self, capacity: int) -> None:
        """Gives the tables room for ``capacity`` entries, in whole blocks. New entries are 0."""
        self._tables = self._tables.with_room(capacity)
        self._step.use_tables(self._tables)

    def extend(self, x: AttnInput) -> Any:
        self._queries.extend(x.q)
        return super().extend(x)

    def finish_prefill(self) -> None:
        """Makes the tables (eq 4) and the constants of eq 6, if the next step is sparse."""
        self._queries.finish_prefill(self.store.n)
        if not self._is_dense_at(self.store.n + 1):
            self._start()

    def _start(self) -> None:
        """Makes tables and constants if the queries of the last rows are known."""
        queries = self._queries.last(self.store.n)
        if queries.shape[1] and self.store.n > N_SINKS + 1:
            self._index(queries)

    def _index(self, queries: np.ndarray) -> None:
        """Makes tables and constants from all rows. queries: f32 (H, s, d), of the last s rows."""
        self._step.drop()  # unfinished work of a step that was undone
        store, spec, constants = self.store, self.spec, self._constants
        means = constants.mean_k, constants.mean_v
        self._sums.extend(store.layout, store.n, means, constants.covariance, spec.n_threads)
        q = np.zeros((spec.n_head, queries.shape[1], padded(spec.head_dim)), np.float32)
        q[..., : spec.head_dim] = queries
        if self.method.sigma != "cov":
            last = q[:, -1]
            scores = score_rows(last, store, spec)[:, N_SINKS : store.n]
            norm = np.maximum(np.square(spec.scale * last).sum(-1), 1e-30)
            constants.ratio[:] = scores.var(-1, dtype=np.float64) / norm
        self._allocate(max(store.capacity, store.n + 256))
        q = store.k_type.rotated(q)
        if self._scout:
            self._scout.aim(q, constants.mean_k, constants.covariance)
            self._code_rows()
        start_tables(q, store.layout, store.n, self._rules, self._tables, spec.n_threads)
        self._raised[:] = 1.0
        self._indexed = Indexed(store.n, store.n)

    def _code_rows(self) -> None:
        """Computes the scout's codes for rows that have none."""
        assert self._scout is not None
        self._scout.code(self.store.layout, self.store.n, self.spec.n_threads)
        self._step.use_scout(self._scout)

    def _is_dense_at(self, n: int) -> bool:
        """Returns whether a step attends to all rows of a context of n rows."""
        return self.method.budget.rows(n) + N_SINKS >= n

    def decode(self, x: AttnInput) -> np.ndarray:
        store, spec = self.store, self.spec
        n = store.n + 1
        if self._is_dense_at(n):
            store.append_row(x.k, x.v)
            self._queries.record(x.q, n)
            self.lse[:] = ALL
            return self.attend_all(x.q)
        if self._indexed.n != store.n:  # after dense steps, or a rewind
            self._start()
        if self._indexed.n != store.n:  # no query is known: use this step's
            store.append_row(x.k, x.v)
            self._index(x.q[..., : spec.head_dim])
        indexed, self._indexed = self._indexed, Indexed()  # if the step is interrupted
        plan = self._plan(n, indexed.n_start)
        out = np.empty((spec.n_head, store.v_type.width), np.float32)
        if self.records_attended:  # a bypassed head lists its local rows
            width = N_SINKS + max(plan.k_budget, state.LOCAL + 1)
            attended = np.empty((spec.n_head, width), np.int32)
            self.attended = attended, np.zeros(spec.n_head, np.int64)
        keys, values = store.k_type, store.v_type
        rows = keys.rotated(x.q), keys.rotated(x.k), values.rotated(x.v)
        traced = self.attended if self.records_attended else None
        saved: SavedTables | None = self._saved[-1].own.tables if self._saved else None
        # ``_saved`` may still end with a row of an earlier draft. This step is then no draft.
        journal = saved.journal if saved and saved.n == n else None
        self._step.run(plan, store.layout, rows, out, traced, journal)
        store.n = n
        defers = self._step.defers
        self._indexed = Indexed(0 if defers else n, indexed.n_start, n if defers else 0)
        return store.v_type.rotated(out)

    def decode_rows(self, rows: Sequence[AttnInput]) -> np.ndarray:
        if not self._is_dense_at(self.store.n + len(rows)):
            return super().decode_rows(rows)
        left = iter(rows)

        def count() -> None:
            self._queries.record(next(left).q, self.store.n)
            self._count_all(sparse=True)

        self.lse[:] = ALL
        return self._decode_all(rows, count)

    def _plan(self, n: int, n_start: int) -> LFPSPlan:
        """Returns the sizes and limits of the step that makes the sequence n rows long.

        It also makes room for the new row, its code and its entries. n_start: rows at the prefill's
        end.
        """
        self.store.reserve(n)
        if self._scout and self._scout.n_parts < self.store.n // scout.PART:
            self._code_rows()
        if n > self._tables.ver.shape[1]:
            self._allocate(n + n // 8 + 256)
        method, limit, by_group = self.method, n, self._scores_by_group(n)
        k = method.budget.rows(n)
        n_scanned = -(-method.rows_scouted(n, n_start) // scout.PART)
        if method.candidates:
            limit = max(min(method.candidates, n) * (2 if by_group else 1), 2 * k)
            limit += self.spec.n_head * min(n_scanned, scout.FOUND)
        a = self._a_of_group if by_group else float(method.a)
        return LFPSPlan(n, k, limit, n_scanned, by_group, a)

    def _scores_by_group(self, n: int) -> bool:
        """Returns whether the heads of a kv group score each other's candidates at n rows."""
        return {"auto": n > GROUP_ROWS, "group": True, "head": False}[self.method.scored_by]

    def most_rows(self, n: int) -> int:
        return rows_alike(self._is_dense_at, self.store.n + 1, n)

    def save_own(self) -> SavedStep:
        if self._is_dense_at(self.store.n + 1):  # the step only records its query
            return SavedStep(None, self._queries.copy(), self._indexed, 0)
        n, method = self.store.n + 1, self.method
        tables = SavedTables(
            self._tables, n, method.budget.rows(n), method.decay, self._raised, self._statistics
        )
        n_parts = self._scout.n_parts if self._scout else 0
        return SavedStep(tables, self._queries, self._indexed, n_parts)

    def take_back_own(self, own: SavedStep) -> None:
        tables, self._queries, self._indexed, n_parts = own
        if tables is None:
            return
        tables.restore(self._tables)
        if self._scout and self._scout.n_parts > n_parts:
            self._scout.n_parts = n_parts
            self._step.use_scout(self._scout)

    def truncate(self, n: int) -> int:
        self._queries.truncate(n)
        if n < max(self._indexed.n, self._indexed.n_pending):  # steps have changed the tables
            self._indexed = Indexed()
        self._sums.truncate(n)
        return super().truncate(n)

    def copy_index(self, of: LayerCache, n: int) -> None:
        assert isinstance(of, LFPSCache)
        if of.method.sigma == self.method.sigma:
            self._sums.copy(of._sums, n)

    def held_bytes(self, n: int) -> int:
        spec, covariance = self.spec, self._constants.covariance
        codes = scout.n_directions(spec.head_dim) * 9 // 16 if self._scout else 0
        index = n * (8 * spec.n_head + codes * spec.n_head_kv)  # with ver and dist
        index += 5 * covariance.nbytes  # f32, and f64 now and at an earlier length
        return super().held_bytes(n) + (0 if self._is_dense_at(n) else index)

    def memory(self) -> Memory:
        arrays = (*self._tables, *self._constants, self._queries, self._sums)
        index = sum(each.nbytes for each in arrays) + (self._scout.nbytes if self._scout else 0)
        return Memory(host=self.store.nbytes, index=index)

    def counters(self) -> Mapping[str, int]:
        """Returns the counts of dense steps plus those that the kernels counted in sparse steps."""
        total = self._statistics.sum(0)
        scored, attended = int(total[state.SCORED]), int(total[state.ATTENDED])
        counts = self.ledger.counts.copy()
        for prefix in ("", "sparse_"):
            counts[f"{prefix}rows_total"] += int(total[state.ROWS])
            counts[f"{prefix}rows_scored"] += scored
            counts[f"{prefix}rows_attended"] += attended
        counts["bytes_read"] += int(total[state.KEYS_READ]) * self.store.k.strides[1]
        left_out = N_SINKS * int(total[state.HEAD_STEPS]) if len(self.lse) else 0
        counts["bytes_read"] += (attended - left_out) * self.store.v.strides[1]
        a_head = 4 * self.spec.head_dim * (self.spec.head_dim if self.method.sigma == "cov" else 1)
        entries = int(total[state.BOUNDS_READ] + total[state.ENTRIES_READ])
        counts["bytes_read"] += 4 * entries + a_head * int(total[state.TESTED])
        if self._scout:
            directions, codes = self._scout.directions[0], int(total[state.CODES_READ])
            counts["codes_read"] += codes
            counts["bytes_read"] += len(directions) * codes // 2
            counts["bytes_read"] += directions.nbytes * int(total[state.SCOUTING])
        for name, column in (
            ("heads_stepped", state.HEAD_STEPS), ("heads_tested", state.TESTED),
            ("heads_bypassed", state.BYPASSED), ("bounds_read", state.BOUNDS_READ),
            ("entries_read", state.ENTRIES_READ),
        ):  # fmt: skip
            counts[name] += int(total[column])
        return counts
