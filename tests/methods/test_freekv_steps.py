"""FreeKV over hundreds of steps: its naive form and its page cache, and its limiting cases."""

from typing import Any

import numba
import numpy as np
import pytest
from freekv_pair import GEOMETRIES, N_STEPS, PLAIN, SMALL, FreeKVPair, followed
from layer_rows import Case, Geometry, TurningStream
from layer_stream import decode, make_cache, prefill
from sweeps import crossed, sweep

from sparsekv_cli.cache.layer import LayerCache
from sparsekv_cli.cache.spec import Budget
from sparsekv_cli.methods.freekv import FreeKV
from sparsekv_cli.methods.full import Full

pytestmark = pytest.mark.usefixtures("one_thread")


class Share(Budget):
    """Half of the context, so that the number of pages grows with it."""

    def rows(self, n: int) -> int:
        return n // 2


class AllButOne(Budget):
    """Just too small for the context, and yet all pages are chosen; where that cannot be, dense."""

    def rows(self, n: int) -> int:
        return n - 1 if n % 16 else n


VARIANTS: dict[str, dict[str, Any]] = {
    "tuned": {},
    "overlap": {"overlap": "true"},
    "minmax": {"summary": "minmax", "page": 32, "sinks": 32},
    "pages of 8": {"page": 8, "tau": 0.9, "overlap": "true"},
    "no speculation": {"speculate": False},
    "speculation only": {"correct": False},
    "overlap, speculation only": {"correct": False, "overlap": "true"},
    "small cache": {"cache_pages": 1.0, "overlap": "true", "tau": 0.9},
    "odd pages": {"page": 7, "sinks": 14, "window": 30, "overlap": "true"},
    "groups": {"page": 1, "budget": Budget(tokens=5), "sinks": 1, "window": 1},
}


# --- the naive form -------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(("case", "variant"), crossed(GEOMETRIES, [*VARIANTS]), ids=str)
def test_freekv_equals_its_naive_form(case, variant):
    _, n_prefill = case
    pair = followed(*case, **VARIANTS[variant])
    seen, method, n_kv = pair.seen, pair.method, pair.geometry.n_head_kv
    assert seen["ties"] <= 3 and seen["left out"] == seen["lists"] == N_STEPS * n_kv
    assert seen["borders"] in (N_STEPS // method.page, N_STEPS // method.page + 1)
    if method.speculate and method.correct:
        assert 0.1 * seen["lists"] < seen["corrected"] < 0.9 * seen["lists"]
    counts = pair.cache.counters()
    assert counts["heads_corrected"] == seen["corrected"]
    assert counts["heads_stepped"] == seen["lists"]
    if not seen["ties"]:
        assert counts["pages_recalled"] == sum(each.n_recalled for each in pair.recalled) > 0
        assert counts["pages_hit"] == sum(each.n_hit for each in pair.recalled) > 0
    windows = [pair.naive.first_pages(n)[1] for n in (pair.naive.n + pair.ahead, n_prefill + 1)]
    assert counts["pages_offloaded"] == (windows[0] - windows[1]) * n_kv
    assert pair.grouped == (variant == "groups")


def test_a_budget_that_grows():
    """The chosen pages, and the slots for them, grow with the context."""
    pair = followed(Geometry(6, 2, 64), 260, budget=Share(share=0.5), overlap="true")
    first, last = pair.naive.n_best(261), pair.naive.n_best(560)
    assert last >= first + 9 and pair.seen["left out"] == pair.seen["lists"]
    assert pair.cache._cache.pages.stamps.shape[1] == 2 * last


def test_all_threads():
    numba.set_num_threads(numba.config.NUMBA_NUM_THREADS)
    try:
        followed(*PLAIN, n_steps=60, n_threads=2)
        followed(*PLAIN, n_steps=60, n_threads=2, overlap="true")
    finally:
        numba.set_num_threads(1)


# --- limiting cases -------------------------------------------------------------------------------


def outputs(case: Case, n_threads: int = 1, **options: Any) -> np.ndarray:
    """The outputs of 80 tokens after a prefill, f32 (80, H, d_v)."""
    return run(make_cache(FreeKV(**(SMALL | options)), case[0], n_threads), case)


def run(cache: LayerCache, case: Case) -> np.ndarray:
    geometry, n_prefill = case
    stream = TurningStream(geometry, 3)
    prefill(cache, stream.rows(n_prefill))
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
@pytest.mark.parametrize("case", sweep(GEOMETRIES, fast=1), ids=str)
def test_options_that_must_not_matter(case, options, same_as):
    """To the last bit; the last pair: every page is chosen, whichever query asks."""
    np.testing.assert_array_equal(outputs(case, **options), outputs(case, **same_as))


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


@pytest.mark.parametrize("case", sweep(GEOMETRIES, fast=1), ids=str)
@pytest.mark.parametrize("overlap", ["false", "true"])
def test_choosing_every_page_equals_dense(case, overlap):
    """The sparse path itself: pool, recall and ring hold every row where it belongs."""
    actual = outputs(case, budget=AllButOne(share=1.0), overlap=overlap)
    np.testing.assert_allclose(actual, run(make_cache(Full(), case[0]), case), atol=1e-5)


def test_from_dense_to_pages_while_decoding():
    """A budget that the context outgrows in decode."""
    pair = FreeKVPair(FreeKV(**(SMALL | {"overlap": "false"})), Geometry(6, 2, 64))
    pair.prefill(100)
    pair.decode(44)
    assert pair.cache.attended is None and pair.cache.memory().device == 0
    assert pair.decode(100)["left out"] > 100
    assert pair.cache.memory().device > 0
