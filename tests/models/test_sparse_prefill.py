"""Sparse attention of a prefill: the rows that it chooses, and dense attention to these."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from sparsekv_cli.cache.layer import DenseCache
from sparsekv_cli.cache.spec import AttnInput, LayerSpec
from sparsekv_cli.cache.store import KVStore
from sparsekv_cli.cpu.attention.flash import attend_causal_ref
from sparsekv_cli.methods.quest import Quest
from sparsekv_cli.model import load_model
from sparsekv_cli.models import decoder
from sparsekv_cli.models.reading import sparse_prefill
from sparsekv_cli.models.reading.sparse_prefill import (
    CHUNK,
    PAGE,
    SparseAttention,
    choose_pages_ref,
    mean_queries,
    mean_queries_ref,
    rows_attended,
)
from sparsekv_cli.settings.config import SessionConfig

N, N_HEAD, N_KV, D, BUDGET = 4096, 4, 2, 32, 2048
N_FORCED = 1 + sparse_prefill.RECENT // PAGE  # pages that are always chosen
RNG = np.random.default_rng(0)
Q, K, V = (RNG.standard_normal((heads, N, D)).astype(np.float32) for heads in (N_HEAD, N_KV, N_KV))
PROMPT = RNG.integers(3, 300, 7 * CHUNK + 40).tolist()


def spec_of(**changed: Any) -> LayerSpec:
    sizes: dict[str, Any] = {"full_place": 2, "n_full": 3}
    return LayerSpec(2, 3, N_HEAD, N_KV, D, D, 2, **(sizes | changed))


def attend(cache: Any, x: AttnInput) -> np.ndarray:
    return decoder.attend_causal(x.q, cache.extend(x), cache.spec)


def rows_at(start: int, stop: int) -> AttnInput:
    q, k, v = (np.ascontiguousarray(each[:, start:stop]) for each in (Q, K, V))
    return AttnInput(q, k, v, q, k, start)


def prefilled(spec: LayerSpec, n: int = N, budget: int = BUDGET) -> tuple[np.ndarray, Any]:
    """The attention of all rows, in chunks, and their cache."""
    cache, sparse = DenseCache(spec), SparseAttention(attend, budget, n)
    parts = [sparse(cache, rows_at(at, min(n, at + CHUNK))) for at in range(0, n, CHUNK)]
    return np.concatenate(parts, axis=1), cache


@pytest.mark.parametrize("cache_type", ["f16", "q8_0", "q5_1", "q4_0"])
def test_a_chunk_attends_to_the_chosen_rows_and_itself(
    cache_type: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    at, choices = 6 * CHUNK, dict[int, np.ndarray]()
    choose = SparseAttention._choose

    def noted(self: SparseAttention, store: Any, x: AttnInput, spec: LayerSpec) -> np.ndarray:
        choices[x.pos] = choose(self, store, x, spec)
        return choices[x.pos]

    monkeypatch.setattr(SparseAttention, "_choose", noted)
    found, cache = prefilled(spec_of(cache_type_k=cache_type, cache_type_v=cache_type))
    k, v = cache.store.keys().astype(np.float32), cache.store.values().astype(np.float32)
    means = mean_queries_ref(Q[:, at : at + CHUNK])
    naive = choose_pages_ref(means, k[:, :at], BUDGET // PAGE)
    pages = choices[at]
    for head, of_head in zip(naive, pages, strict=True):
        assert of_head[0] == 0 and (np.diff(of_head) > 0).all()
        same = len(np.intersect1d(head, of_head)) - N_FORCED
        assert same > 0.95 * (BUDGET // PAGE - N_FORCED)  # bytes move pages near the last one
    rows = (pages[:, :, None] * PAGE + np.arange(PAGE)).reshape(N_KV, -1)
    chosen = [
        np.concatenate(
            [np.take_along_axis(x[:, :at], rows[:, :, None], 1), x[:, at : at + CHUNK]], 1
        )
        for x in (k, v)
    ]
    expected = attend_causal_ref(Q[:, at : at + CHUNK], *chosen, D**-0.5)
    np.testing.assert_allclose(found[:, at : at + CHUNK], expected, atol=2e-3)
    dense = attend_causal_ref(
        Q[:, at : at + CHUNK], k[:, : at + CHUNK], v[:, : at + CHUNK], D**-0.5
    )
    assert np.abs(found[:, at : at + CHUNK] - dense).max() > 0.01, "it is sparse"


@pytest.mark.parametrize("n", [512, 472, 4])
def test_mean_queries(n: int) -> None:
    found = mean_queries(Q[:, :n])
    assert found.shape == (N_HEAD, -(-n // 128), D)
    np.testing.assert_allclose(found, mean_queries_ref(Q[:, :n]), atol=1e-6)


def test_what_stays_dense() -> None:
    dense, _ = prefilled(spec_of(), budget=2 * N)
    for changed in ({"full_place": 1}, {"kind": "window", "window": N}):
        np.testing.assert_array_equal(prefilled(spec_of(**changed))[0], dense)
    cache = DenseCache(spec_of())
    SparseAttention(attend, N, N)(cache, rows_at(0, 2500))
    odd = SparseAttention(attend, BUDGET, N)(cache, rows_at(2500, 2560))  # it continues a prompt
    np.testing.assert_array_equal(odd, dense[:, 2500:2560])
    n = N - 40  # the last chunk has 472 rows
    found, _ = prefilled(spec_of(), n)
    np.testing.assert_array_equal(found[:, : BUDGET + CHUNK], dense[:, : BUDGET + CHUNK])
    np.testing.assert_array_equal(found[:, N - 2 * CHUNK :], dense[:, N - 2 * CHUNK : n])
    middle = slice(BUDGET + CHUNK, N - 2 * CHUNK)
    assert np.abs(found[:, middle] - dense[:, middle]).max(axis=(0, 2)).min() > 0


def test_first_and_last_pages_and_ties() -> None:
    keys = np.zeros((1, 3 * sparse_prefill.RECENT, D), np.float32)
    pages = choose_pages_ref(np.ones((1, 1, D)), keys, N_FORCED + 1)
    n_page, n_last = keys.shape[1] // PAGE, sparse_prefill.RECENT // PAGE
    assert pages[0].tolist() == [0, 1, *range(n_page - n_last, n_page)]
    store, spec = KVStore(LayerSpec(0, 1, 1, 1, D, D, 1)), LayerSpec(0, 1, 1, 1, D, D, 1)
    store.reserve(keys.shape[1])
    store.k[:] = 0
    summaries = sparse_prefill.PageSummaries(n_page)
    summaries.extend(store, n_page, spec)
    q = np.ones((1, 16, D), np.float32)
    found = sparse_prefill.PageChoice()(q, summaries, n_page, N_FORCED + 1, spec)
    np.testing.assert_array_equal(found, pages)
    layers = [SimpleNamespace(kind="full", n_head_kv=1, head_dim=D)] * 3  # two of them stay dense
    held = summaries.codes.nbytes + summaries.scales.nbytes
    assert sparse_prefill.summary_bytes(layers, keys.shape[1]) == held


def test_summaries_are_made_once_and_dropped_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """The layers take turns, each with two chunks at a time, as in a long prompt."""
    made, code_pages = list[tuple[int, int]](), sparse_prefill.byte_pages.code_pages
    caches = [DenseCache(replace(spec_of(), layer=layer)) for layer in range(2)]
    sparse, found = SparseAttention(attend, BUDGET, N), list[list[np.ndarray]]()

    def noted(layout: Any, first: int, last: int, *others: Any) -> None:
        made.append((first, last))
        code_pages(layout, first, last, *others)

    monkeypatch.setattr(sparse_prefill.byte_pages, "code_pages", noted)
    for at in range(0, N, 2 * CHUNK):
        chunks = [rows_at(each, each + CHUNK) for each in (at, at + CHUNK)]
        found.append([sparse(cache, chunk) for cache in caches for chunk in chunks])
    tiles = [at // PAGE // 16 for at in range(BUDGET + CHUNK, N - CHUNK, CHUNK)]
    of_layer = list(zip([0, *tiles[:-1]], tiles, strict=True))
    assert sorted(made) == sorted(2 * of_layer) and not sparse._summaries
    alone = prefilled(spec_of())[0]
    for layer in range(2):
        rows = [part for parts in found for part in parts[2 * layer :][:2]]
        np.testing.assert_array_equal(np.concatenate(rows, axis=1), alone)


def test_a_layer_that_reads_other_rows_takes_their_choice() -> None:
    own, reader = DenseCache(spec_of()), DenseCache(spec_of(source=2))
    sparse = SparseAttention(attend, BUDGET, N, [2])
    for at in range(0, N, CHUNK):
        x = rows_at(at, at + CHUNK)
        first = sparse(own, x)
        np.testing.assert_array_equal(sparse(reader, x), first)


def test_a_reader_of_a_dense_layer_chooses_its_own_rows() -> None:
    sparse, own, reader = (
        SparseAttention(attend, BUDGET, N, [2]),
        *map(DenseCache, (spec_of(full_place=1), spec_of(source=2))),
    )
    for at in range(0, 7 * CHUNK, CHUNK):
        dense, found = (sparse(cache, rows_at(at, at + CHUNK)) for cache in (own, reader))
    np.testing.assert_array_equal(found, prefilled(spec_of())[0][:, at : at + CHUNK])
    assert np.abs(found - dense).max() > 0.01


def test_layers_with_other_numbers_of_heads() -> None:
    """The rows of a chunk are gathered anew for each."""
    sparse, at = SparseAttention(attend, BUDGET, N), 6 * CHUNK
    for layer, n_head_kv in enumerate((2, 1, 2)):
        cache = DenseCache(replace(spec_of(), layer=layer, n_head_kv=n_head_kv))
        past, x = (
            each._replace(k=each.k[:n_head_kv], v=each.v[:n_head_kv])
            for each in (rows_at(0, at), rows_at(at, at + CHUNK))
        )
        other = DenseCache(cache.spec)
        cache.extend(past)
        other.extend(past)
        alone = SparseAttention(attend, BUDGET, N)(other, x)
        np.testing.assert_array_equal(sparse(cache, x), alone)


def test_a_cache_that_has_dropped_rows_is_dense() -> None:
    """A method that evicts has fewer rows than tokens when a second prompt comes."""
    caches, x = [DenseCache(spec_of()) for _ in range(2)], rows_at(6 * CHUNK, 7 * CHUNK)
    for cache in caches:
        cache.extend(rows_at(0, 1003))
    found = SparseAttention(attend, BUDGET, N)(caches[0], x)
    np.testing.assert_array_equal(found, attend(caches[1], x))


# --- a model --------------------------------------------------------------------------------------


@pytest.fixture
def model(tiny_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> Any:
    """Opens a tiny model of four layers that reads sparsely, or densely."""
    monkeypatch.setattr(sparse_prefill, "RECENT", 256)
    path = tiny_model(n_layer=4, n_ctx=4096)

    def open_one(reading: str, **options: Any) -> Any:
        if reading != "dense":
            options["prefill_budget"] = 2048
        config = SessionConfig(prefill_attention=reading, **options)
        return load_model(path, Quest(), config)

    return open_one


def test_chunks_begin_at_multiples_of_their_size(model: Any) -> None:
    """Also those of a prompt that continues another one."""
    sparse = model("sparse", chunk=100)
    sequence, places = sparse.sequence(), []
    real = sparse.decoder.attend
    sparse.decoder.attend = lambda cache, x: (places.append((x.pos, x.q.shape[1])), real(cache, x))[
        1
    ]
    sequence.prefill(PROMPT[:700])
    sequence.prefill(PROMPT[:900])
    assert set(places) == {(0, 512), (512, 188), (700, 324), (1024, 512), (1536, 64)}
    sparse.close()


def test_rows_are_not_those_of_a_dense_prompt(model: Any) -> None:
    models = [model(reading) for reading in ("sparse", "dense")]
    sparse, dense = (each.engine.identity(each.method) for each in models)
    assert dense.serves(sparse) and not sparse.serves(dense)
    rows = []
    for each in models:
        sequence = each.sequence()
        sequence.prefill(PROMPT)
        rows.append([cache.store.keys() for cache in sequence.caches])
        each.close()
    for i, (own, other) in enumerate(zip(*rows, strict=True)):
        assert np.array_equal(own, other) == (i < 3), "layer 2 is the first sparse one"


def test_auto_is_sparse_from_some_length_on(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    n = len(PROMPT)
    monkeypatch.setattr(sparse_prefill, "SHORTEST", {True: n, False: n})
    models = {reading: model(reading) for reading in ("auto", "sparse", "dense")}
    for ids, same in ((PROMPT, "sparse"), (PROMPT[:-1], "dense")):
        keys = {}
        for reading, each in models.items():
            sequence = each.sequence()
            sequence.prefill(ids)
            keys[reading] = sequence.caches[3].store.keys()
        assert not np.array_equal(keys["sparse"], keys["dense"])
        assert np.array_equal(keys["auto"], keys[same])
    sparse, auto = (models[r].engine.identity(models[r].method) for r in ("sparse", "auto"))
    assert auto == sparse
    for each in models.values():
        each.close()


@pytest.mark.parametrize(("reading", "budget"), [("sparse", 1000), ("dense", 4096)])
def test_a_budget_that_is_small_or_not_used_is_an_error(reading: str, budget: int) -> None:
    with pytest.raises(ValueError, match=f"prefill_budget = {budget}"):
        SessionConfig(prefill_attention=reading, prefill_budget=budget)


@pytest.mark.parametrize(("n", "budget"), [(700, 2048), (6000, 2048), (9000, 8192), (5120, 2048)])
def test_rows_attended_are_those_of_a_prompt(n, budget):
    def past(start: int) -> int:
        is_sparse = budget < start < (n // CHUNK - 1) * CHUNK
        return budget if is_sparse else start

    expected = sum(past(row // CHUNK * CHUNK) + row % CHUNK + 0.5 for row in range(n))
    assert rows_attended(n, budget) == expected
