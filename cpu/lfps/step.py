"""A decode step of LFPS for a whole layer, as one compiled call."""

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


class LFPSStep(KernelStep):
    """Runs the steps of one layer's LFPS cache.

    constants: lfps/bypass.py. sinks f32 (H,): each head's score without a value, or empty. raised
    f64 (H,): factors of the thresholds. statistics int64 (H, N_STATISTICS): steps add to them. The
    caller calls ``use_tables`` first, and again for new tables.
    """

    def __init__(
        self,
        rules: Rules,
        constants: Constants,
        sinks: np.ndarray,
        raised: np.ndarray,
        statistics: np.ndarray,
        n_threads: int,
    ) -> None:
        self._rules = rules
        self._is_later = self._is_traced = False
        self._journal: Journal | None = None
        self._shared: tuple[bool, float] | None = None  # what ``share`` has set
        all_sinks = np.full(len(raised), -np.inf, np.float32)
        all_sinks[: len(sinks)] = sinks
        self.pending = _pending_update(len(raised), 0)  # of the last step that deferred its update
        state = LFPSState(
            constants=constants, raised=raised, statistics=statistics, sinks=all_sinks,
            pending=self.pending, rules=rules, n_threads=n_threads,
        )  # fmt: skip
        super().__init__(state, run_thread)
        self.share(rules.by_group, rules.a)

    def use_tables(self, tables: Tables) -> None:
        self.state.use(tables=tables)

    def use_scout(self, scout: Scout) -> None:
        """Sets the codes. Call it again for new codes."""
        self.state.set(codes=scout.known())

    def trace(self, attended: np.ndarray, counts: np.ndarray) -> None:
        """Makes steps list the rows that each head attended to, sinks first, until ``untrace``.

        attended int32 (H, m): the first counts[h] columns are set. counts int64 (H,).
        """
        self._is_traced = True
        self.state.use(attended=attended, n_attended=counts)

    def untrace(self) -> None:
        if self._is_traced:
            self._is_traced = False
            self.state.use(attended=None, n_attended=None)

    def exclude_sinks(self, lse: np.ndarray) -> None:
        """Makes steps leave the sinks out of their output.

        lse f32 (H,): receives the log of the sum of exponentials of the scores that are included.
        """
        self.state.use(lse=lse)

    def update_later(self) -> None:
        """Makes steps defer the update of their tables to ``update_tables``."""
        self._is_later = True

    def use_journal(self, journal: Journal | None) -> None:
        """Makes updates save the entries that they change to ``journal``; None: to no journal."""
        if journal is not self._journal:
            self._journal = journal
            self.state.use(journal=journal)

    def _keep(self, k_budget: int) -> None:
        """Makes room for the data that one task sets and another reads: each head's C2 and C0."""
        state = self.state
        n_head, n_words = state.n_head, state.n_entries // BLOCK + 2
        if state.n_kept >= k_budget and state.n_bit_words >= n_words:
            return
        self.pending = _pending_update(n_head, k_budget)
        state.use(
            pending=self.pending, kept_taus=np.zeros((n_head, 2)),
            kept_bits=on_lines((n_head, n_words), np.uint64),
        )  # fmt: skip

    def update_tables(self) -> None:
        """Updates the tables with the weights of the last step (eq 10)."""
        lfps_task(self.at, UPDATE)

    def mark(self) -> None:
        """Computes thresholds and candidates C0 (eq 7, 8) of the step that ``prepare`` set up."""
        lfps_task(self.at, MARK)

    def share(self, by_group: bool, a: float) -> None:
        """Sets whether the heads of a kv group score each other's candidates, and a of eq 8."""
        if (by_group, a) != self._shared:
            self._shared = by_group, a
            n_head_groups = self.state.n_kv if by_group else self.state.n_head
            rules = self._rules._replace(by_group=by_group, a=a)
            self.state.set(rules=rules, n_head_groups=n_head_groups)

    def prepare(
        self, layout: np.ndarray, n: int, k_budget: int, limit: int, n_scanned: int, is_marked: bool
    ) -> None:
        """Sets up the next step, to n rows; k_budget: |C2|; limit: most rows of C1.

        n_scanned: parts of PART rows that the scout scores; it finds one row in each. is_marked:
        whether ``mark`` has run for this step, and nothing has changed since. limit is at least the
        number of recents, which are always in C1. Otherwise thresholds would never stop rising.
        """
        state, rules = self.state, self._rules
        n_recent = max(1, min(rules.recent, k_budget // 2))  # the current row is always a candidate
        assert limit >= n_recent
        state.set(
            layout=layout, n=n, k_budget=k_budget, n_recent=n_recent, limit=limit,
            n_scanned=n_scanned, is_marked=is_marked,
        )  # fmt: skip
        if self._is_later:
            self._keep(k_budget)

    def run(self, q: np.ndarray, k: np.ndarray, v: np.ndarray, out: np.ndarray) -> None:
        """Runs a step: f32 q (H, 1, d), k (G, 1, d), v (G, 1, d_v), contiguous -> out (H, d_v)."""
        self.state.use(q=q, k=k, v=v, out=out)
        lfps_step(self.at)
