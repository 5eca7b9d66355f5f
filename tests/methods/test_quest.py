"""Quest and its naive form, step by step; its budget, ledger and rewinding."""

import pytest
from layer_rows import GEOMETRIES, Geometry, Stream
from layer_stream import attended_rows, decode, make_cache, prefill
from naive_pair import Pair
from sweeps import sweep

from sparsekv_cli.cache.spec import N_SINKS, Budget
from sparsekv_cli.methods.quest import Quest


@pytest.mark.parametrize("geometry", sweep(GEOMETRIES, fast=1), ids=str)
@pytest.mark.parametrize(
    "options", [{}, {"summary": "meanstd"}, {"page": 5}, {"page": 48}], ids=str
)
def test_what_is_scored_and_what_the_index_holds(geometry, options):
    pair = Pair(Quest(budget=Budget(tokens=64), **options), geometry)
    pair.prefill(150)
    seen = pair.decode(300)
    assert seen["sparse"] == 300 and seen["ties"] <= 3
    page, cache = pair.method.page, pair.cache
    assert cache.counters()["rows_scored"] == sum(
        2 * geometry.n_head * ((n - 1) // page) for n in range(151, 451)
    )
    n_bytes = 2 * 2 * cache.store.k.shape[2] * geometry.n_head_kv
    assert cache.memory().index >= (450 - 1) // page * n_bytes


@pytest.mark.parametrize("n_prompt", [1, 5, 40, 64, 65])
@pytest.mark.parametrize("n_threads", [1, 2])
def test_from_dense_to_sparse_without_a_prefill_between(n_prompt, n_threads):
    pair = Pair(Quest(budget=Budget(tokens=48)), Geometry(6, 2, 64), 1, n_threads)
    pair.prefill(n_prompt)
    sparse = pair.decode(120)["sparse"]
    assert sparse == sum(n > 52 for n in range(n_prompt + 1, n_prompt + 121))


@pytest.mark.parametrize("budget", [1, 15, 16, 17, 31, 32])
def test_budgets_of_few_pages(budget):
    """A budget of whole pages, the current one included, and the sinks."""
    pair = Pair(Quest(budget=Budget(tokens=budget)), Geometry(4, 2, 64))
    pair.prefill(100)
    for _ in range(40):
        pair.decode(1)
        most = -(-budget // 8) * 8 + N_SINKS
        assert all(len(rows) <= most for rows in attended_rows(pair.cache))


def test_turns_and_rewinding_keep_the_summaries_right():
    pair = Pair(Quest(budget=Budget(tokens=48)), Geometry(6, 2, 64))
    pair.prefill(150)
    pair.decode(35)
    for n_new in (1, 70, 16):
        pair.prefill(n_new)
        pair.decode(20)
    for keep in (250, 240, 128, 97):  # within a page, at its end, and with a prefill in between
        pair.truncate(keep)
        if keep == 128:
            pair.prefill(40)
        pair.decode(20)


def test_an_interrupted_prefill_leaves_no_summaries():
    pair = Pair(Quest(budget=Budget(tokens=48)), Geometry(4, 2, 64))
    pair.prefill(150)
    pair.decode(20)
    prefill(pair.cache, pair.stream.rows(90))
    pair.truncate(170)
    pair.decode(60)


def test_bytes_read_are_summaries_and_whole_pages():
    geometry = Geometry(6, 2, 64)
    cache, stream = make_cache(Quest(budget=Budget(tokens=64), page=16), geometry), Stream(geometry)
    prefill(cache, stream.rows(320))
    decode(cache, stream.rows(1))  # row 321 begins page 20; 3 pages and the current row
    rows = sum(map(len, attended_rows(cache)))
    assert 2 * (3 * 16 + 1) <= rows <= 2 * (3 * 16 + 1 + N_SINKS)
    counts = cache.counters()
    assert counts["bytes_read"] == rows * 4 * 64 + 2 * 20 * 2 * 2 * 64
    assert counts["rows_attended"] == 3 * rows and counts["rows_scored"] == 6 * 20 * 2
