"""FASA against its literal twin, its limiting cases, its two variants, its options."""

from __future__ import annotations

from dataclasses import replace

import numba
import numpy as np
import pytest
from fasa_layer import GEOMETRIES, N_STEPS, Geometry, Layer, prefill, row_input
from sweeps import crossed, sweep

from sparsekv_cli.cache.layer import DenseCache
from sparsekv_cli.cache.spec import Budget
from sparsekv_cli.cache.store import padded
from sparsekv_cli.cpu.attention.decode import attend_rows_ref
from sparsekv_cli.errors import SparseKVError
from sparsekv_cli.methods import build_method
from sparsekv_cli.methods.fasa import FASA

pytestmark = pytest.mark.usefixtures("one_thread")


VARIANTS = {
    "tuned": {},
    "paper": {"metric": "ca", "force": "none"},
    "share": {"budget": Budget(share=0.2), "n_tip": 3},
    "m": {"variant": "m"},
}


@pytest.mark.parametrize(("geometry", "variant"), crossed(GEOMETRIES, [*VARIANTS]), ids=str)
def test_fasa_equals_its_twin(geometry, variant):
    """Dense at first, sparse from 60 rows on, another prompt, and a rewind to a dense context."""
    options = {"budget": Budget(tokens=60), **VARIANTS[variant]}
    if geometry.n_rot < geometry.d:
        options["n_tip"] = 4
    layer = Layer(geometry, **options)
    _, k, v = layer.prefill(40)
    layer.twin.start(k, v)
    capacity = layer.cache.store.capacity
    assert layer.decode(N_STEPS) <= 2
    assert layer.cache.store.capacity > capacity and layer.cache.store.dom is not None
    assert layer.cache.n == 40 + N_STEPS

    for n in (70, 1):
        _, k, v = layer.prefill(n)
        layer.twin.start(*(np.concatenate(x, 1) for x in ((layer.twin.k, k), (layer.twin.v, v))))
        layer.decode(20)

    for n in (150, 25):
        assert layer.cache.truncate(n) == n
        layer.twin.start(layer.twin.k[:, :n], layer.twin.v[:, :n])
        layer.decode(60)


def test_all_threads():
    numba.set_num_threads(numba.config.NUMBA_NUM_THREADS)
    try:
        n_threads = numba.config.NUMBA_NUM_THREADS
        layer = Layer(GEOMETRIES[1], budget=Budget(tokens=300), n_threads=n_threads)
        _, k, v = layer.prefill(900)
        layer.twin.start(k, v)
        layer.decode(30)
    finally:
        numba.set_num_threads(1)


@pytest.mark.parametrize("force", ["default", "none"])
@pytest.mark.parametrize("n_fac", [1, 2, 3, 5, 19, 20, 21])
def test_small_budgets(n_fac, force):
    layer = Layer(GEOMETRIES[1], budget=Budget(tokens=n_fac), force=force)
    _, k, v = layer.prefill(1)
    layer.twin.start(k, v)
    layer.decode(70)
    assert layer.cache.attended is not None
    assert (layer.cache.attended[1] == n_fac).all()


# --- limiting cases -------------------------------------------------------------------------------


@pytest.mark.parametrize("geometry", sweep(GEOMETRIES[:4], fast=1), ids=str)
def test_all_chunks_are_exact_top_k(geometry):
    g = geometry
    layer = Layer(g, n_tip=g.d // 2, budget=Budget(tokens=50), force="none")
    _, keys, values = layer.prefill(200)
    for _ in range(20):
        q, k, v = (x[:, 0] for x in layer.rows(1))
        keys, values = (np.concatenate([a, b[:, None]], 1) for a, b in ((keys, k), (values, v)))
        out = layer.cache.decode(row_input(q, k, v, layer.cache.n))
        group = g.n_head // g.n_head_kv
        exact = [np.argsort(-(keys[h // group] @ q[h]))[:50] for h in range(g.n_head)]
        expected = attend_rows_ref(q, keys, values, exact, g.d**-0.5)
        np.testing.assert_allclose(out[:, : g.d], expected, atol=1e-5)
        rows, _ = layer.cache.attended
        np.testing.assert_array_equal(rows, np.sort(exact, axis=1))


@pytest.mark.parametrize("geometry", sweep(GEOMETRIES, fast=1), ids=str)
@pytest.mark.parametrize("n_fac", [200, 130])
def test_a_budget_of_the_context_is_full_to_the_bit(geometry, n_fac):
    """Also where K has been split before: a later prompt and a rewind find it as it was."""
    n_tip = {"n_tip": 4} if geometry.n_rot < geometry.d else {}
    layer = Layer(geometry, budget=Budget(tokens=n_fac), **n_tip)
    full = DenseCache(layer.spec)

    def both_prefill(n: int) -> None:
        q, k, v = layer.rows(n)
        expected, actual = (prefill(cache, q, k, v) for cache in (full, layer.cache))
        np.testing.assert_array_equal(actual, expected)

    def both_decode(n: int) -> int:
        same = 0
        for _ in range(n):
            q, k, v = (x[:, 0] for x in layer.rows(1))
            x = row_input(q, k, v, full.n)
            same += np.array_equal(full.decode(x), layer.cache.decode(x))
        return same

    both_prefill(100)
    assert both_decode(100) == n_fac - 100  # from n_fac rows on sparse
    assert (layer.cache.store.dom is not None) == (n_fac == 130)
    both_prefill(70)
    assert layer.cache.store.dom is not None
    assert both_decode(10) == 0
    for cache in (full, layer.cache):
        assert cache.truncate(90) == 90
    assert both_decode(n_fac - 90) == n_fac - 90
    np.testing.assert_array_equal(layer.cache.store.k[:, : full.n], full.store.k[:, : full.n])
    both_prefill(5)


@pytest.mark.parametrize("geometry", sweep(GEOMETRIES[:4], fast=1), ids=str)
def test_the_variants_give_equal_outputs(geometry):
    layers = [Layer(geometry, variant=variant, budget=Budget(tokens=30)) for variant in "cm"]
    moved = 0
    for layer in layers:
        layer.prefill(100)
    for _ in range(20):
        np.testing.assert_array_equal(*(layer.step() for layer in layers))
        rows = layers[1].cache.attended[0].reshape(geometry.n_head_kv, -1)
        moved += sum(len(set(each.tolist())) for each in rows)
    c, m = (layer.cache for layer in layers)
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
    layer = Layer(Geometry(9, 3, 64, 64), budget=Budget(tokens=25))
    layer.cache.reserve(256)
    layer.prefill(200)
    assert layer.cache.memory().host == 3 * 256 * (16 + 48 + 64) * 2
    assert not layer.cache.counters()
    layer.step()
    counts = layer.cache.counters()
    assert counts["rows_total"] == counts["rows_scored"] == 9 * 201
    assert counts["rows_attended"] == counts["sparse_rows_attended"] == 9 * 25
    blocks = 9 + 1 + 2  # of the 25 - 4 - 12 best rows, of rows 0 to 15, of rows 176 to 200
    read = 3 * 201 * 16 + 9 * blocks * 16 * 16 + 9 * 25 * (48 + 64)
    assert counts["bytes_read"] == 2 * read


def test_whole_keys():
    """For measurements: before K is split, and while it is."""
    layer = Layer(GEOMETRIES[2], budget=Budget(tokens=150))
    _, k, _ = layer.prefill(140)
    for is_split in (False, True):
        assert (layer.cache.store.dom is not None) == is_split
        whole = layer.cache.store.whole_keys(200, 96)
        np.testing.assert_array_equal(whole[:, :140, :80], k)
        assert not whole[:, layer.cache.n :].any() and not whole[..., 80:].any()
        for _ in range(20):
            layer.step()


# --- options --------------------------------------------------------------------------------------


def test_presets():
    tuned, paper = build_method("fasa", {}), build_method("fasa", {"preset": "paper"})
    assert (tuned.metric, tuned.force, tuned.dense_layers) == ("var", "default", (0, 1))
    assert (paper.metric, paper.force, paper.dense_layers) == ("ca", "none", ())
    assert tuned.budget == paper.budget == Budget(tokens=256)
    assert build_method("fasa", {}, budget="5%").budget == Budget(share=0.05)


@pytest.mark.parametrize(
    ("option", "value"),
    [("metric", "cos"), ("force", "all"), ("variant", "x"), ("n_tip", "-1")],
)
def test_a_bad_value_names_the_option(option, value):
    with pytest.raises(ValueError, match=f"{option} = '?{value}'?: must be"):
        build_method("fasa", {option: value})


def test_the_default_n_tip_is_all_chunks_where_few_dims_are_rotated():
    layer = Layer(Geometry(6, 2, 80, 20), metric="ca", budget=Budget(tokens=30))  # d/4 = 20 of 10
    layer.prefill(100)
    layer.step()
    assert layer.cache.store.dom.shape[2] == 20


def test_more_chunks_than_a_head_has_are_refused():
    with pytest.raises(SparseKVError, match="n_tip = 33: this model's heads have 32 chunks"):
        Layer(GEOMETRIES[0], n_tip=33)


@pytest.mark.parametrize("rank", [np.zeros((4, 32), np.uint8), np.tile(np.arange(16), (4, 1))])
def test_a_calibration_that_ranks_other_chunks_is_refused(rank):
    spec = replace(Layer(GEOMETRIES[0]).spec, calibration={"dom_var": rank})
    with pytest.raises(SparseKVError, match="layer 2 ranks other chunks"):
        FASA().layer(spec)
