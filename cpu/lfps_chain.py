"""``lfps_step`` as compiled code of a chain of layers (chain.py): the words it reads, and from them
the arrays that Python would have handed over.
"""

from __future__ import annotations

import numpy as np
from numba import carray, njit

from sparsekv_cli.cpu.addresses import address, double_pointer, float_pointer, integer_pointer
from sparsekv_cli.cpu.bypass import Constants
from sparsekv_cli.cpu.chain import N_LAYOUT, CompiledStep
from sparsekv_cli.cpu.history import Tables
from sparsekv_cli.cpu.lfps import N_STATISTICS, Rules, lfps_step

# Words behind the layout: what a step changes, sizes (C: entries of a table, B: its blocks, E:
# width of the covariance), the rules, addresses.
N, K_BUDGET, LIMIT = range(N_LAYOUT, N_LAYOUT + 3)
N_HEAD, N_UNIT, K_WIDTH, V_WIDTH, N_ENTRIES, N_BLOCKS, N_COVARIANCE, N_THREADS = range(11, 19)
SCALE, N_HEAD_KV, RECENT, A, HORIZON, DECAY, EPSILON, FILTERED = range(19, 27)  # as in Rules
VER, DIST, VER_BOUNDS, DIST_BOUNDS, SUMS, GAIN = range(27, 33)  # in the order of Tables
MEAN_K, MEAN_V, COVARIANCE, RATIO = range(33, 37)  # in the order of Constants
RAISED, STATISTICS = 37, 38
N_WORDS = 39


@njit(cache=True, nogil=True)
def _compiled_step(words, q, k, v, out):
    word = carray(integer_pointer(words), N_WORDS)
    real = carray(double_pointer(words), N_WORDS)
    n_head, n_unit, n_kv = word[N_HEAD], word[N_UNIT], word[N_HEAD_KV]
    k_width, v_width, size = word[K_WIDTH], word[V_WIDTH], word[N_COVARIANCE]
    rules = Rules(
        real[SCALE], n_kv, word[RECENT], real[A], word[HORIZON], real[DECAY], real[EPSILON],
        word[FILTERED] != 0,
    )  # fmt: skip
    entries, blocks = (n_unit, word[N_ENTRIES]), (n_unit, word[N_BLOCKS])
    tables = Tables(
        carray(float_pointer(word[VER]), entries),
        carray(float_pointer(word[DIST]), entries),
        carray(float_pointer(word[VER_BOUNDS]), blocks),
        carray(float_pointer(word[DIST_BOUNDS]), blocks),
        carray(double_pointer(word[SUMS]), (n_unit, 2, 4)),
        carray(double_pointer(word[GAIN]), n_unit),
    )
    constants = Constants(
        carray(float_pointer(word[MEAN_K]), (n_kv, k_width)),
        carray(float_pointer(word[MEAN_V]), (n_kv, v_width)),
        carray(float_pointer(word[COVARIANCE]), (n_kv, size, size)),
        carray(float_pointer(word[RATIO]), n_head),
    )
    lfps_step(
        carray(float_pointer(q), (n_head, 1, k_width)),
        carray(float_pointer(k), (n_kv, 1, k_width)),
        carray(float_pointer(v), (n_kv, 1, v_width)),
        word[:N_LAYOUT], word[N], word[K_BUDGET], word[LIMIT], rules, tables,
        carray(double_pointer(word[RAISED]), n_unit), constants,
        carray(integer_pointer(word[STATISTICS]), (n_unit, N_STATISTICS)),
        np.empty((n_head, 0), np.int32), np.empty(n_head, np.int64), np.empty(0, np.float32),
        carray(float_pointer(out), (n_head, v_width)), word[N_THREADS],
    )  # fmt: skip


class LFPSStep(CompiledStep):
    """A step of an LFPS cache of one layer, whose arrays it looks up by address.

    The caller keeps them alive, and calls ``use_tables`` when it has new ones.
    """

    def __init__(
        self,
        n_head: int,
        rules: Rules,
        constants: Constants,
        raised: np.ndarray,
        statistics: np.ndarray,
        n_threads: int,
    ) -> None:
        super().__init__(_compiled_step, N_WORDS)
        words = self.words
        words[N_HEAD], words[N_UNIT], words[N_THREADS] = n_head, len(raised), n_threads
        words[K_WIDTH], words[V_WIDTH] = constants.mean_k.shape[1], constants.mean_v.shape[1]
        words[N_COVARIANCE] = constants.covariance.shape[1]
        for at, value in zip(range(SCALE, FILTERED + 1), rules, strict=True):
            words.view(np.float64 if isinstance(value, float) else np.int64)[at] = value
        words[MEAN_K : RATIO + 1] = [address(array) for array in constants]
        words[RAISED], words[STATISTICS] = address(raised), address(statistics)

    def use_tables(self, tables: Tables) -> None:
        self.words[VER : GAIN + 1] = [address(array) for array in tables]
        self.words[N_ENTRIES], self.words[N_BLOCKS] = (
            tables.ver.shape[1],
            tables.ver_bounds.shape[1],
        )

    def at(self, layout: np.ndarray, n: int, k_budget: int, limit: int) -> tuple[int, int]:
        """``step`` to n rows; arguments as in ``lfps_step``."""
        words = self.words
        words[:N_LAYOUT] = layout
        words[N], words[K_BUDGET], words[LIMIT] = n, k_budget, limit
        return self.step
