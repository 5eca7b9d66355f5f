"""H2O and its naive form: sums, what is dropped, decode, further turns; memory, the ledger."""

import numpy as np
import pytest
from layer_rows import GEOMETRIES, Geometry, Rows
from layer_stream import attended_rows, decode, prefill
from naive_pair import Pair
from sweeps import sweep

from sparsekv_cli.cache.spec import N_SINKS, Budget
from sparsekv_cli.methods.h2o import H2O

PLAIN = Geometry(6, 2, 64)


class H2OPair(Pair):
    """Also holds against each other what rows are left, and the attention that they received."""

    def prefill(self, n: int, chunk: int = 64) -> Rows:
        rows = super().prefill(n, chunk)
        self.compare_sums()
        return rows

    def compare_sums(self) -> None:
        cache, naive, n, d = self.cache, self.naive, self.cache.store.n, self.geometry.d
        for g, positions in enumerate(cache.positions()):
            assert set(positions.tolist()) == set(naive.held[g].tolist())
            expected = naive.f[g, positions]
            np.testing.assert_allclose(cache._mass[g, :n], expected, rtol=2e-5, atol=1e-6)
            np.testing.assert_array_equal(cache.store.k[g, :n, :d], naive.k[g, positions])
            np.testing.assert_array_equal(cache.store.v[g, :n, :d], naive.v[g, positions])


def start(geometry: Geometry = PLAIN, n_threads: int = 1, **options) -> H2OPair:
    return H2OPair(H2O(**({"budget": Budget(tokens=40)} | options)), geometry, 0, n_threads)


@pytest.mark.parametrize("geometry", sweep(GEOMETRIES, fast=1), ids=str)
@pytest.mark.parametrize("options", [{}, {"window": 16}], ids=str)
def test_sums_and_rows_over_three_turns(geometry, options):
    """A prompt, a generation longer than it, and two more turns."""
    pair = start(geometry, **options)
    for n_new, n_steps in ((250, 300), (1, 30), (90, 30)):
        pair.prefill(n_new)
        assert pair.decode(n_steps)["ties"] <= 3
        pair.compare_sums()
        assert pair.cache.store.n == 43


@pytest.mark.parametrize("n_prompt", [1, 5, 42, 43, 44, 45])
@pytest.mark.parametrize("n_threads", [1, 2])
def test_around_the_first_row_that_is_too_many(n_prompt, n_threads):
    pair = start(n_threads=n_threads)
    pair.prefill(n_prompt)
    pair.decode(60)
    assert pair.cache.store.n == 43 and pair.cache.n == n_prompt + 60


@pytest.mark.parametrize("budget", [1, 2, 3])
def test_tiny_budgets(budget):
    pair = start(budget=Budget(tokens=budget))
    pair.prefill(9)
    pair.decode(20)
    assert all(len(rows) == budget + N_SINKS for rows in attended_rows(pair.cache))


def test_a_share_grows_with_the_sequence():
    pair = start(budget=Budget(share=0.2))
    pair.prefill(100)
    assert pair.cache.store.n == 20 + N_SINKS - 1
    pair.decode(100)
    assert pair.cache.store.n == 40 + N_SINKS - 1


def test_memory_is_that_of_the_budget():
    pair = start()
    cache, stream = pair.cache, pair.stream
    cache.reserve(3000)
    prefill(cache, stream.rows(2000))
    row_bytes = 2 * 2 * 64 * 2
    assert cache.memory().host == 44 * row_bytes
    for _ in range(300):
        decode(cache, stream.rows(1))
        # And a copy of what there was after the prompt, so that the sequence can go back to it.
        assert cache.memory().host == 2 * 44 * row_bytes
        assert cache.memory().index <= 2 * 2 * 44 * 8
    counts = cache.counters()
    assert counts["rows_dropped"] == 2 * (2300 - 43)
    assert counts["rows_total"] == 6 * sum(range(2001, 2301))
    assert counts["rows_attended"] == counts["rows_scored"] == 6 * 300 * 44
    assert counts["bytes_read"] == 300 * 44 * (row_bytes + row_bytes // 2)


def test_only_a_prefill_that_is_not_finished_can_be_cut():
    pair = start()
    cache = pair.cache
    pair.prefill(150)
    pair.decode(20)
    finish, cache.finish_prefill = cache.finish_prefill, lambda: None
    prefill(cache, pair.stream.rows(100))
    assert cache.n == 270 and cache.truncate(170) == 170 == cache.n
    cache.finish_prefill = finish
    pair.decode(20)
    pair.prefill(30)
    assert cache.truncate(219) == 0 and cache.truncate(220) == 220
