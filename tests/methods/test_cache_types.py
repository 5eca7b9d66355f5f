"""Quantised rows of K and V: the same guarantees as with f16."""

from dataclasses import replace

import numpy as np
import pytest
from chunks import attend_chunk
from layer_rows import GEOMETRIES, Stream
from layer_stream import decode, make_cache, prefill
from sweeps import sweep
from tiny_sequences import N_LAYER, decoded, tokens

from sparsekv_cli.cache.attend import attend_dense
from sparsekv_cli.cache.spec import N_SINKS, AttnInput, Budget, LayerSpec
from sparsekv_cli.cpu.attention.decode import attend_dense_ref
from sparsekv_cli.cpu.jit import bf16
from sparsekv_cli.cpu.jit.floats import as_f32, as_type_of
from sparsekv_cli.cpu.quest.pages import page_summaries_ref
from sparsekv_cli.methods import METHODS, build_method, lfps, method_class
from sparsekv_cli.methods.quest import Quest

READERS = [name for name in METHODS if "q4_0" in method_class(name).cache_types]
TYPES = [("q8_0", "q8_0"), ("q8_0", "f16"), ("f16", "q8_0"), ("q5_1", "q4_0"), ("q4_0", "q5_1")]
# The most that a stored element errs by, over the largest one's size: half a step; the rotation of
# q4_0 adds up the errors of a row.
ERRORS = {"f16": 2**-11, "q8_0": 0.51 / 127, "q5_1": 1.02 / 31, "q4_0": 0.5}


# --- exactness ------------------------------------------------------------------------------------


@pytest.mark.parametrize("types", TYPES)
def test_pages_of_dense_layers_read_the_rows_as_they_are(types, sequence_of, monkeypatch):
    """Dense layers of LFPS that choose pages give what Quest gives."""
    monkeypatch.setattr(lfps, "PAGES", Quest(budget=Budget(tokens=40)))
    paged = sequence_of(
        "lfps", {"pages_from": "70"}, budget="5", dense_layers="0,1,2,3", types=types
    )
    quest = sequence_of("quest", budget="40", dense_layers="none", types=types)
    logits = [sequence.prefill(tokens(90)) for sequence in (paged, quest)]
    np.testing.assert_array_equal(*logits)
    text = tokens(6, 1)
    np.testing.assert_array_equal(decoded(paged, text), decoded(quest, text))
    counts = paged.ledger()
    assert 0 < counts["sparse_rows_attended"] < 0.6 * counts["sparse_rows_total"]


class AllButSinks(Budget):
    """Every row that is no sink."""

    def rows(self, n: int) -> int:
        return n - N_SINKS


class AllOfContext(Budget):
    """Every row; the first of Quest's pages takes the sinks' rows into account."""

    def rows(self, n: int) -> int:
        return n


@pytest.mark.parametrize("types", [("f16", "f16"), *TYPES])
@pytest.mark.parametrize(
    ("name", "budget"), [("topk", AllButSinks), ("streaming", AllButSinks), ("quest", AllOfContext)]
)
def test_selecting_every_row_equals_dense(name, budget, types, sequence_of, monkeypatch):
    """The sparse path itself, layer by layer; LFPS' is in tests/cpu/lfps/test_history.py."""
    sparse = sequence_of(name, dense_layers="none", types=types)
    object.__setattr__(sparse.method, "budget", budget(share=1.0))
    cache_type = type(sparse.caches[0])
    select_and_attend, errors = cache_type.decode, []

    def compare(cache, x):
        out = select_and_attend(cache, x)
        dense = attend_dense(x.q[None, :, 0], [cache.store], [1], cache.spec)[0]
        errors.append(np.abs(out - dense).max())
        return out

    monkeypatch.setattr(cache_type, "decode", compare)
    monkeypatch.setattr(cache_type, "is_dense_at", lambda self, n: False)
    sparse.prefill(tokens(80))
    decoded(sparse, tokens(20, 1))
    assert len(errors) == 20 * N_LAYER and max(errors) < 1e-5


@pytest.mark.parametrize("types", TYPES)
@pytest.mark.parametrize("geometry", sweep(GEOMETRIES, fast=1), ids=str)
def test_prefill_and_decode_attend_to_the_stored_rows(geometry, types):
    """Chunks, decode steps and a second prefill, against f64 attention over what is stored."""
    method = build_method("full", {}, cache_type_k=types[0], cache_type_v=types[1])
    cache, stream = make_cache(method, geometry), Stream(geometry)
    scale = geometry.d**-0.5
    for n, by_prefill in ((100, True), (30, False), (40, True)):
        rows = stream.rows(n)
        first = cache.n
        if by_prefill:
            out = prefill(cache, rows, chunk=33)
        else:
            out = np.stack([decode(cache, rows, i) for i in range(n)], axis=1)
        k, v = (x[..., : geometry.d] for x in (cache.store.keys(), cache.store.values()))
        assert k.shape[1] == first + n
        for i in range(n):
            seen = first + i + 1
            expected = attend_dense_ref(rows[0][:, i], k[:, :seen], v[:, :seen], scale)
            np.testing.assert_allclose(out[:, i], expected, atol=2e-5)
        for stored, given, name in ((k, rows[1], types[0]), (v, rows[2], types[1])):
            error = np.abs(stored[:, first:] - given).max()
            assert error <= ERRORS[name] * np.abs(given).max()


@pytest.mark.skipif(not bf16.is_available(), reason="this CPU has no bf16 products")
@pytest.mark.parametrize("types", [("f16", "f16"), *TYPES])
@pytest.mark.parametrize(("d", "d_v"), [(64, 64), (80, 80), (40, 24), (16, 16)])
def test_a_bf16_prefill_attends_to_the_stored_rows(d, d_v, types):
    """Over several chunks; the rows are as wide as they are, in a store of whole vectors."""
    method = build_method("full", {}, cache_type_k=types[0], cache_type_v=types[1])
    spec = LayerSpec(
        layer=0, n_layer=1, n_head=6, n_head_kv=2, head_dim=d, value_dim=d_v, n_threads=2
    )
    cache, rng = method.layer(spec), np.random.default_rng(0)
    kind = np.empty(0, np.uint16)
    for n in (70, 1, 130):
        q, k, v = (
            as_type_of(kind, rng.standard_normal((heads, n, width)).astype(np.float32))
            for heads, width in ((6, d), (2, d), (2, d_v))
        )
        out = as_f32(attend_chunk(cache, AttnInput(q, k, v, q, k, cache.n)))
        keys, values = cache.store.keys()[..., :d], cache.store.values()[..., :d_v]
        for i in range(n):
            seen = cache.n - n + i + 1
            expected = attend_dense_ref(as_f32(q[:, i]), keys[:, :seen], values[:, :seen], d**-0.5)
            np.testing.assert_allclose(out[:, i], expected, atol=0.03)


@pytest.mark.parametrize("types", TYPES)
def test_repositioned_sinks_are_turned_in_a_copy(types):
    d, n_kv, sinks, budget = 64, 2, 3, 20
    theta = 1e4 ** (-np.arange(d // 2) / (d // 2))
    spec = LayerSpec(
        layer=0, n_layer=1, n_head=4, n_head_kv=n_kv, head_dim=d, value_dim=d, n_threads=1,
        theta=theta,
    )  # fmt: skip
    options = {"reposition": "true", "sinks": str(sinks), "dense_layers": "none"}
    cache = build_method(
        "streaming", options, budget=str(budget), cache_type_k=types[0], cache_type_v=types[1]
    ).layer(spec)
    rng = np.random.default_rng(0)

    def rows(n: int) -> list[np.ndarray]:
        return [rng.standard_normal((heads, n, d)).astype(np.float32) for heads in (4, n_kv, n_kv)]

    q, k, v = rows(60)
    attend_chunk(cache, AttnInput(q, k, v, q, k, 0))
    cache.finish_prefill()
    before, keys = cache.store.k[:, :60].copy(), cache.store.keys().astype(np.float32)
    read, select = [], cache.select

    def seen(q, n):
        idx, *others = select(q, n)
        k = cache.store.k
        np.testing.assert_array_equal(k[:, :60], before)  # a thread may write them to disk
        read.append(cache.store.k_type.read(k[:, idx[0, :sinks]])[..., :d])
        return idx, *others

    cache.select = seen
    q, k, v = rows(1)
    cache.decode(AttnInput(q, k, v, q, k, 60))
    angles = (61 - sinks - budget) * theta
    a, b = keys[:, :sinks, : d // 2], keys[:, :sinks, d // 2 :]
    expected = np.concatenate(
        [a * np.cos(angles) - b * np.sin(angles), a * np.sin(angles) + b * np.cos(angles)], axis=-1
    )
    turned = read[0].astype(np.float32)
    assert np.abs(turned - keys[:, :sinks]).max() > 1
    np.testing.assert_allclose(turned, expected, atol=ERRORS[types[0]] * np.abs(expected).max())
    np.testing.assert_array_equal(cache.store.k[:, :60], before)
    np.testing.assert_array_equal(cache.attended[0][0], [*range(sinks), *range(61 - budget, 61)])


@pytest.mark.parametrize("key_type", ["q8_0", "q4_0"])
@pytest.mark.parametrize("summary", ["minmax", "meanstd"])
def test_quest_summarises_the_stored_keys(summary, key_type):
    """From a prefill, page by page in decode, and after a second prefill."""
    geometry = GEOMETRIES[2]
    options = {"summary": summary, "dense_layers": "none"}
    method = build_method("quest", options, budget="40", cache_type_k=key_type)
    cache, stream = make_cache(method, geometry), Stream(geometry)
    for n, by_prefill in ((150, True), (40, False), (50, True), (20, False)):
        rows = stream.rows(n)
        if by_prefill:
            prefill(cache, rows)
        else:
            for i in range(n):
                decode(cache, rows, i)
        n_page = cache._n_page
        assert n_page == (cache.n - 1) // cache.method.page
        expected = page_summaries_ref(
            cache.store.keys(), method.page, summary == "meanstd", N_SINKS
        )
        for bits, values in zip((cache._hi, cache._lo), expected, strict=True):
            found = bits[:, :n_page].view(np.float16).astype(np.float32)
            np.testing.assert_allclose(found, values[:, :n_page], rtol=1.5e-3, atol=2e-3)


# --- memory and counts ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("types", "row_bytes"),
    [
        (("f16", "f16"), 256), (("q8_0", "q8_0"), 136), (("q8_0", "f16"), 196),
        (("f16", "q8_0"), 196), (("q5_1", "q4_0"), 84), (("q4_0", "q4_0"), 72),
    ],
)  # fmt: skip
@pytest.mark.parametrize("name", [name for name in READERS if name != "h2o"])  # it keeps copies
def test_bytes(name, types, row_bytes, sequence_of):
    sequence = sequence_of(name, budget="100%", dense_layers="none", types=types)
    sequence.prefill(tokens(90))
    decoded(sequence, tokens(5, 1))
    counts = sequence.ledger()
    capacity = sequence.caches[0].store.capacity
    assert counts["bytes_host"] == N_LAYER * 2 * capacity * row_bytes
    assert counts["bytes_read"] == N_LAYER * 2 * sum(range(91, 96)) * row_bytes


def test_bytes_that_choosing_methods_read(sequence_of):
    """topk reads every key and the values of its rows; lfps less than that."""
    both = {}
    for name in ("topk", "lfps"):
        for types in (("f16", "f16"), ("q8_0", "q8_0")):
            sequence = sequence_of(name, budget="10", dense_layers="none", types=types)
            sequence.prefill(tokens(300))
            sequence.decode(1)
            both[name, types[0]] = sequence.ledger()
    n_bytes = {key: counts["bytes_read"] for key, counts in both.items()}
    for size, name in ((128, "f16"), (68, "q8_0")):
        # Layer by layer: keys of 2 kv heads, then K and V of 14 rows for each of 6 heads.
        assert n_bytes["topk", name] == N_LAYER * (2 * 301 + 6 * 14 * 2) * size
    of_rows = {}  # what lfps' bypass tests and tables read is not said in these types
    for name in ("f16", "q8_0"):
        counts = both["lfps", name]
        index = 4 * (counts["bounds_read"] + counts["entries_read"])
        index += 4 * 64 * 64 * counts["heads_tested"]
        of_rows[name] = n_bytes["lfps", name] - index
    assert of_rows["q8_0"] >= 68 * both["lfps", "q8_0"]["rows_attended"]
    assert of_rows["q8_0"] < of_rows["f16"]


# --- what is refused ------------------------------------------------------------------------------


def test_a_method_gives_its_types_to_every_layer():
    method = build_method("topk", {}, cache_type_k="q8_0")
    spec = LayerSpec(
        layer=0, n_layer=4, n_head=2, n_head_kv=1, head_dim=80, value_dim=80, n_threads=1
    )
    for layer in range(4):  # dense ones and others
        cache = method.layer(replace(spec, layer=layer))
        assert (cache.store.k.shape[2], cache.store.v.shape[2]) == (86, 80)
        assert (cache.store.k.dtype, cache.store.v.dtype) == (np.uint8, np.float16)
