"""A decode step of LFPS for a whole layer, as one compiled call."""

from typing import Any, NamedTuple

import numpy as np
from numba import carray

from sparsekv_cli.cpu.attention.decode import append_row
from sparsekv_cli.cpu.jit.kernel import njit
from sparsekv_cli.cpu.jit.pointers import integer_pointer, on_lines
from sparsekv_cli.cpu.lfps.attend import mark_tasks, run_tasks, update_tasks
from sparsekv_cli.cpu.lfps.bypass import Constants
from sparsekv_cli.cpu.lfps.history import BLOCK, Tables
from sparsekv_cli.cpu.lfps.scout import Scout
from sparsekv_cli.cpu.lfps.state import (
    Buffers,
    CandidateMarks,
    Journal,
    LFPSState,
    PendingUpdate,
    Rules,
    StepMemory,
    Work,
)
from sparsekv_cli.cpu.vector.run import KernelStep, memory_of, run
from sparsekv_cli.cpu.vector.views import scratch, view

STEP, UPDATE, MARK = range(3)  # the tasks of ``run_thread``


@njit(cache=True, nogil=True)
def run_thread(at, task, counter, shared, own):
    """Runs a thread's part of a task; see ``run`` (cpu/vector/run.py)."""
    step = view(LFPSState, at)
    work = scratch(Work, at, shared)
    marks = CandidateMarks(work.taus, work.bits)
    if step.n_kept:
        marks = CandidateMarks(step.kept_taus, step.kept_bits)
    memory = StepMemory(work, marks, scratch(Buffers, at, own))
    tasks = carray(integer_pointer(counter), 1)
    if task == STEP:
        run_tasks(tasks, step, memory)
    elif task == UPDATE:
        update_tasks(tasks, step, memory)
    else:
        mark_tasks(tasks, step, memory)


@njit(cache=True, nogil=True)
def lfps_step(at):
    """Runs a layer's decode step (Algorithm 1): stores the current token as row n - 1, attends.

    at: of a record of LFPSState.
    """
    step = view(LFPSState, at)
    append_row(step.k, step.v, step.layout, step.n - 1)
    run(step.thread, step.n_threads, at, STEP, memory_of(Work, Buffers, at, step.n_threads))


@njit(cache=True, nogil=True)
def lfps_task(at, task):
    """Runs UPDATE, the rest of a step, or MARK, a part of the next one; at: see ``lfps_step``."""
    step = view(LFPSState, at)
    run(step.thread, step.n_threads, at, task, memory_of(Work, Buffers, at, step.n_threads))


def _pending_update(n_head: int, n: int) -> PendingUpdate:
    """Returns a PendingUpdate with room for n rows a head."""
    rows, weights = (on_lines((n_head, n), each, zeros=True) for each in (np.int32, np.float32))
    return PendingUpdate(rows, weights, np.zeros(n_head, np.int64), np.zeros(n_head))


class LFPSPlan(NamedTuple):
    """A step, whoever computes its parts and when."""

    n: int  # rows, with the current token's
    k_budget: int  # rows that a head attends to besides the sinks, |C2|
    limit: int  # most rows of C1
    n_scanned: int  # parts of PART rows that the scout scores; it finds one row in each
    by_group: bool  # whether the heads of a kv group score each other's candidates
    a: float  # of eq 8


class LFPSStep(KernelStep):
    """Runs the steps of one layer's LFPS cache.

    constants: lfps/bypass.py. sinks f32 (H,): each head's score without a value, or empty. raised
    f64 (H,): factors of the thresholds. statistics int64 (H, N_STATISTICS): steps add to them.

    defers: whether ``run`` leaves the update of the tables to ``finish``. ``finish`` also computes
    the candidates of the next step, which ``run`` takes if it gets the same plan. ``drop`` makes it
    forget both.
    """

    def __init__(
        self,
        rules: Rules,
        constants: Constants,
        sinks: np.ndarray,
        raised: np.ndarray,
        statistics: np.ndarray,
        tables: Tables,
        n_threads: int,
    ) -> None:
        self._rules = rules
        self.defers = self._is_traced = False
        self._marked: LFPSPlan | None = None  # the step whose candidates ``finish`` has computed
        self._journal: Journal | None = None
        self._shared: tuple[bool, float] | None = None  # by_group and a, as in the record
        all_sinks = np.full(len(raised), -np.inf, np.float32)
        all_sinks[: len(sinks)] = sinks
        self._pending = _pending_update(len(raised), 0)  # of the last step that deferred its update
        state = LFPSState(
            constants=constants, raised=raised, statistics=statistics, sinks=all_sinks,
            tables=tables, pending=self._pending, rules=rules, n_threads=n_threads,
        )  # fmt: skip
        super().__init__(state, run_thread)

    def use_tables(self, tables: Tables) -> None:
        self.state.set(tables=tables)

    def use_scout(self, scout: Scout) -> None:
        """Sets the codes. Call it again for new codes."""
        self.state.set(codes=scout.known())

    def exclude_sinks(self, lse: np.ndarray) -> None:
        """Makes steps leave the sinks out of their output.

        lse f32 (H,): receives the log of the sum of exponentials of the scores that are included.
        """
        self.state.set(lse=lse)

    def drop(self) -> None:
        """Drops the update that ``finish`` would do, and the candidates that it has computed."""
        self._marked = None
        self._pending.sizes[:] = 0

    def run(
        self,
        plan: LFPSPlan,
        layout: np.ndarray,
        rows: tuple[np.ndarray, np.ndarray, np.ndarray],
        out: np.ndarray,
        attended: tuple[np.ndarray, np.ndarray] | None,
        journal: Journal | None,
    ) -> None:
        """Runs a step: rows f32 q (H, 1, d), k (G, 1, d), v (G, 1, d_v) -> out f32 (H, d_v).

        layout: of the KV store. attended: int32 (H, m), which receives the rows that each head
        attended to, sinks first, and their number int64 (H,); or None. journal: receives the
        entries of the tables that the step changes; or None.
        """
        is_marked, self._marked = self._marked == plan, None
        self._prepare(plan, layout, is_marked)
        arrays: dict[str, Any] = dict(zip(("q", "k", "v"), rows, strict=True))
        if attended is not None or self._is_traced:
            arrays["attended"], arrays["n_attended"] = attended or (None, None)
            self._is_traced = attended is not None
        if journal is not self._journal:
            self._journal = arrays["journal"] = journal
        self.state.set(out=out, **arrays)
        lfps_step(self.at)

    def finish(self, following: LFPSPlan, layout: np.ndarray) -> None:
        """Updates the tables with the weights of the last step (eq 10), if it deferred that.

        Then it computes thresholds and candidates C0 (eq 7, 8) of the following step.
        """
        lfps_task(self.at, UPDATE)
        self._prepare(following, layout, False)
        lfps_task(self.at, MARK)
        self._marked = following

    def _prepare(self, plan: LFPSPlan, layout: np.ndarray, is_marked: bool) -> None:
        state, k_budget = self.state, plan.k_budget
        recent = max(1, min(self._rules.recent, k_budget // 2))  # the current row is one
        assert plan.limit >= recent  # or thresholds would never stop rising
        if (plan.by_group, plan.a) != self._shared:
            rules = self._rules._replace(by_group=plan.by_group, a=plan.a)
            state.set(rules=rules, n_head_groups=state.n_kv if plan.by_group else state.n_head)
            self._shared = plan.by_group, plan.a
        state.set(
            layout=layout, n=plan.n, k_budget=k_budget, n_recent=recent, limit=plan.limit,
            n_scanned=plan.n_scanned, is_marked=is_marked,
        )  # fmt: skip
        if self.defers:
            self._make_room(k_budget)

    def _make_room(self, k_budget: int) -> None:
        """Makes room for the data that one task sets and another reads: each head's C2 and C0."""
        state = self.state
        n_head, n_words = state.n_head, state.n_entries // BLOCK + 2
        if state.n_kept >= k_budget and state.n_bit_words >= n_words:
            return
        self._pending = _pending_update(n_head, k_budget)
        state.set(
            pending=self._pending,
            kept_taus=np.zeros((n_head, 2)),
            kept_bits=on_lines((n_head, n_words), np.uint64),
        )
