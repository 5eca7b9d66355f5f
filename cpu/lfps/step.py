"""A decode step of LFPS for a whole layer, as one compiled call.

The arguments are a record of ``LFPS`` and addresses, because an array as an argument costs half a
microsecond. All buffers lie in one block. Arrays that are made from addresses have no reference
counts, for which threads would wait.
"""

from typing import get_type_hints

import numpy as np
from numba import carray, njit, prange, types
from numba.extending import intrinsic

from sparsekv_cli.cpu.attention.decode import append_row
from sparsekv_cli.cpu.attention.tile import PAD
from sparsekv_cli.cpu.jit.llvm import keep
from sparsekv_cli.cpu.jit.pointers import (
    address,
    addresses_of,
    bits_pointer,
    call_through,
    double_pointer,
    float_pointer,
    function_address,
    index_pointer,
    integer_pointer,
    on_lines,
    record_at,
)
from sparsekv_cli.cpu.jit.threads import PRANGE_ONLY
from sparsekv_cli.cpu.layer.decode import float_rows
from sparsekv_cli.cpu.lfps.attend import mark_tasks, run_tasks, update_tasks
from sparsekv_cli.cpu.lfps.bypass import Constants
from sparsekv_cli.cpu.lfps.history import AT_ONCE, BLOCK, SINKS, Tables
from sparsekv_cli.cpu.lfps.scout import Codes, Scout
from sparsekv_cli.cpu.lfps.search import (
    LOCAL,
    N_PROGRESS,
    N_STATISTICS,
    Journal,
    PendingUpdate,
    Rules,
    Scratch,
    StepState,
    Work,
)

N_LAYOUT = 8  # columns of a KV store's layout (attention/rows.py)
STEP, UPDATE, MARK = range(3)  # the tasks of ``_run_thread``


def _fields(names: tuple[str, ...]) -> np.dtype:
    """Returns a record of int64 fields."""
    return np.dtype([(name, np.int64) for name in names])


_NUMBERS = {float: np.float64, int: np.int64, bool: np.int64}
RULES = np.dtype([(name, _NUMBERS[kind]) for name, kind in get_type_hints(Rules).items()])
# The arguments of a step of one layer's cache: sizes, rules, and addresses of contiguous arrays. H:
# heads, G: kv heads.
LFPS = np.dtype(
    [
        ("layout", np.int64, N_LAYOUT),  # of the KV store
        ("rules", RULES),
        ("tables", _fields(Tables._fields)),  # addresses
        ("constants", _fields(Constants._fields)),  # addresses
        ("pending", _fields(PendingUpdate._fields)),  # addresses; one task sets, another reads it
        ("journal", _fields(Journal._fields)),  # addresses
        ("codes", _fields(Codes._fields)),
        *(
            (name, np.int64)
            for name in (
                *("n", "k_budget", "limit"),  # of this step: see StepState
                "is_marked",
                *("n_head", "k_width", "v_width"),
                "n_threads",
                *("n_entries", "n_blocks"),  # columns of the tables and of their bounds
                "n_covariance",  # d, or 0 if the constants have no covariance
                "n_found",  # most rows that the scout finds for a head
                "raised",  # f64 (H,)
                "statistics",  # int64 (H, N_STATISTICS)
                "trace",  # int32 (H, n_columns): rows attended
                "n_columns",  # 0: rows are not listed
                "n_attended",  # int64 (H,)
                "lse",  # f32 (H,); address 0: the output includes the sinks
                "sinks",  # f32 (H,)
                "taus",  # f64 (H, 2); kept between the tasks
                "bits",  # uint64 (H, n_bit_words); kept between the tasks
                "n_kept",  # columns of ``pending``; 0: a step updates the tables itself
                "n_journal",  # columns of ``journal``; 0: there is no journal
                "n_bit_words",
                "thread",  # the address of ``_run_thread``
            )
        ),
    ]
)
_record = record_at(LFPS)


@njit(cache=True, nogil=True)
def _lines(n_bytes):
    return (n_bytes + 63) & -64


@njit(cache=True, nogil=True)
def _work(at, n_head, d, n_head_groups, n, limit, n_found):
    """Returns a step's Work at an address, and the address after it."""
    n_near, stride, n_words = SINKS + LOCAL + 1 + PAD, limit + PAD, n // BLOCK + 2
    progress = carray(integer_pointer(at), (n_head_groups, N_PROGRESS))
    at += _lines(8 * n_head_groups * N_PROGRESS)
    queries = carray(float_pointer(at), (n_head, d))
    at += _lines(4 * n_head * d)
    near = carray(float_pointer(at), (n_head, n_near))
    at += _lines(4 * n_head * n_near)
    active = carray(integer_pointer(at), n_head)
    at += _lines(8 * n_head)
    taus = carray(double_pointer(at), (n_head, 2))
    at += _lines(16 * n_head)
    bits = carray(bits_pointer(at), (n_head, n_words))
    at += _lines(8 * n_head * n_words)
    found = carray(index_pointer(at), (n_head, n_found))
    at += _lines(4 * n_head * n_found)
    rows = carray(index_pointer(at), (n_head_groups, limit + AT_ONCE))
    at += _lines(4 * n_head_groups * (limit + AT_ONCE))
    n_rows = carray(integer_pointer(at), n_head_groups)
    at += _lines(8 * n_head_groups)
    scores = carray(float_pointer(at), (n_head_groups, n_head // n_head_groups, stride))
    at += _lines(4 * n_head * stride)
    return Work(queries, near, active, taus, bits, found, rows, n_rows, scores, progress), at


@njit(cache=True, nogil=True)
def _scratch(at, n, k_budget, limit):
    """Returns a thread's Scratch at an address, and the address after it."""
    n_words = n // BLOCK + 2
    bits = carray(bits_pointer(at), (2, n_words))
    at += _lines(16 * n_words)
    keys = carray(index_pointer(at), limit)
    at += _lines(4 * limit)
    chosen = carray(index_pointer(at), k_budget)
    at += _lines(4 * k_budget)
    picked = carray(index_pointer(at), k_budget)
    at += _lines(4 * k_budget)
    weights = carray(float_pointer(at), k_budget + PAD)
    at += _lines(4 * (k_budget + PAD))
    changes = carray(float_pointer(at), (4, k_budget))
    at += _lines(16 * k_budget)
    return Scratch(bits, keys, chosen, picked, weights, changes), at


@njit(cache=True, nogil=True)
def _run_thread(thread, step_at, task, q, out, counter, at):
    """Runs a thread's part of a task. Arguments are addresses; at: of the block after counter."""
    this = _record(step_at)
    n, k_budget, limit, rules = this.n, this.k_budget, this.limit, this.rules
    n_head, n_kv = this.n_head, rules.n_kv_head
    k_width, v_width, size = this.k_width, this.v_width, this.n_covariance
    entries, blocks = (n_head, this.n_entries), (n_head, this.n_blocks)
    tables = Tables(
        carray(float_pointer(this.tables.ver), entries),
        carray(float_pointer(this.tables.dist), entries),
        carray(float_pointer(this.tables.ver_bounds), blocks),
        carray(float_pointer(this.tables.dist_bounds), blocks),
        carray(double_pointer(this.tables.sums), (n_head, 2, 4)),
        carray(double_pointer(this.tables.gain), n_head),
    )
    constants = Constants(
        carray(float_pointer(this.constants.mean_k), (n_kv, k_width)),
        carray(float_pointer(this.constants.mean_v), (n_kv, v_width)),
        carray(float_pointer(this.constants.covariance), (n_kv, size, size)),
        carray(float_pointer(this.constants.ratio), n_head),
    )
    n_head_groups = n_kv if rules.by_group else n_head
    work, at = _work(at, n_head, k_width, n_head_groups, n, limit, this.n_found)
    n_kept = this.n_kept
    pending = PendingUpdate(
        carray(index_pointer(this.pending.rows), (n_head, n_kept)),
        carray(float_pointer(this.pending.weights), (n_head, n_kept)),
        carray(integer_pointer(this.pending.sizes), n_head),
        carray(double_pointer(this.pending.masses), n_head),
    )
    n_journal = this.n_journal
    journal = Journal(
        carray(index_pointer(this.journal.rows), (n_head, n_journal)),
        carray(float_pointer(this.journal.entries), (2, n_head, n_journal)),
        carray(integer_pointer(this.journal.sizes), n_head),
    )
    if n_kept:
        taus = carray(double_pointer(this.taus), (n_head, 2))
        bits = carray(bits_pointer(this.bits), (n_head, this.n_bit_words))
        work = Work(
            work.queries, work.near, work.active, taus, bits, work.found, work.rows, work.n_rows,
            work.scores, work.progress,
        )  # fmt: skip
    scratch, _ = _scratch(at + thread * _scratch(0, n, k_budget, limit)[1], n, k_budget, limit)
    step = StepState(
        carray(float_pointer(q), (n_head, k_width)), this.layout[:], n, k_budget,
        max(1, min(rules.recent, k_budget // 2)),  # the current row is always a candidate
        limit, rules, tables, carray(double_pointer(this.raised), n_head), constants,
        carray(integer_pointer(this.statistics), (n_head, N_STATISTICS)),
        carray(index_pointer(this.trace), (n_head, this.n_columns)),
        carray(integer_pointer(this.n_attended), n_head),
        carray(float_pointer(this.lse), n_head if this.lse else 0),
        carray(float_pointer(this.sinks), n_head),
        carray(float_pointer(out), (n_head, v_width)), work, pending, journal, this.codes,
        this.is_marked != 0, scratch,
    )  # fmt: skip
    tasks = carray(integer_pointer(counter), 1)
    if task == STEP:
        run_tasks(tasks, this.n_threads, step)
    elif task == UPDATE:
        update_tasks(tasks, step)
    else:
        mark_tasks(tasks, step)


@intrinsic
def _call_thread(typingctx, function, thread, step_at, task, q, out, counter, at):
    """Calls ``_run_thread`` through its address, so that it is optimised once, outside the loop."""
    return call_through(7)


@njit(cache=True, nogil=True, parallel=PRANGE_ONLY)
def _run_threads(function, n_threads, step_at, task, q, out, counter, at):
    for thread in prange(n_threads):
        _call_thread(function, thread, step_at, task, q, out, counter, at)


@njit(cache=True, nogil=True)
def _run_task(step_at, task, q, out):
    """Runs a task on all threads. They exchange results in one block of memory."""
    this = _record(step_at)
    n_head, n, limit, n_threads = this.n_head, this.n, this.limit, this.n_threads
    n_head_groups = this.rules.n_kv_head if this.rules.by_group else n_head
    shared = _work(0, n_head, this.k_width, n_head_groups, n, limit, this.n_found)[1]
    of_thread = _scratch(0, n, this.k_budget, limit)[1]
    block = np.empty((2 * 64 + shared + n_threads * of_thread) // 8, np.int64)
    counter = block.ctypes.data + -block.ctypes.data % 64
    carray(integer_pointer(counter), 8 + n_head_groups * N_PROGRESS)[:] = 0  # progress comes first
    _run_threads(this.thread, n_threads, step_at, task, q, out, counter, counter + 64)
    keep(block)


@njit(cache=True, nogil=True)
def lfps_step(step_at, q, k, v, out):
    """Runs a layer's decode step (Algorithm 1): stores the current token as row n - 1, attends.

    Arguments are addresses: of a record of LFPS, q f32 (H, d), k (G, d), v (G, d_v), out (H, d_v).
    """
    this = _record(step_at)
    n_kv = this.rules.n_kv_head
    append_row(
        float_rows(k, n_kv, this.k_width), float_rows(v, n_kv, this.v_width), this.layout[:],
        this.n - 1,
    )  # fmt: skip
    _run_task(step_at, STEP, q, out)


@njit(cache=True, nogil=True)
def lfps_task(step_at, task):
    """Runs UPDATE, the rest of a step, or MARK, a part of the next one. step_at: see lfps_step."""
    _run_task(step_at, task, 0, 0)


def _pending_update(n_head: int, n: int) -> PendingUpdate:
    """Returns a PendingUpdate with room for n rows a head."""
    rows, weights = (on_lines((n_head, n), each, zeros=True) for each in (np.int32, np.float32))
    return PendingUpdate(rows, weights, np.zeros(n_head, np.int64), np.zeros(n_head))


class LFPSStep:
    """Runs the steps of one layer's LFPS cache. The caller keeps all arguments alive.

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
        self.record = record = np.zeros((), LFPS)
        self._rules, self._recent = record["rules"], rules.recent
        self._at = address(record)  # cached, because numpy describes all fields each time
        record["n_head"], record["n_threads"] = len(raised), n_threads
        record["k_width"] = constants.mean_k.shape[1]
        record["v_width"] = constants.mean_v.shape[1]
        record["n_covariance"] = constants.covariance.shape[1]
        record["rules"], record["constants"] = tuple(rules), addresses_of(constants)
        record["raised"], record["statistics"] = address(raised), address(statistics)
        self._sinks = np.full(len(raised), -np.inf, np.float32)
        self._sinks[: len(sinks)] = sinks
        record["sinks"] = address(self._sinks)
        self.pending = _pending_update(len(raised), 0)  # of the last step that deferred its update

    def use_tables(self, tables: Tables) -> None:
        record = self.record
        record["tables"] = addresses_of(tables)
        record["n_entries"] = tables.ver.shape[1]
        record["n_blocks"] = tables.ver_bounds.shape[1]

    def use_scout(self, scout: Scout) -> None:
        """Sets the codes. Call it again for new codes."""
        self.record["codes"] = tuple(scout.known())

    def trace(self, attended: np.ndarray, counts: np.ndarray) -> None:
        """Makes steps list the rows that each head attended to, sinks first, until ``untrace``.

        attended int32 (H, m): the first counts[h] columns are set. counts int64 (H,).
        """
        record = self.record
        record["trace"], record["n_columns"] = address(attended), attended.shape[1]
        record["n_attended"] = address(counts)

    def untrace(self) -> None:
        self.record["n_columns"] = 0

    def exclude_sinks(self, lse: np.ndarray) -> None:
        """Makes steps leave the sinks out of their output.

        lse f32 (H,): receives the log of the sum of exponentials of the scores that are included.
        """
        self.record["lse"] = address(lse)

    def update_later(self, later: bool) -> None:
        """Sets whether steps defer the update of their tables to ``update_tables``."""
        n_kept = self.pending.rows.shape[1]
        self.record["n_kept"] = max(1, n_kept) if later else 0

    def use_journal(self, journal: Journal | None) -> None:
        """Makes updates save the entries that they change to ``journal``; None: to no journal."""
        record, self._journal = self.record, journal
        record["n_journal"] = 0 if journal is None else journal.rows.shape[1]
        if journal is not None:
            record["journal"] = addresses_of(journal)

    def _keep(self, k_budget: int) -> None:
        """Makes room for the data that one task sets and another reads: each head's C2 and C0."""
        record, n_head = self.record, int(self.record["n_head"])
        n_words = int(record["n_entries"]) // BLOCK + 2
        if record["n_kept"] >= k_budget and record["n_bit_words"] >= n_words:
            return
        self.pending = _pending_update(n_head, k_budget)
        self._taus, self._bits = np.zeros((n_head, 2)), on_lines((n_head, n_words), np.uint64)
        record["pending"] = addresses_of(self.pending)
        record["taus"], record["bits"] = address(self._taus), address(self._bits)
        record["n_kept"], record["n_bit_words"] = k_budget, n_words

    def update_tables(self) -> None:
        """Updates the tables with the weights of the last step (eq 10)."""
        lfps_task(self._at, UPDATE)

    def mark(self) -> None:
        """Computes thresholds and candidates C0 (eq 7, 8) of the step that ``at`` has set up."""
        lfps_task(self._at, MARK)

    def share(self, by_group: bool, a: float) -> None:
        """Sets whether the heads of a kv group score each other's candidates, and a of eq 8."""
        self._rules["by_group"], self._rules["a"] = by_group, a

    def at(
        self, layout: np.ndarray, n: int, k_budget: int, limit: int, n_found: int, is_marked: bool
    ) -> None:
        """Sets up the next step, to n rows; k_budget: |C2|; limit: most rows of C1.

        n_found: most rows that the scout finds for a head, each among PART rows. is_marked: whether
        ``mark`` has run for this step, and nothing has changed since. limit is at least the number
        of recents, which are always in C1. Otherwise thresholds would never stop rising.
        """
        record = self.record
        assert limit >= max(1, min(self._recent, k_budget // 2))
        if not record["thread"]:
            record["thread"] = function_address(_run_thread, (types.int64,) * 7)
        record["layout"] = layout
        record["n"], record["k_budget"], record["limit"] = n, k_budget, limit
        record["n_found"] = n_found
        record["is_marked"] = is_marked
        if record["n_kept"]:
            self._keep(k_budget)

    def run(self, q: np.ndarray, k: np.ndarray, v: np.ndarray, out: np.ndarray) -> None:
        """Runs a step: f32 q (H, 1, d), k (G, 1, d), v (G, 1, d_v), contiguous -> out (H, d_v)."""
        assert q.flags.c_contiguous and k.flags.c_contiguous and v.flags.c_contiguous
        lfps_step(self._at, address(q), address(k), address(v), address(out))
