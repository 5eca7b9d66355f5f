"""SALS and its naive form, its limiting cases, its memory, turns and rewinds."""

import tracemalloc
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from chunks import attend_chunk
from layer_rows import Geometry, LowRankStream
from layer_stream import chunk_input, decode, prefill
from layer_stream import make_cache as make_layer
from naive_pair import TOLERANCE
from sals_pair import SALSPair, stored
from sweeps import sweep

from sparsekv_cli.cache.spec import AttnInput, Budget
from sparsekv_cli.cache.store import padded
from sparsekv_cli.cpu.sals.values import head_bytes
from sparsekv_cli.errors import SparseKVError
from sparsekv_cli.methods import build_method
from sparsekv_cli.methods.naive.base import rotate, softmax
from sparsekv_cli.methods.naive.sals import NaiveSALS
from sparsekv_cli.methods.sals import SALS, UNDO

PAPER = {"basis": "pca", "score": "paper", "exact_sinks": False}
PLAIN = Geometry(9, 3, 64, n_rot=64)
CASES: list[tuple[Geometry, int, dict[str, Any]]] = [  # of a prompt of so many rows
    (PLAIN, 60, {}),  # nothing is compressed at first
    (Geometry(8, 2, 80, n_rot=80), 520, {"budget": Budget(tokens=30)}),  # beyond a chunk of scores
    (Geometry(8, 1, 128, n_rot=128), 130, {"bits": 2, "rank": 24}),
    (Geometry(4, 4, 64, n_rot=48, rope_scale=1.25), 90, {"rank": 50, "score_rank": 17}),
    (PLAIN, 200, PAPER),
    (Geometry(6, 2, 64, n_rot=64), 100,
     {"exact_sinks": False, "sinks": 5, "window": 20, "bits": 16}),
    (Geometry(3, 3, 64, n_rot=64), 30, {"sinks": 0, "window": 1, "budget": Budget(tokens=1)}),
]  # fmt: skip
N_STEPS = 90  # of each turn


def make_method(**options: Any) -> SALS:
    return SALS(**({"budget": Budget(tokens=40)} | options))


def make_cache(geometry: Geometry = PLAIN, n_threads: int = 1, **options: Any) -> Any:
    return make_layer(make_method(**options), geometry, n_threads)


@pytest.mark.slow
@pytest.mark.parametrize(("geometry", "n_prefill", "options"), sweep(CASES, fast=1), ids=str)
def test_sals_equals_its_naive_form(geometry, n_prefill, options):
    """Through the first compression, tiles of 16, chunks of 512, a second turn."""
    pair = SALSPair(make_method(**options), geometry)
    pair.prefill(n_prefill)
    is_sparse = pair.decode(N_STEPS)["sparse"]
    n_encoded = pair.seen["encoded"]
    pair.prefill(37)
    assert pair.seen["encoded"] == n_encoded + 37 or not is_sparse
    seen, n_encoded = pair.decode(N_STEPS), pair.seen["encoded"]
    assert pair.cache.n == n_prefill + 37 + 2 * N_STEPS
    assert seen["sparse"] == is_sparse + N_STEPS and seen["left out"] >= N_STEPS
    assert n_encoded == pair.cache.n - pair.method.window - pair.naive.first
    if n_prefill == 60:
        assert 0 < is_sparse < N_STEPS, "no step around the first compression"


@pytest.mark.parametrize("preset", ["tuned", "paper"])
def test_threads_change_no_bit(preset):
    outs = []
    for n_threads in (1, 2):
        options = PAPER if preset == "paper" else {}
        cache, stream = make_cache(PLAIN, n_threads, **options), LowRankStream(PLAIN)
        prefill(cache, stream.rows(700))
        outs.append(np.stack([decode(cache, stream.rows(1)).copy() for _ in range(30)]))
    np.testing.assert_array_equal(*outs)


# --- limiting cases -------------------------------------------------------------------------------


WHOLE_LAYERS = [PLAIN, Geometry(8, 1, 80, n_rot=80), Geometry(4, 4, 64, n_rot=48, rope_scale=1.25)]
HALF_STEP = 2.0**-11 / np.sqrt(3)  # of f16: the largest standard deviation of relative rounding


def rounding(naive: NaiveSALS, full: np.ndarray) -> np.ndarray:
    """Standard deviation (H, d_v) of what latents of 16 bits and f16 keys do to ``full``.

    To first order: each column of a latent errs by itself, relative to the largest one, and each
    dim of a key, relative to its size; the errors shift scores, and shifted scores exchange weight
    between values.
    """
    keys, values, q, spec = naive.k, naive.v, naive.q, naive.spec
    n_head, d = q.shape
    shift = np.zeros((n_head, naive.n))  # of scores, standard deviation
    for i, latent in enumerate(naive.latents):
        p = naive.first + i
        turned = rotate(q[:, None], np.array([-p]), spec.theta, spec.rope_scale)[:, 0]
        for h in range(n_head):
            g = h // naive.group
            by_column = naive.d[g * d : (g + 1) * d].T @ turned[h]
            by_column *= np.abs(latent).max() / (127 * 256) / np.sqrt(12)
            by_dim = HALF_STEP * q[h] * keys[g, p]
            shift[h, p] = np.sqrt((by_column**2).sum() + (by_dim**2).sum())
    out = np.empty_like(full)
    for h in range(n_head):
        g = h // naive.group
        weights = softmax(naive.scores(h, q, keys)) * shift[h] / np.sqrt(d)
        out[h] = np.sqrt((weights**2) @ (values[g] - full[h]) ** 2)
    return out


def errors_of_everything(layer: Geometry, rank: int, basis: str) -> tuple[np.ndarray, np.ndarray]:
    """40 steps with all rows attended and values in f16: (steps, H, d_v) each.

    What the step differs by from the naive form, which has the same latents; and what it differs by
    from attention over the keys that the latents were made of, in standard deviations of rounding.
    """
    options = {"rank": rank, "score_rank": rank, "bits": 16, "budget": Budget(tokens=10**6)}
    pair = SALSPair(make_method(basis=basis, **options), layer)
    naive, to_naive, to_full = pair.naive, [], []
    pair.prefill(150)
    for _ in range(40):
        rows = pair.stream.rows(1)
        out = decode(pair.cache, rows)
        choices = naive.choose(chunk_input(rows, naive.n))
        pair.check_stored()
        to_naive.append(out - naive.attend(choices))
        full = np.stack([
            softmax(naive.scores(h, naive.q, naive.k)) @ naive.v[h // naive.group]
            for h in range(naive.n_head)
        ])  # fmt: skip
        to_full.append((out - full) / (rounding(naive, full) + 1e-6))
    assert pair.cache.attended[0].shape[1] == 190 and len(naive.latents) == 190 - 16 - 64
    return np.array(to_naive), np.array(to_full)


@pytest.mark.parametrize("layer", sweep(WHOLE_LAYERS), ids=str)
@pytest.mark.parametrize("basis", ["diag", "pca"])
def test_everything_kept_and_attended_equals_full(layer, basis, monkeypatch):
    """r = G d, values in f16, all latents critical: what remains is rounding.

    How much that is depends on the eigenvectors, of which LAPACK has other ones on another machine;
    so it is held against what rounding does to these, not against a number.
    """
    for form in (SALS, NaiveSALS):
        monkeypatch.setattr(form, "is_dense_at", lambda self, n: False)
    to_naive, to_full = errors_of_everything(layer, layer.n_head_kv * layer.d, basis)
    assert np.abs(to_naive).max() < TOLERANCE["sals"]
    assert np.sqrt(np.mean(to_full**2)) < 1 and np.abs(to_full).max() < 6


@pytest.mark.parametrize("layer", WHOLE_LAYERS, ids=str)
@pytest.mark.parametrize("basis", ["diag", "pca"])
def test_a_missing_column_is_more_than_rounding(layer, basis, monkeypatch):
    """The smallest of all columns left out: the bound of the test above notices."""
    for form in (SALS, NaiveSALS):
        monkeypatch.setattr(form, "is_dense_at", lambda self, n: False)
    to_naive, to_full = errors_of_everything(layer, layer.n_head_kv * layer.d - 1, basis)
    assert np.abs(to_naive).max() < TOLERANCE["sals"]
    assert np.sqrt(np.mean(to_full**2)) > 2 and np.abs(to_full).max() > 12


# --- memory ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("bits", "rank", "row_bytes"), [(4, 48, 220), (2, 24, 124)])
def test_resident_bytes(bits, rank, row_bytes):
    """8K tokens of the default model's layer: of f16 rows, exact ones and the last step's remain.

    Of the exact ones there is a copy, so that the sequence can go back to the end of the prompt.
    """
    n = 8192
    rng = np.random.default_rng(0)
    calibrated = make_cache().spec
    x = rng.standard_normal((3, 1024, 64)).astype(np.float32)
    method = SALS(bits=bits, rank=rank)
    stream = LowRankStream(PLAIN)
    stream.position = n
    token = stream.rows(1)
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    cache = method.layer(calibrated)
    cache.reserve(n + 512)  # as a sequence does
    for start in range(0, n, 1024):
        cache.extend(AttnInput(x, x, x, x, x, start))
    peak = tracemalloc.get_traced_memory()[1] - before
    cache.finish_prefill()
    decode(cache, token)
    held = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()

    exact = 2 * (16 + 64 + UNDO) * 3 * 2 * 64 * 2
    formula = (n - 80) * row_bytes + exact + (432 + 16) * 768
    memory = cache.memory()
    assert row_bytes == 2 * rank + 4 + 3 * head_bytes(64, bits)
    assert abs(memory.host - formula) < 0.1 * formula
    assert abs(held - memory.host - memory.index) < 0.02 * held
    matrices = 192 * padded(rank) + rank * (192 + 16)
    matrices += cache._blocks.decode.size + cache._blocks.scales.size
    assert memory.index == 4 * matrices
    assert memory.host < 0.4 * n * 768 and peak > n * 768


def test_memory_grows_by_the_row():
    cache, stream = make_cache(), LowRankStream(PLAIN)
    prefill(cache, stream.rows(200))
    sizes = []
    for _ in range(1200):
        decode(cache, stream.rows(1))
        sizes.append(cache.memory().host)
    assert len(set(sizes)) < 8, "grows in steps"
    capacity = 17 / 16 * (cache.n - 80) + 280
    assert sizes[-1] < capacity * 220 + (2 * 96 + 56) * 768


# --- turns and rewinds ----------------------------------------------------------------------------


def test_a_later_prefill_keeps_the_latents():
    """A short one, a long one, and one that is interrupted."""
    cache, stream = make_cache(), LowRankStream(PLAIN)
    prefill(cache, stream.rows(300))
    for n_new in (3, 200):
        before = stored(cache)
        prefill(cache, stream.rows(n_new))
        after = stored(cache)
        assert len(after[0]) == len(before[0]) + n_new == cache.n - 16 - 64
        for old, new in zip(before, after, strict=True):
            np.testing.assert_array_equal(new[: len(old)], old)
        assert cache.store.n == 0 and cache.store.nbytes == 0
    assert cache.counters()["rows_restored"] == (300 - 80) + (303 - 80)


@pytest.mark.parametrize("n_chunks", [1, 2])
def test_an_interrupted_prefill_changes_nothing(n_chunks):
    caches = [make_cache() for _ in range(2)]
    stream = LowRankStream(PLAIN)
    rows = stream.rows(300)
    for cache in caches:
        prefill(cache, rows)
    cache, other = caches
    for i in range(n_chunks):
        part = (x[:, 64 * i : 64 * (i + 1)].copy() for x in rows)
        attend_chunk(cache, AttnInput(*part, cache.n))
    assert cache.n == 300 + 64 * n_chunks
    assert cache.truncate(300) == 300 == cache.n
    for _ in range(5):
        token = stream.rows(1)
        np.testing.assert_array_equal(decode(cache, token), decode(other, token))
    turn = stream.rows(20)
    np.testing.assert_array_equal(prefill(cache, turn), prefill(other, turn))


@pytest.mark.parametrize("back", [1, 7, UNDO])
def test_rewinding_a_little_is_exact(back):
    """Whatever was decoded in between, the same tokens give the same bits again."""
    cache, stream = make_cache(), LowRankStream(PLAIN)
    prefill(cache, stream.rows(300))
    for _ in range(20):
        decode(cache, stream.rows(1))
    tokens = [stream.rows(1) for _ in range(back + 30)]
    first = [decode(cache, token) for token in tokens[:back]]
    assert cache.truncate(320) == 320 == cache.n
    again = [decode(cache, token) for token in tokens[:back]]
    np.testing.assert_array_equal(first, again)
    assert len(stored(cache)[0]) == cache.n - 80


@pytest.mark.parametrize("n_prompt", [300, 130, 90])
def test_rewinding_to_the_end_of_the_prompt_is_exact(n_prompt):
    """Of a long one; and of shorter ones, whose rows stay exact until an answer comes."""
    cache, stream = make_cache(), LowRankStream(PLAIN)
    assert cache.method.is_dense_at(120) and not cache.method.is_dense_at(121)
    prefill(cache, stream.rows(n_prompt))
    before = cache.memory()
    tokens = [stream.rows(1) for _ in range(200)]
    first = [decode(cache, token) for token in tokens]
    for n_steps in (200, 100):
        assert cache.truncate(n_prompt) == n_prompt == cache.n
        again = [decode(cache, token) for token in tokens[:n_steps]]
        np.testing.assert_array_equal(first[:n_steps], again)
    cache.truncate(n_prompt)
    if n_prompt < 120:
        assert cache.memory().host < before.host
    prefill(cache, stream.rows(10))
    assert cache.n == n_prompt + 10


@pytest.mark.parametrize("keep", [583, 400, 310, 299, 16, 1])
def test_where_exact_rows_are_gone_a_rewind_changes_nothing(keep):
    cache, other = make_cache(), make_cache()
    streams = [LowRankStream(PLAIN) for _ in range(2)]
    for each, stream in zip((cache, other), streams, strict=True):
        prefill(each, stream.rows(300))
        for _ in range(300):
            decode(each, stream.rows(1))
    assert cache.truncate(keep) == 0 and cache.n == 600
    tokens = [stream.rows(1) for stream in streams]
    np.testing.assert_array_equal(decode(cache, tokens[0]), decode(other, tokens[1]))
    assert cache.truncate(601 - UNDO) == 601 - UNDO


# --- ledger, options ------------------------------------------------------------------------------


def test_ledger():
    cache, stream = make_cache(), LowRankStream(PLAIN)
    prefill(cache, stream.rows(300))
    for _ in range(10):
        decode(cache, stream.rows(1))
    counts = cache.counters()
    lengths = range(301, 311)
    assert counts["rows_total"] == 9 * sum(lengths)
    assert counts["sparse_rows_attended"] == 10 * 9 * (16 + 40 + 64)
    assert counts["rows_scored"] == 9 * sum(n - 80 for n in lengths)
    assert counts["rows_encoded"] == 310 - 80
    assert 40 < counts["rows_reconstructed"] < 400  # the others were chosen the step before
    n_bytes = 10 * (120 * 768 + cache.memory().index) + 220 * counts["rows_reconstructed"]
    assert counts["bytes_read"] == n_bytes + 28 * sum(n - 80 for n in lengths)


def test_ledger_of_the_papers_scores():
    cache, stream = make_cache(**PAPER), LowRankStream(PLAIN)
    prefill(cache, stream.rows(300))
    decode(cache, stream.rows(1))
    assert cache.counters()["rows_scored"] == 301 - 64  # one set of scores a layer
    assert cache.counters()["rows_attended"] == 9 * (16 + 40 + 64)


def test_score_rank_beyond_the_rank():
    with pytest.raises(ValueError, match="score_rank = 30: must be at most the rank"):
        build_method("sals", {"rank": "24", "score_rank": "30"})
    cache = make_cache(rank=1000, score_rank=999)
    assert (cache._rank, cache._score_rank) == (192, 192)


def test_a_layer_without_calibration_is_refused():
    spec = replace(make_cache().spec, calibration={})
    with pytest.raises(SparseKVError, match="no calibration"):
        SALS().layer(spec)
