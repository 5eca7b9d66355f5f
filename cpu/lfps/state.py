"""Everything that a step of LFPS reads and writes, declared once.

H heads, of which G share keys, and T head groups: heads that score the same candidates. A head
group is a kv group, or a single head.
"""

from typing import NamedTuple

import numpy as np

from sparsekv_cli.cpu.attention.tile import PAD
from sparsekv_cli.cpu.lfps.bypass import Constants
from sparsekv_cli.cpu.lfps.history import AT_ONCE, BLOCK, SINKS, Tables
from sparsekv_cli.cpu.lfps.scout import FOUND, Codes
from sparsekv_cli.cpu.vector.declared import Size, f32, f64, i32, i64, u64, words
from sparsekv_cli.cpu.vector.fields import KernelFields, Scratch

LOCAL = 6  # keys before the current one in the local mass of the bypass test (eq 6)
# Columns of the statistics (int64, one row a head).
ROWS, SCORED, ATTENDED, TESTED, BYPASSED, HEAD_STEPS = range(6)
BOUNDS_READ, ENTRIES_READ, KEYS_READ, SCOUTING, CODES_READ = range(6, 11)
N_STATISTICS = 11
# Columns of Work.progress, each on a cache line. SEARCHED: finished searches of a head group, plus
# one when its candidates are merged. SCORES_DONE: finished parts of its scores.
SEARCHED, SCORES_DONE, N_PROGRESS = 0, 8, 16


class Rules(NamedTuple):
    """The method's options for the kernels; symbols as in the paper."""

    scale: float
    n_kv_head: int
    recent: int  # R
    a: float
    horizon: int  # most entries in the mean of the thresholds, see ``threshold``
    decay: float  # r
    epsilon: float
    filtered: bool  # whether neighbours must be above the mean (eq 9)
    by_group: bool  # whether a kv group's heads score each other's candidates
    softcap: float  # of the scores; 0 for none


class PendingUpdate(NamedTuple):
    """An update of the tables that ``update_tasks`` (lfps/attend.py) does after the step.

    The arrays have no columns if the step itself updates the tables.
    """

    rows: np.ndarray = i32("n_head", "n_kept")  # C2; n_kept >= k_budget
    weights: np.ndarray = f32("n_head", "n_kept")  # softmax weights of C2, not normalised
    sizes: np.ndarray = i64("n_head")  # |C2|; 0 for a bypassed head
    masses: np.ndarray = f64("n_head")  # the sum of the weights


class Journal(NamedTuple):
    """Old entries of an update. Without columns the update cannot be undone."""

    rows: np.ndarray = i32("n_head", "n_journal", optional=True)  # C2; n_journal >= k_budget
    # The old entries of C2 in both tables.
    entries: np.ndarray = f32(2, "n_head", "n_journal", optional=True)
    sizes: np.ndarray = i64("n_head", optional=True)  # |C2|; 0 for a bypassed head


class CandidateMarks(NamedTuple):
    """The candidates C0 of each head (eq 7, 8)."""

    taus: np.ndarray  # f64 (H, 2): thresholds of the two tables, before they are raised
    bits: np.ndarray  # uint64 (H, >= n // 64 + 2): rows above a threshold, a bit each


class LFPSState(KernelFields):
    """One layer's cache and its next step."""

    n_head: Size
    n_kv: Size
    k_width: Size
    v_width: Size
    n_entries: Size  # of a table
    n_blocks: Size  # of entries
    n_covariance: Size  # k_width, or 0 if the constants have no covariance
    n_kept: Size
    n_journal: Size
    n_bit_words: Size
    n_columns: Size  # rows that are listed; 0: none are

    n_threads: int
    thread: int  # the address of ``run_thread`` (lfps/step.py)
    n: int  # rows, with the current token's
    k_budget: int  # |C2|
    n_recent: int  # last rows of C1, always chosen: R, but at most half the budget
    limit: int  # most rows of C1
    n_scanned: int  # parts of rows that the scout scores; it finds one row in each, at most FOUND
    n_head_groups: int  # T
    is_marked: bool  # whether ``kept_taus`` and ``kept_bits`` are of this step
    layout: np.ndarray = words(8)  # of the KV store, see attention/rows.py
    rules: Rules
    codes: Codes

    q: np.ndarray = f32("n_head", 1, "k_width")
    k: np.ndarray = f32("n_kv", 1, "k_width")  # the current token's key
    v: np.ndarray = f32("n_kv", 1, "v_width")  # the current token's value
    out: np.ndarray = f32("n_head", "v_width")
    tables: Tables
    constants: Constants
    raised: np.ndarray = f64("n_head")  # factors of the thresholds
    statistics: np.ndarray = i64("n_head", N_STATISTICS)  # steps add to them
    sinks: np.ndarray = f32("n_head")  # each head's score without a value, -inf for none
    # The log of the sum of exponentials of the scores. Without it the output includes the sinks.
    lse: np.ndarray = f32("n_head", optional=True)
    attended: np.ndarray = i32("n_head", "n_columns", optional=True)  # rows, sinks first
    n_attended: np.ndarray = i64("n_head", optional=True)
    pending: PendingUpdate
    journal: Journal
    kept_taus: np.ndarray = f64("n_head", 2, optional=True)  # CandidateMarks that one task sets
    kept_bits: np.ndarray = u64("n_head", "n_bit_words", optional=True)  # and another reads


class Work(Scratch, of=LFPSState):
    """Arrays that the tasks of a step share."""

    progress: np.ndarray = i64("n_head_groups", N_PROGRESS, zeros=True)
    # Scaled queries. Later the active heads of a head group come first.
    queries: np.ndarray = f32("n_head", "k_width")
    # Capped scores of the sinks and of the local rows.
    near: np.ndarray = f32("n_head", SINKS + LOCAL + 1 + PAD)
    active: np.ndarray = i64("n_head")  # 1, or 0 for a bypassed head
    taus: np.ndarray = f64("n_head", 2)  # of CandidateMarks
    bits: np.ndarray = u64("n_head", f"n // {BLOCK} + 2")
    found: np.ndarray = i32("n_head", f"min(n_scanned, {FOUND})")  # by the scout; 0 for none
    rows: np.ndarray = i32("n_head_groups", f"limit + {AT_ONCE}")  # starts with C1, ascending
    n_rows: np.ndarray = i64("n_head_groups")  # |C1|; 0 if no head is active
    # Scores of C1 for active heads, not capped.
    scores: np.ndarray = f32("n_head_groups", "n_head // n_head_groups", f"limit + {PAD}")


class Buffers(Scratch, of=LFPSState):
    """Buffers of one thread."""

    bits: np.ndarray = u64(2, f"n // {BLOCK} + 2")
    keys: np.ndarray = i32("limit")
    chosen: np.ndarray = i32("k_budget")
    picked: np.ndarray = i32("k_budget")
    weights: np.ndarray = f32(f"k_budget + {PAD}")
    changes: np.ndarray = f32(4, "k_budget")


class StepMemory(NamedTuple):
    """The memory of a step while it runs, as a thread sees it."""

    work: Work
    marks: CandidateMarks
    own: Buffers
