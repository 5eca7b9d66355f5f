"""FASA and its naive form, its limiting cases, its two variants, its options."""

from dataclasses import replace
from typing import Any

import numba
import numpy as np
import pytest
from layer_rows import GEOMETRIES as WHOLE
from layer_rows import Geometry, Stream
from layer_stream import decode, make_cache, prefill
from naive_pair import Pair
from sweeps import crossed, sweep

from sparsekv_cli.cache.layer import DenseCache
from sparsekv_cli.cache.spec import Budget
from sparsekv_cli.cache.store import padded
from sparsekv_cli.cpu.attention.decode import attend_rows_ref
from sparsekv_cli.errors import SparseKVError
from sparsekv_cli.methods.fasa import FASA

pytestmark = pytest.mark.usefixtures("one_thread")

GEOMETRIES = [*WHOLE, Geometry(6, 2, 80, n_rot=20)]
VARIANTS: dict[str, dict[str, Any]] = {
    "tuned": {},
    "paper": {"metric": "ca", "force": "none"},
    "share": {"budget": Budget(share=0.2), "n_tip": 3},
    "m": {"variant": "m"},
}


def few_chunks(geometry: Geometry) -> dict[str, int]:
    """Options of a layer of which few dims are rotated."""
    return {"n_tip": 4} if geometry.n_rot else {}


@pytest.mark.parametrize(("geometry", "variant"), crossed(GEOMETRIES, [*VARIANTS]), ids=str)
def test_from_dense_to_sparse_and_back(geometry, variant):
    """Dense at first, sparse from 60 rows on, two more prompts, and a rewind to a dense context."""
    options = {"budget": Budget(tokens=60)} | VARIANTS[variant] | few_chunks(geometry)
    pair = Pair(FASA(**options), geometry)
    pair.prefill(40)
    capacity = pair.cache.store.capacity
    assert pair.decode(300)["ties"] <= 2
    assert pair.cache.store.capacity > capacity and pair.cache.store.dom is not None
    for n in (70, 1):
        pair.prefill(n)
        pair.decode(20)
    for n in (150, 25):
        pair.truncate(n)
        pair.decode(60)


def test_all_threads():
    numba.set_num_threads(numba.config.NUMBA_NUM_THREADS)
    try:
        n_threads = numba.config.NUMBA_NUM_THREADS
        pair = Pair(FASA(budget=Budget(tokens=300)), GEOMETRIES[1], 0, n_threads)
        pair.prefill(900)
        pair.decode(30)
    finally:
        numba.set_num_threads(1)


@pytest.mark.parametrize("force", ["default", "none"])
@pytest.mark.parametrize("n_fac", [1, 2, 3, 5, 19, 20, 21])
def test_small_budgets(n_fac, force):
    pair = Pair(FASA(budget=Budget(tokens=n_fac), force=force), GEOMETRIES[1])
    pair.prefill(1)
    pair.decode(70)
    assert (pair.cache.attended[1] == n_fac).all()


# --- limiting cases -------------------------------------------------------------------------------


@pytest.mark.parametrize("geometry", sweep(GEOMETRIES[:4], fast=1), ids=str)
def test_all_chunks_are_exact_top_k(geometry):
    g, stream = geometry, Stream(geometry)
    method = FASA(n_tip=g.d // 2, budget=Budget(tokens=50), force="none")
    cache, prompt = make_cache(method, g), stream.rows(200)
    prefill(cache, prompt)
    _, keys, values = prompt
    for _ in range(20):
        rows = stream.rows(1)
        keys, values = (np.concatenate(each, 1) for each in ((keys, rows[1]), (values, rows[2])))
        out, q = decode(cache, rows), rows[0][:, 0]
        group = g.n_head // g.n_head_kv
        exact = [np.argsort(-(keys[h // group] @ q[h]))[:50] for h in range(g.n_head)]
        expected = attend_rows_ref(q, keys, values, exact, g.d**-0.5)
        np.testing.assert_allclose(out, expected, atol=1e-5)
        np.testing.assert_array_equal(cache.attended[0], np.sort(exact, axis=1))


@pytest.mark.parametrize("geometry", sweep(GEOMETRIES, fast=1), ids=str)
@pytest.mark.parametrize("n_fac", [200, 130])
def test_a_budget_of_the_context_is_full_to_the_bit(geometry, n_fac):
    """Also where K has been split before: a later prompt and a rewind find it as it was."""
    method = FASA(budget=Budget(tokens=n_fac), **few_chunks(geometry))
    cache, stream = make_cache(method, geometry), Stream(geometry)
    full = DenseCache(cache.spec)

    def both_prefill(n: int) -> None:
        rows = stream.rows(n)
        np.testing.assert_array_equal(prefill(cache, rows), prefill(full, rows))

    def both_decode(n: int) -> int:
        same = 0
        for _ in range(n):
            rows = stream.rows(1)
            same += np.array_equal(decode(full, rows), decode(cache, rows))
        return same

    both_prefill(100)
    assert both_decode(100) == n_fac - 100  # from n_fac rows on sparse
    assert (cache.store.dom is not None) == (n_fac == 130)
    both_prefill(70)
    assert cache.store.dom is not None
    assert both_decode(10) == 0
    assert full.truncate(90) == cache.truncate(90) == 90
    assert both_decode(n_fac - 90) == n_fac - 90
    np.testing.assert_array_equal(cache.store.k[:, : full.n], full.store.k[:, : full.n])
    both_prefill(5)


@pytest.mark.parametrize("geometry", sweep(GEOMETRIES[:4], fast=1), ids=str)
def test_the_variants_give_equal_outputs(geometry):
    budget, stream, moved = Budget(tokens=30), Stream(geometry), 0
    c, m = (make_cache(FASA(variant=variant, budget=budget), geometry) for variant in "cm")
    prompt = stream.rows(100)
    for cache in (c, m):
        prefill(cache, prompt)
    for _ in range(20):
        rows = stream.rows(1)
        np.testing.assert_array_equal(decode(c, rows), decode(m, rows))
        attended = m.attended[0].reshape(geometry.n_head_kv, -1)
        moved += sum(len(set(each.tolist())) for each in attended)
    counts_c, counts_m = c.counters(), dict(m.counters())
    n_dom = geometry.d // 4
    rest = padded(geometry.d - n_dom) + padded(geometry.d)
    assert counts_m.pop("bytes_moved") == 2 * rest * moved > 0
    assert counts_m == dict(counts_c)
    whole, split = c.memory(), m.memory()
    assert whole.device == whole.index == split.index == 0
    assert split.host + split.device == whole.host == c.store.nbytes
    assert split.device == c.store.dom.nbytes
    assert split.host == 2 * rest * geometry.n_head_kv * c.store.capacity


def test_what_a_step_reads():
    """Kdom of all rows, and again of the blocks with the best and the forced ones; Krest and V of
    the attended ones; K is not stored twice."""
    geometry = Geometry(9, 3, 64)
    cache, stream = make_cache(FASA(budget=Budget(tokens=25)), geometry), Stream(geometry)
    cache.reserve(256)
    prefill(cache, stream.rows(200))
    assert cache.memory().host == 3 * 256 * (16 + 48 + 64) * 2
    assert not cache.counters()
    decode(cache, stream.rows(1))
    counts = cache.counters()
    assert counts["rows_total"] == counts["rows_scored"] == 9 * 201
    assert counts["rows_attended"] == counts["sparse_rows_attended"] == 9 * 25
    blocks = 9 + 1 + 2  # of the 25 - 4 - 12 best rows, of rows 0 to 15, of rows 176 to 200
    read = 3 * 201 * 16 + 9 * blocks * 16 * 16 + 9 * 25 * (48 + 64)
    assert counts["bytes_read"] == 2 * read


def test_whole_keys():
    """For measurements: before K is split, and while it is."""
    geometry = GEOMETRIES[2]
    cache, stream = make_cache(FASA(budget=Budget(tokens=150)), geometry), Stream(geometry)
    rows = stream.rows(140)
    prefill(cache, rows)
    for is_split in (False, True):
        assert (cache.store.dom is not None) == is_split
        whole = cache.store.whole_keys(200, 96)
        np.testing.assert_array_equal(whole[:, :140, :80], rows[1])
        assert not whole[:, cache.n :].any() and not whole[..., 80:].any()
        for _ in range(20):
            decode(cache, stream.rows(1))


# --- options --------------------------------------------------------------------------------------


def test_the_default_n_tip_is_all_chunks_where_few_dims_are_rotated():
    method = FASA(metric="ca", budget=Budget(tokens=30))  # d/4 = 20 of 10
    cache, stream = make_cache(method, GEOMETRIES[4]), Stream(GEOMETRIES[4])
    prefill(cache, stream.rows(100))
    decode(cache, stream.rows(1))
    assert cache.store.dom.shape[2] == 20


def test_more_chunks_than_a_head_has_are_refused():
    with pytest.raises(SparseKVError, match="n_tip = 33: this model's heads have 32 chunks"):
        make_cache(FASA(n_tip=33), GEOMETRIES[0])


@pytest.mark.parametrize("rank", [np.zeros((2, 32), np.uint8), np.tile(np.arange(16), (2, 1))])
def test_a_calibration_that_ranks_other_chunks_is_refused(rank):
    spec = replace(make_cache(FASA(), GEOMETRIES[0]).spec, calibration={"dom_var": rank})
    with pytest.raises(SparseKVError, match="layer 2 ranks other chunks"):
        FASA().layer(spec)
