"""A decode step of LFPS for a whole layer, as one compiled call.

Its arguments are int64 words, and its buffers lie in one block. Arrays made of addresses have no
reference counts, which threads would otherwise change in turn, and passing an array costs half a
microsecond.
"""

from __future__ import annotations

import numpy as np
from numba import carray, njit, prange, types
from numba.extending import intrinsic

from sparsekv_cli.cpu.attention.decode import append_row
from sparsekv_cli.cpu.attention.tile import PAD
from sparsekv_cli.cpu.jit.llvm import keep
from sparsekv_cli.cpu.jit.pointers import (
    address,
    bits_pointer,
    call_through,
    double_pointer,
    float_pointer,
    function_address,
    index_pointer,
    integer_pointer,
    on_lines,
)
from sparsekv_cli.cpu.jit.threads import PRANGE_ONLY
from sparsekv_cli.cpu.layer.decode import float_rows
from sparsekv_cli.cpu.lfps.attend import learn_tasks, mark_tasks, run_tasks
from sparsekv_cli.cpu.lfps.bypass import Constants
from sparsekv_cli.cpu.lfps.history import AT_ONCE, BLOCK, SINKS, Tables
from sparsekv_cli.cpu.lfps.scout import PART, Codes, Scout
from sparsekv_cli.cpu.lfps.search import (
    LOCAL,
    N_PROGRESS,
    N_STATISTICS,
    Lessons,
    Rules,
    Scratch,
    StepState,
    Work,
)

N_LAYOUT = 8  # words of a KV store's layout (attention/rows.py)

# Words behind the layout: what a step changes, sizes, the rules, addresses.
N, K_BUDGET, LIMIT = range(N_LAYOUT, N_LAYOUT + 3)
N_HEAD, K_WIDTH, V_WIDTH, N_ENTRIES, N_BLOCKS, N_COVARIANCE, N_THREADS = range(11, 18)
# In the order of Rules:
SCALE, N_HEAD_KV, RECENT, A, HORIZON, DECAY, EPSILON, FILTERED, BY_GROUP, SOFTCAP = range(18, 28)
VER, DIST, VER_BOUNDS, DIST_BOUNDS, SUMS, GAIN = range(28, 34)  # in the order of Tables
MEAN_K, MEAN_V, COVARIANCE, RATIO = range(34, 38)  # in the order of Constants
RAISED, STATISTICS, TRACE, N_COLUMNS, N_ATTENDED, LSE, OF_THREAD, OF_SINKS = range(38, 46)
C2_ROWS, C2_WEIGHTS, C2_SIZES, C2_MASSES, TAUS, BITS = range(46, 52)  # kept between the tasks
N_KEPT, N_BIT_WORDS, IS_MARKED = range(52, 55)
CODES, CODES_HEAD, N_PARTS, DIRECTIONS, N_CODES = range(55, 60)  # in the order of Codes
N_FOUND = 60
N_WORDS = 61
STEP, LEARN, MARK = range(3)  # what threads do


@njit(cache=True, nogil=True)
def _lines(n_bytes):
    return (n_bytes + 63) & -64


@njit(cache=True, nogil=True)
def _work(at, n_head, d, n_team, n, limit, n_found):
    """A step's Work at an address, and the address behind it."""
    n_near, stride, n_words = SINKS + LOCAL + 1 + PAD, limit + PAD, n // BLOCK + 2
    progress = carray(integer_pointer(at), (n_team, N_PROGRESS))
    at += _lines(8 * n_team * N_PROGRESS)
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
    rows = carray(index_pointer(at), (n_team, limit + AT_ONCE))
    at += _lines(4 * n_team * (limit + AT_ONCE))
    n_rows = carray(integer_pointer(at), n_team)
    at += _lines(8 * n_team)
    scores = carray(float_pointer(at), (n_team, n_head // n_team, stride))
    at += _lines(4 * n_head * stride)
    return Work(queries, near, active, taus, bits, found, rows, n_rows, scores, progress), at


@njit(cache=True, nogil=True)
def _scratch(at, n, k_budget, limit):
    """A thread's Scratch at an address, and the address behind it."""
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
def _run_thread(thread, words, task, q, out, counter, at):
    """What a thread does in a task; addresses, ``at`` of the block behind the counter."""
    word = carray(integer_pointer(words), N_WORDS)
    real = carray(double_pointer(words), N_WORDS)
    n, k_budget, limit = word[N], word[K_BUDGET], word[LIMIT]
    n_head, n_kv = word[N_HEAD], word[N_HEAD_KV]
    k_width, v_width, size = word[K_WIDTH], word[V_WIDTH], word[N_COVARIANCE]
    rules = Rules(
        real[SCALE], n_kv, word[RECENT], real[A], word[HORIZON], real[DECAY], real[EPSILON],
        word[FILTERED] != 0, word[BY_GROUP] != 0, real[SOFTCAP],
    )  # fmt: skip
    entries, blocks = (n_head, word[N_ENTRIES]), (n_head, word[N_BLOCKS])
    tables = Tables(
        carray(float_pointer(word[VER]), entries),
        carray(float_pointer(word[DIST]), entries),
        carray(float_pointer(word[VER_BOUNDS]), blocks),
        carray(float_pointer(word[DIST_BOUNDS]), blocks),
        carray(double_pointer(word[SUMS]), (n_head, 2, 4)),
        carray(double_pointer(word[GAIN]), n_head),
    )
    constants = Constants(
        carray(float_pointer(word[MEAN_K]), (n_kv, k_width)),
        carray(float_pointer(word[MEAN_V]), (n_kv, v_width)),
        carray(float_pointer(word[COVARIANCE]), (n_kv, size, size)),
        carray(float_pointer(word[RATIO]), n_head),
    )
    n_team = n_kv if rules.by_group else n_head
    work, at = _work(at, n_head, k_width, n_team, n, limit, word[N_FOUND])
    n_kept = word[N_KEPT]
    lessons = Lessons(
        carray(index_pointer(word[C2_ROWS]), (n_head, n_kept)),
        carray(float_pointer(word[C2_WEIGHTS]), (n_head, n_kept)),
        carray(integer_pointer(word[C2_SIZES]), n_head),
        carray(double_pointer(word[C2_MASSES]), n_head),
    )
    if n_kept:
        taus = carray(double_pointer(word[TAUS]), (n_head, 2))
        bits = carray(bits_pointer(word[BITS]), (n_head, word[N_BIT_WORDS]))
        work = Work(
            work.queries, work.near, work.active, taus, bits, work.found, work.rows, work.n_rows,
            work.scores, work.progress,
        )  # fmt: skip
    codes = Codes(word[CODES], word[CODES_HEAD], word[N_PARTS], word[DIRECTIONS], word[N_CODES])
    scratch, _ = _scratch(at + thread * _scratch(0, n, k_budget, limit)[1], n, k_budget, limit)
    step = StepState(
        carray(float_pointer(q), (n_head, k_width)), word[:N_LAYOUT], n, k_budget,
        max(1, min(rules.recent, k_budget // 2)),  # the current row is always a candidate
        limit, rules, tables, carray(double_pointer(word[RAISED]), n_head), constants,
        carray(integer_pointer(word[STATISTICS]), (n_head, N_STATISTICS)),
        carray(index_pointer(word[TRACE]), (n_head, word[N_COLUMNS])),
        carray(integer_pointer(word[N_ATTENDED]), n_head),
        carray(float_pointer(word[LSE]), n_head if word[LSE] else 0),
        carray(float_pointer(word[OF_SINKS]), n_head),
        carray(float_pointer(out), (n_head, v_width)), work, lessons, codes, word[IS_MARKED] != 0,
        scratch,
    )  # fmt: skip
    tasks = carray(integer_pointer(counter), 1)
    if task == STEP:
        run_tasks(tasks, word[N_THREADS], step)
    elif task == LEARN:
        learn_tasks(tasks, step)
    else:
        mark_tasks(tasks, step)


@intrinsic
def _call_thread(typingctx, function, thread, words, task, q, out, counter, at):
    """Calls ``_run_thread`` through its address, so that it is optimised once, outside the loop."""
    return call_through(7)


@njit(cache=True, nogil=True, parallel=PRANGE_ONLY)
def _run_threads(function, n_threads, words, task, q, out, counter, at):
    for thread in prange(n_threads):
        _call_thread(function, thread, words, task, q, out, counter, at)


@njit(cache=True, nogil=True)
def _run_task(words, task, q, out):
    """A task of all threads, in a block of memory for what they pass on."""
    word = carray(integer_pointer(words), N_WORDS)
    n_head, n_kv, n, limit = word[N_HEAD], word[N_HEAD_KV], word[N], word[LIMIT]
    n_threads = word[N_THREADS]
    n_team = n_kv if word[BY_GROUP] else n_head
    shared = _work(0, n_head, word[K_WIDTH], n_team, n, limit, word[N_FOUND])[1]
    of_thread = _scratch(0, n, word[K_BUDGET], limit)[1]
    block = np.empty((2 * 64 + shared + n_threads * of_thread) // 8, np.int64)
    counter = block.ctypes.data + -block.ctypes.data % 64
    carray(integer_pointer(counter), 8 + n_team * N_PROGRESS)[:] = 0  # progress comes first
    _run_threads(word[OF_THREAD], n_threads, words, task, q, out, counter, counter + 64)
    keep(block)


@njit(cache=True, nogil=True)
def lfps_step(words, q, k, v, out):
    """One decode step of a layer (Algorithm 1): stores the current token as row n - 1, and attends.

    Addresses: of the words of an LFPSStep, of q f32 (H, d), k (G, d), v (G, d_v), out f32 (H, d_v).
    """
    word = carray(integer_pointer(words), N_WORDS)
    n_kv, k_width, n = word[N_HEAD_KV], word[K_WIDTH], word[N]
    append_row(
        float_rows(k, n_kv, k_width), float_rows(v, n_kv, word[V_WIDTH]), word[:N_LAYOUT], n - 1
    )
    _run_task(words, STEP, q, out)


@njit(cache=True, nogil=True)
def lfps_learn(words, task):
    """What a step has left to do, LEARN, or part of the next one, MARK. words: its address."""
    _run_task(words, task, 0, 0)


class LFPSStep:
    """The step of one layer's LFPS cache, which finds its arrays by address.

    constants: lfps/bypass.py. sinks f32 (H,): of each head a score without a value, or empty.
    raised f64 (H,): factors by which the thresholds are raised. statistics int64 (H, N_STATISTICS),
    added to. The caller keeps these and all arguments of the methods alive. It calls ``use_tables``
    first, and again for new tables.
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
        self.words = words = np.zeros(N_WORDS, np.int64)
        words[N_HEAD], words[N_THREADS] = len(raised), n_threads
        words[K_WIDTH], words[V_WIDTH] = constants.mean_k.shape[1], constants.mean_v.shape[1]
        words[N_COVARIANCE] = constants.covariance.shape[1]
        for at, value in zip(range(SCALE, SOFTCAP + 1), rules, strict=True):
            is_real = at in (SCALE, A, DECAY, EPSILON, SOFTCAP)
            words.view(np.float64 if is_real else np.int64)[at] = value
        words[MEAN_K : RATIO + 1] = [address(array) for array in constants]
        words[RAISED], words[STATISTICS] = address(raised), address(statistics)
        self._sinks = np.full(len(raised), -np.inf, np.float32)
        self._sinks[: len(sinks)] = sinks
        words[OF_SINKS] = address(self._sinks)

    def use_tables(self, tables: Tables) -> None:
        self.words[VER : GAIN + 1] = [address(array) for array in tables]
        self.words[N_ENTRIES], self.words[N_BLOCKS] = (
            tables.ver.shape[1],
            tables.ver_bounds.shape[1],
        )

    def use_scout(self, scout: Scout, n_rows: int) -> None:
        """From now on steps look at the codes of up to n_rows rows; again for new codes."""
        words, codes = self.words, scout.known()
        words[CODES : N_CODES + 1] = codes
        words[N_FOUND] = -(-n_rows // PART)

    def trace(self, attended: np.ndarray, counts: np.ndarray) -> None:
        """Until ``untrace``, steps list the rows that each head attended to, sinks first.

        attended int32 (H, m), of which the first counts int64 (H,) are filled.
        """
        self.words[TRACE], self.words[N_COLUMNS] = address(attended), attended.shape[1]
        self.words[N_ATTENDED] = address(counts)

    def untrace(self) -> None:
        self.words[N_COLUMNS] = 0

    def leave_sinks(self, lse: np.ndarray) -> None:
        """From now on steps leave the sinks out of their output.

        lse f32 (H,): receives the log of the sum of exponentials of the scores that are included.
        """
        self.words[LSE] = address(lse)

    def learn_later(self) -> None:
        """From now on a step leaves the update of its tables to ``learn``."""
        self.words[N_KEPT] = 1

    def _keep(self, k_budget: int) -> None:
        """Makes room for what is kept between the tasks: |C2| rows a head, and its C0."""
        words, n_head = self.words, int(self.words[N_HEAD])
        n_words = int(words[N_ENTRIES]) // BLOCK + 2
        if words[N_KEPT] >= k_budget and words[N_BIT_WORDS] >= n_words:
            return
        self._kept = (
            on_lines((n_head, k_budget), np.int32), on_lines((n_head, k_budget), np.float32),
            np.zeros(n_head, np.int64), np.zeros(n_head), np.zeros((n_head, 2)),
            on_lines((n_head, n_words), np.uint64),
        )  # fmt: skip
        words[C2_ROWS : BITS + 1] = [address(array) for array in self._kept]
        words[N_KEPT], words[N_BIT_WORDS] = k_budget, n_words

    def learn(self) -> None:
        """The update of the tables by the last step (eq 10)."""
        lfps_learn(address(self.words), LEARN)

    def mark(self) -> None:
        """Thresholds and candidates C0 (eq 7, 8) of the step that ``at`` has set up."""
        lfps_learn(address(self.words), MARK)

    def share(self, by_group: bool, a: float) -> None:
        """Sets whether the heads of a kv group score each other's candidates, and a of eq 8."""
        self.words[BY_GROUP], self.words.view(np.float64)[A] = by_group, a

    def at(
        self, layout: np.ndarray, n: int, k_budget: int, limit: int, *, is_marked: bool = False
    ) -> None:
        """Sets up the next step, to n rows; k_budget: |C2|; limit: most rows of C1.

        is_marked: whether ``mark`` has run for a step like this, and nothing changed since.
        limit is at least the number of recents, which always are in C1; otherwise thresholds would
        rise for ever.
        """
        words = self.words
        assert limit >= max(1, min(int(words[RECENT]), k_budget // 2))
        if not words[OF_THREAD]:
            words[OF_THREAD] = function_address(_run_thread, (types.int64,) * 7)
        words[:N_LAYOUT] = layout
        words[N], words[K_BUDGET], words[LIMIT] = n, k_budget, limit
        words[IS_MARKED] = is_marked
        if words[N_KEPT]:
            self._keep(k_budget)

    def run(self, q: np.ndarray, k: np.ndarray, v: np.ndarray, out: np.ndarray) -> None:
        """The step: f32 q (H, 1, d), k (G, 1, d), v (G, 1, d_v), contiguous -> out (H, d_v)."""
        assert q.flags.c_contiguous and k.flags.c_contiguous and v.flags.c_contiguous
        lfps_step(address(self.words), address(q), address(k), address(v), address(out))
