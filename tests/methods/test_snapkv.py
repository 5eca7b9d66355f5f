"""SnapKV and its naive form: what is kept, decode, further turns; memory, the ledger."""

import numpy as np
import pytest
from layer_rows import GEOMETRIES, Geometry
from layer_stream import decode, prefill
from naive_pair import Pair
from sweeps import sweep

from sparsekv_cli.cache.spec import N_SINKS, Budget
from sparsekv_cli.methods.snapkv import N_ROOM, SnapKV

PLAIN = Geometry(6, 2, 64)


def start(geometry: Geometry = PLAIN, n_threads: int = 1, **options) -> Pair:
    method = SnapKV(**({"budget": Budget(tokens=40)} | options))
    return Pair(method, geometry, n_threads=n_threads)


def held(pair: Pair) -> int:
    """Rows that a kv head holds, in both."""
    np.testing.assert_array_equal(pair.cache.positions(), pair.naive.held)
    return pair.cache.store.n


@pytest.mark.parametrize("geometry", sweep(GEOMETRIES, fast=1), ids=str)
@pytest.mark.parametrize("options", [{}, {"window": 8, "kernel": 1}, {"window": 70}], ids=str)
def test_what_every_prefill_keeps(geometry, options):
    """A prompt, a generation longer than it, and two more turns."""
    pair = start(geometry, **options)
    kept = 40 + pair.method.window + N_SINKS
    for n_new, n_steps in ((250, 300), (5, 30), (90, 30)):  # fewer rows than the window, and more
        pair.prefill(n_new)
        assert held(pair) == kept
        pair.decode(n_steps)
        assert held(pair) == kept + n_steps


@pytest.mark.parametrize("n_prompt", [1, 5, 75, 76, 77, 140])
def test_around_the_first_row_that_is_too_many(n_prompt):
    pair = start(n_threads=2)
    pair.prefill(n_prompt)
    assert held(pair) == min(n_prompt, 40 + 32 + N_SINKS)
    pair.decode(20)


def test_a_share_is_one_of_the_whole_sequence():
    pair = start(budget=Budget(share=0.1))
    for n_new, n_kept in ((300, 30), (100, 40)):
        pair.prefill(n_new)
        assert held(pair) == n_kept + 32 + N_SINKS


def test_dropped_rows_are_gone_from_memory():
    pair = start()
    cache, stream = pair.cache, pair.stream
    cache.reserve(5000)
    before = cache.memory().host
    prefill(cache, stream.rows(4000))
    row_bytes = 2 * 2 * 64 * 2
    assert before == 5000 * row_bytes
    assert cache.memory().host == (40 + 32 + N_SINKS + N_ROOM) * row_bytes
    assert cache.memory().index == 2 * (40 + 32 + N_SINKS) * 4
    cache.reserve(4600)  # 600 rows are coming
    assert cache.store.capacity < 1200
    counts = cache.counters()
    assert counts["rows_dropped"] == 2 * (4000 - 76)
    decode(cache, stream.rows(1))
    counts = cache.counters()
    assert counts["rows_total"] == 6 * 4001 and counts["rows_attended"] == 6 * 77
    assert counts["rows_scored"] == 0 and counts["bytes_read"] == 77 * row_bytes


def test_cutting_back_to_the_last_choice_and_not_behind_it():
    pair = start()
    pair.prefill(200)
    pair.decode(30)
    prefill(pair.cache, pair.stream.rows(1))  # drops some
    assert pair.cache.truncate(220) == 0
    pair = start()
    pair.prefill(200)
    pair.decode(30)
    for keep in (217, 200):
        pair.truncate(keep)
        pair.decode(5)
        assert pair.cache.truncate(199) == 0
    pair.prefill(50)


def test_nothing_dropped_means_that_any_row_can_be_cut():
    pair = start()
    pair.prefill(60)
    pair.truncate(13)
    pair.prefill(70)
    pair.decode(5)
