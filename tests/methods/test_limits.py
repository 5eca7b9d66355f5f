"""What every method has to be in the limit, a layer at a time, over head counts and head sizes.

The sparse path, when all that it leaves out is a row that no query attends to, equals dense
attention: that row's key points away from all queries, and its value is so large that it would be
noticed. test_contract.py has budgets that cover the context.
"""

from functools import partial
from typing import Any

import numpy as np
import pytest
from layer_rows import GEOMETRIES, Geometry, Rows, Stream
from layer_stream import attended_rows, decode, prefill
from sweeps import sweep

from sparsekv_cli.cache.layer import DenseCache, EvictingCache, LayerCache
from sparsekv_cli.cache.spec import N_SINKS, Budget, LayerSpec
from sparsekv_cli.calibration import fasa, sals
from sparsekv_cli.calibration.allocation import even_budgets
from sparsekv_cli.methods import METHODS, build_method, method_class
from sparsekv_cli.methods.base import Method
from sparsekv_cli.methods.depth import with_sparse_from
from sparsekv_cli.methods.fasa import FASA
from sparsekv_cli.methods.freekv import FreeKV
from sparsekv_cli.methods.h2o import H2O
from sparsekv_cli.methods.quest import Quest
from sparsekv_cli.methods.sals import SALS
from sparsekv_cli.methods.snapkv import SnapKV
from sparsekv_cli.methods.streaming import Streaming
from sparsekv_cli.methods.topk import TopK

N_PREFILL, N_STEPS = 200, 40
NOBODYS_ROW = 20


def calibration_of(geometry: Geometry) -> dict[str, np.ndarray]:
    """For all methods: any order of chunks; latents that are the keys; any order of frequencies."""
    size = geometry.n_head_kv * geometry.d
    order = np.tile(np.arange(geometry.d // 2, dtype=np.uint8), (geometry.n_head_kv, 1))
    return {
        "dom_var": order, "dom_ca": order, "tip_budget": even_budgets(fasa.SHARES),
        "weights": np.ones(size, np.float32), "vectors_diag": np.eye(size, dtype=np.float32),
        "vectors_pca": np.eye(size, dtype=np.float32),
        "rank_budget": even_budgets(sals.SHARES),
        "imp_kld": np.arange(22, 0, -1, dtype=np.float32),
        "imp_ppl": np.arange(22, dtype=np.float32),
        "layer_budget": np.linspace(0, 1, 10, dtype=np.float32).reshape(5, 2),
    }  # fmt: skip


def spec_of(geometry: Geometry) -> LayerSpec:
    """Of a layer that rotates by nothing, so that latents can be exact."""
    g = geometry
    return LayerSpec(
        layer=2, n_layer=4, n_head=g.n_head, n_head_kv=g.n_head_kv, head_dim=g.d, value_dim=g.d,
        n_threads=1, theta=np.zeros(g.d // 2), calibration=calibration_of(g),
    )  # fmt: skip


def cache_of(method: Method, geometry: Geometry) -> LayerCache:
    cache = method.sparse_layer(spec_of(geometry))
    cache.records_attended = True
    return cache


def rows_of(geometry: Geometry, nobodys: int) -> Rows:
    q, k, v = Stream(geometry).rows(N_PREFILL + N_STEPS)
    q /= 2  # scores err by their size, and outputs by as much: here a fifth of the limit
    q[..., 0], k[..., 0] = 8, 0
    k[:, nobodys, 0], v[:, nobodys] = -60, 100
    return q, k, v


def outputs(cache: LayerCache, rows: Rows) -> np.ndarray:
    """f32 (N_STEPS, H, d)"""
    prefill(cache, tuple(x[:, :N_PREFILL] for x in rows))
    return np.stack([decode(cache, rows, N_PREFILL + i).copy() for i in range(N_STEPS)])


# --- the step from dense to sparse ----------------------------------------------------------------

# snapkv drops rows at the end of a prefill only; faedkv's segments are as long as what is at hand.
NO_SWITCH = {"full", "snapkv", "faedkv"}
SWITCHES: dict[str, Method] = {
    name: build_method(name, {}, budget="150") for name in METHODS if name not in NO_SWITCH
} | {
    "lfps, ratio": build_method("lfps", {"preset": "paper"}, budget="150"),
    "quest, meanstd": build_method("quest", {"summary": "meanstd"}, budget="150"),
    "freekv, no speculation": build_method("freekv", {"speculate": "false"}, budget="150"),
}
SWITCHES |= {
    f"{name}, dense up to 150": with_sparse_from(build_method(name, {}, budget="40"), 150)
    for name in METHODS
    if method_class(name).work_of_a_head
}  # fmt: skip


def steps_of(cache: LayerCache, rows: Rows, n_prompt: int) -> tuple[list[np.ndarray], int]:
    """Outputs of all steps behind a prompt, and the rows when the first step leaves some out."""
    prefill(cache, tuple(x[:, :n_prompt] for x in rows))
    outs, first_sparse = [], 0
    for n in range(n_prompt, rows[0].shape[1]):
        outs.append(decode(cache, rows, n).copy())
        counts = cache.counters()
        is_sparse = counts["sparse_rows_attended"] < counts["sparse_rows_total"]
        first_sparse = first_sparse or (n if is_sparse else 0)
    return outs, first_sparse


@pytest.mark.parametrize("geometry", sweep(GEOMETRIES, fast=1), ids=str)
@pytest.mark.parametrize("case", SWITCHES)
def test_an_answer_that_outgrows_the_budget_is_as_good_as_a_prompt(case, geometry):
    """The steps behind dense ones have the bits of the steps behind a prefill of the same rows.

    The first step of freekv is left out: behind a prefill it chooses with its own query.
    """
    rows = Stream(geometry).rows(280)
    make = SWITCHES[case]
    own_query = isinstance(make, FreeKV) and make.speculate
    outs, first_sparse = steps_of(cache_of(make, geometry), rows, 40)
    assert first_sparse == 150 if "dense up to" in case else 140 < first_sparse < 250
    prefilled, first = steps_of(cache_of(make, geometry), rows, first_sparse)
    assert first == first_sparse
    compare = np.testing.assert_array_equal
    if isinstance(cache_of(make, geometry), EvictingCache):  # its rows lie in another order
        compare = partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6)
    compare(outs[first_sparse - 40 + own_query :], prefilled[own_query:])


# --- the sparse path over all that counts ---------------------------------------------------------


class AllBut(Budget):
    """All rows but so many, however long the context; ``floor`` says how many."""

    def rows(self, n: int) -> int:
        return n - self.floor


WHOLE_LATENTS = {"rank": 10**4, "score_rank": 10**4, "bits": 16}
# Sinks, recent rows and windows count beside some methods' budgets.
ALL_BUT_ONE: dict[str, tuple[Any, int]] = {
    "topk": (lambda g: TopK(budget=AllBut(floor=1 + N_SINKS)), NOBODYS_ROW),
    "streaming": (lambda g: Streaming(budget=AllBut(floor=1 + N_SINKS)), N_SINKS),
    "fasa": (lambda g: FASA(budget=AllBut(floor=1)), NOBODYS_ROW),
    "fasa, every chunk": (lambda g: FASA(budget=AllBut(floor=1), n_tip=g.d // 2), NOBODYS_ROW),
    "snapkv": (
        lambda g: SnapKV(budget=Budget(tokens=N_PREFILL - 1 - N_SINKS - 32), kernel=1),
        NOBODYS_ROW,
    ),
    "h2o": (lambda g: H2O(budget=AllBut(floor=1 + N_SINKS)), NOBODYS_ROW),
    "sals": (lambda g: SALS(budget=AllBut(floor=1 + 16 + 64), **WHOLE_LATENTS), NOBODYS_ROW),
    "sals, pca": (
        lambda g: SALS(
            budget=AllBut(floor=1 + 16 + 64), basis="pca", score="paper", **WHOLE_LATENTS
        ),
        NOBODYS_ROW,
    ),
}


@pytest.mark.parametrize("geometry", sweep(GEOMETRIES, fast=1), ids=str)
@pytest.mark.parametrize("case", ALL_BUT_ONE)
def test_leaving_out_nobodys_row_equals_dense(case, geometry):
    make, nobodys = ALL_BUT_ONE[case]
    cache, rows = cache_of(make(geometry), geometry), rows_of(geometry, nobodys)
    out = outputs(cache, rows)
    atol = 3e-5 if case.startswith("sals") else 1e-5  # latents are numbers of 16 bits
    np.testing.assert_allclose(out, outputs(DenseCache(spec_of(geometry)), rows), atol=atol)
    expected = [*range(nobodys), *range(nobodys + 1, N_PREFILL + N_STEPS)]
    assert all(sorted(attended) == expected for attended in attended_rows(cache))


@pytest.mark.parametrize("geometry", sweep(GEOMETRIES, fast=1), ids=str)
@pytest.mark.parametrize("options", [{}, {"summary": "minmax"}, {"page": 7}], ids=str)
def test_every_page_of_quest_equals_dense(options, geometry, monkeypatch):
    """Its pages in their order, gathered; freekv's are in test_freekv_steps.py."""
    method = Quest(budget=AllBut(floor=0), **options)
    cache, rows = cache_of(method, geometry), rows_of(geometry, NOBODYS_ROW)
    monkeypatch.setattr(type(cache), "is_dense_at", lambda self, n: False)
    out = outputs(cache, rows)
    np.testing.assert_allclose(out, outputs(DenseCache(spec_of(geometry)), rows), atol=1e-5)
    assert all(len(attended) == N_PREFILL + N_STEPS for attended in attended_rows(cache))


def test_every_method_is_here():
    """A new method needs a line above, or a reason in this list."""
    elsewhere = {
        "full": "is dense attention",
        "quest": "by pages, above",
        "freekv": "test_freekv_steps.py",
        "lfps": "tests/cpu/lfps/test_history.py",
        "faedkv": "test_faedkv.py, every bin",
    }
    here = {case.partition(",")[0] for case in ALL_BUT_ONE}
    missing = set(METHODS) - here - set(elsewhere)
    assert not missing, f"ALL_BUT_ONE or `elsewhere` needs a line for {missing}"
    assert here | set(elsewhere) == set(METHODS) and not here & set(elsewhere)
    for name in here:
        assert type(ALL_BUT_ONE[name][0](GEOMETRIES[0])) is method_class(name)
