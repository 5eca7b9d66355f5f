"""FreeKV against its literal twin over hundreds of steps, and its limiting cases."""

from __future__ import annotations

import numba
import numpy as np
import pytest
from freekv_follow import (
    GEOMETRIES,
    N_STEPS,
    PLAIN,
    SMALL,
    Geometry,
    Stream,
    follow,
    make_cache,
    run_both,
)
from freekv_twin import FreeKVTwin, TwinOptions
from layer_stream import decode, prefill
from sweeps import crossed, sweep

from sparsekv_cli.cache.layer import LayerCache
from sparsekv_cli.cache.spec import Budget
from sparsekv_cli.methods import build_method

pytestmark = pytest.mark.usefixtures("one_thread")


class Share(Budget):
    """Half of the context, so that the number of pages grows with it."""

    def rows(self, n: int) -> int:
        return n // 2


class AllButOne(Budget):
    """Just too small for the context, and yet all pages are chosen; where that cannot be, dense."""

    def rows(self, n: int) -> int:
        return n - 1 if n % 16 else n


VARIANTS = {
    "tuned": {},
    "overlap": {"overlap": "true"},
    "minmax": {"summary": "minmax", "page": 32, "sinks": 32},
    "pages of 8": {"page": 8, "tau": 0.9, "overlap": "true"},
    "no speculation": {"speculate": False},
    "speculation only": {"correct": False},
    "overlap, speculation only": {"correct": False, "overlap": "true"},
    "small cache": {"cache_pages": 1.0, "overlap": "true", "tau": 0.9},
    "odd pages": {"page": 7, "sinks": 14, "window": 30, "overlap": "true"},
}


# --- the twin -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("geometry", "variant"), crossed(GEOMETRIES, [*VARIANTS]), ids=str)
def test_freekv_equals_its_twin(geometry, variant):
    cache, twin, seen = run_both(geometry, **VARIANTS[variant])
    page = twin.options.page
    assert seen["ties"] <= 3 and seen["left out"] == seen["steps"]
    assert seen["borders"] in (N_STEPS // page, N_STEPS // page + 1)
    if twin.options.speculate and twin.options.correct:
        assert 0.1 * seen["steps"] < seen["corrected"] < 0.9 * seen["steps"]
    counts = cache.counters()
    assert counts["heads_corrected"] == seen["corrected"]
    assert counts["heads_stepped"] == seen["steps"] == N_STEPS * geometry.n_head_kv
    if not seen["ties"]:
        assert counts["pages_recalled"] == sum(c.recalled for c in twin.cached) > 0
        assert counts["pages_hit"] == sum(c.hit for c in twin.cached) > 0
    n_page = len(twin.candidates(N_STEPS + geometry.n_prefill + (cache._overlaps)))
    before = len(twin.candidates(geometry.n_prefill + 1))
    assert counts["pages_offloaded"] == (n_page - before) * geometry.n_head_kv


def test_a_budget_that_grows():
    """The chosen pages, and the slots for them, grow with the context."""
    geometry = Geometry(6, 2, 64, 260)
    cache, twin, seen = run_both(geometry, budget=Share(share=0.5), overlap="true")
    first, last = twin.n_best(261), twin.n_best(560)
    assert last >= first + 9 and seen["left out"] == seen["steps"]
    assert cache._cache is not None and cache._cache.pages.stamps.shape[1] == 2 * last


def test_all_threads():
    numba.set_num_threads(numba.config.NUMBA_NUM_THREADS)
    try:
        run_both(Geometry(9, 3, 64, 300), n_steps=60, n_threads=2)
        run_both(Geometry(9, 3, 64, 300), n_steps=60, n_threads=2, overlap="true")
    finally:
        numba.set_num_threads(1)


# --- limiting cases -------------------------------------------------------------------------------


def outputs(geometry: Geometry, n_threads: int = 1, **options) -> np.ndarray:
    """The outputs of 80 tokens after a prefill, f32 (80, H, d_v)."""
    return run(make_cache(geometry, n_threads, **(SMALL | options)), geometry)


def dense_outputs(geometry: Geometry) -> np.ndarray:
    spec = make_cache(geometry).spec
    return run(build_method("full", {}).layer(spec), geometry)


def run(cache: LayerCache, geometry: Geometry) -> np.ndarray:
    stream = Stream(geometry, 3)
    prefill(cache, stream.rows(geometry.n_prefill))
    return np.stack([decode(cache, stream.rows(1)).copy() for _ in range(80)])


@pytest.mark.parametrize(
    ("options", "same_as"),
    [
        ({"tau": 1.5}, {"speculate": False}),
        ({"tau": 1.5, "overlap": "true"}, {"speculate": False, "overlap": "true"}),
        ({"tau": -1.0}, {"correct": False}),
        ({"tau": -1.0, "overlap": "true"}, {"correct": False}),
        ({"overlap": "true"}, {"overlap": "false"}),
        ({"cache_pages": 1.0}, {"cache_pages": 8.0}),
        ({"cache_pages": 1.3, "overlap": "true"}, {"cache_pages": 2.0}),
        ({"budget": AllButOne(share=1.0)}, {"budget": AllButOne(share=1.0), "speculate": False}),
    ],
    ids=str,
)
@pytest.mark.parametrize("geometry", sweep(GEOMETRIES, fast=1), ids=str)
def test_options_that_must_not_matter(geometry, options, same_as):
    """To the last bit; the last pair: every page is chosen, whichever query asks."""
    np.testing.assert_array_equal(outputs(geometry, **options), outputs(geometry, **same_as))


@pytest.mark.parametrize(
    ("options", "other"),
    [
        ({}, {"speculate": False}),
        ({}, {"correct": False}),
        ({"tau": 0.9}, {"tau": 0.7}),
        ({}, {"summary": "minmax"}),
        ({}, {"page": 8}),
    ],
    ids=str,
)
def test_options_that_must_matter(options, other):
    assert np.abs(outputs(PLAIN, **options) - outputs(PLAIN, **other)).max() > 1e-2


def test_threads_change_nothing():
    numba.set_num_threads(numba.config.NUMBA_NUM_THREADS)
    try:
        for overlap in ("false", "true"):
            one, two = (outputs(PLAIN, n_threads=t, overlap=overlap) for t in (1, 2))
            np.testing.assert_array_equal(one, two)
    finally:
        numba.set_num_threads(1)


@pytest.mark.parametrize("geometry", sweep(GEOMETRIES, fast=1), ids=str)
def test_a_budget_of_the_context_changes_no_bit(geometry):
    expected = dense_outputs(geometry)
    for budget in (Budget(share=1.0), Budget(tokens=geometry.n_prefill + 80)):
        np.testing.assert_array_equal(outputs(geometry, budget=budget), expected)


@pytest.mark.parametrize("geometry", sweep(GEOMETRIES, fast=1), ids=str)
@pytest.mark.parametrize("overlap", ["false", "true"])
def test_choosing_every_page_equals_dense(geometry, overlap):
    """The sparse path itself: pool, recall and ring hold every row where it belongs."""
    actual = outputs(geometry, budget=AllButOne(share=1.0), overlap=overlap)
    np.testing.assert_allclose(actual, dense_outputs(geometry), atol=1e-5)


def test_from_dense_to_pages_while_decoding():
    """A budget that the context outgrows in decode; the twin starts there, with its last query."""
    geometry, budget = Geometry(6, 2, 64, 100), 144
    stream = Stream(geometry, 0)
    cache = make_cache(geometry, **SMALL)
    rows = stream.rows(100)
    prefill(cache, rows)
    while cache.n < budget:
        row = stream.rows(1)
        decode(cache, row)
        rows = tuple(np.concatenate(pair, 1) for pair in zip(rows, row, strict=True))
        assert cache.attended is None and cache.memory().device == 0
    twin = FreeKVTwin(TwinOptions(lambda n: budget, sinks=16, window=32, page=16, tau=0.8), 6, 2)
    twin.start(rows[0][:, -1], *rows[1:])
    assert follow(cache, twin, stream, 100)["left out"] > 100
    assert cache.memory().device > 0 and cache.store.capacity == 0
