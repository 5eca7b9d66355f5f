"""FAEDKV and its naive form, its limiting cases, shares, memory, ledger and calibration."""

import numpy as np
import pytest
from chunks import attend_chunk
from faedkv_layer import EVERY_BIN, uniform
from layer_calibration import of_frequencies
from layer_rows import GEOMETRIES as COMMON
from layer_rows import Geometry, Stream
from layer_stream import decode, make_cache, prefill
from naive_pair import Pair
from sweeps import crossed, sweep

from sparsekv_cli.cache.layer import DenseCache
from sparsekv_cli.cache.spec import AttnInput, Budget
from sparsekv_cli.cache.store import padded
from sparsekv_cli.cpu.faedkv import frequencies
from sparsekv_cli.methods.faedkv import FAEDKV

GEOMETRIES = [Geometry(4, 4, 64), *COMMON[1:]]


class FAEDKVPair(Pair):
    """Also holds numbers of exact rows against each other. Additive rows are f32.

    exact: the numbers that occurred.
    """

    def __init__(self, method: FAEDKV, geometry: Geometry) -> None:
        super().__init__(method, geometry)
        self.exact: set[int] = set()

    def prefill(self, n: int, chunk: int = 64):
        # Old tokens come back as f16.
        self.tolerance = 2e-3 if self.naive.segments else 2e-5
        rows = super().prefill(n, chunk)
        self.tolerance = 2e-3 if self.method.update == "block" else 2e-5
        return rows

    def compare(self, choices) -> None:
        super().compare(choices)
        n_exact = self.naive.n - self.naive.first_exact + self.method.sinks
        assert self.cache.store.n == n_exact
        self.exact.add(n_exact)


# --- against the naive form -----------------------------------------------------------------------


@pytest.mark.parametrize("update", ["block", "additive"])
@pytest.mark.parametrize(("geometry", "n_prefill"), crossed(GEOMETRIES, [40, 150, 700]), ids=str)
def test_faedkv_equals_its_naive_form(geometry, update, n_prefill):
    """Past the borders of aging, of blocks, and of an additive basis."""
    pair = FAEDKVPair(uniform(0.25, update, block=48), geometry)
    pair.prefill(n_prefill)
    pair.decode(300)
    cache, method, segments = pair.cache, pair.method, pair.naive.segments
    first, n_waiting = method.sinks + method.recent, 48 if update == "block" else 8
    assert set(range(first, first + n_waiting)) <= pair.exact
    assert max(pair.exact) < first + n_waiting or n_prefill == 40  # it grows up to there first
    assert cache.spectrum.n_segments == len(segments) >= 5
    lengths = [segment.length for segment in segments]
    is_long = n_prefill == 700 and update == "additive"
    assert (max(lengths) > 512) == is_long and lengths.count(48) >= 4


@pytest.mark.parametrize("update", ["block", "additive"])
@pytest.mark.parametrize("share", [0.001, 0.03, 0.6, 0.99999])
def test_other_shares(share, update):
    pair = FAEDKVPair(uniform(share, update, block=32, sinks=3, recent=20), Geometry(6, 2, 64))
    pair.prefill(620)
    pair.decode(80)


@pytest.mark.parametrize("update", ["block", "additive"])
def test_later_turns(update):
    """A turn attends to what is left of the old tokens; its own tokens age from exact rows."""
    pair = FAEDKVPair(uniform(0.3, update, block=32), Geometry(6, 2, 64))
    for n_new in (200, 1, 30, 700, 90):
        pair.prefill(n_new)
        pair.decode(20)
    assert any(s.length > 512 for s in pair.naive.segments) == (update == "additive")


def test_a_turn_does_not_transform_old_tokens_again():
    geometry, stream = Geometry(2, 2, 64), Stream(Geometry(2, 2, 64))
    cache = make_cache(uniform(0.25), geometry)
    prefill(cache, stream.rows(900))
    assert cache.spectrum is not None
    n_tokens, before = cache.spectrum.n_tokens, cache.spectrum.tokens()
    for _ in range(3):
        prefill(cache, stream.rows(200))
    assert cache.spectrum.n_tokens > n_tokens
    for now, then in zip(cache.spectrum.tokens(), before, strict=True):
        np.testing.assert_array_equal(now[:, :n_tokens], then)


def test_threads_change_nothing_but_rounding():
    geometry = Geometry(9, 3, 64)
    outs = []
    for n_threads in (1, 2):
        stream, cache = Stream(geometry), make_cache(uniform(0.25), geometry, n_threads)
        prefill(cache, stream.rows(1900))
        outs.append(np.stack([decode(cache, stream.rows(1)).copy() for _ in range(10)]))
    np.testing.assert_allclose(*outs, atol=1e-5)


# --- limits ---------------------------------------------------------------------------------------


def both(method: FAEDKV, geometry: Geometry, n_prefill: int, n_steps: int):
    """Outputs of the method and of dense attention, and the method's cache."""
    stream, cache = Stream(geometry, 5), make_cache(method, geometry)
    dense = DenseCache(cache.spec)
    rows = stream.rows(n_prefill)
    outs = [prefill(cache, rows)], [prefill(dense, rows)]
    for _ in range(n_steps):
        rows = stream.rows(1)
        outs[0].append(decode(cache, rows)[:, None].copy())
        outs[1].append(decode(dense, rows)[:, None].copy())
    return *(np.concatenate(parts, axis=1) for parts in outs), cache


@pytest.mark.parametrize("update", ["block", "additive"])
@pytest.mark.parametrize("geometry", sweep(GEOMETRIES, fast=1), ids=str)
def test_every_bin_equals_dense(geometry, update):
    method = FAEDKV(budget=EVERY_BIN, allocation="uniform", update=update, block=32)
    out, dense, cache = both(method, geometry, 800, 150)
    assert cache.spectrum is not None and cache.spectrum.n_tokens > 800
    np.testing.assert_allclose(out, dense, atol=1.5e-3 if update == "block" else 1e-5)


@pytest.mark.parametrize("update", ["block", "additive"])
def test_short_contexts_are_dense(update):
    """Until 10 sinks, 50 recent tokens and those that wait are there."""
    method = uniform(0.25, update)
    n_waiting = method.block if update == "block" else 8
    n_prefill = 60 + n_waiting - 30
    out, dense, cache = both(method, Geometry(6, 2, 64), n_prefill, 40)
    differing = np.flatnonzero((out != dense).any(axis=(0, 2)))
    assert differing.min() == 60 + n_waiting - 1 and cache.spectrum is not None


@pytest.mark.parametrize("n_prefill", [1, 5, 11, 61])
@pytest.mark.parametrize("update", ["block", "additive"])
def test_tiny_prompts(n_prefill, update):
    out, _, cache = both(uniform(0.1, update, block=16), Geometry(4, 2, 64), n_prefill, 150)
    assert np.isfinite(out).all() and cache.spectrum is not None


def test_less_share_is_farther_from_dense():
    errors = []
    for share in (0.05, 0.25, 0.5, 0.9):
        out, dense, _ = both(uniform(share), Geometry(6, 2, 64), 900, 5)
        errors.append(np.abs(out - dense)[:, 900:].mean())
    assert errors == sorted(errors, reverse=True) and errors[-1] > 1e-3


# --- shares of the budget -------------------------------------------------------------------------


def test_layers_share_the_budget():
    """Layer 2 is whole at a budget of a quarter of four layers; then 0, 1 and 3."""
    for budget, shares in ((0.26, [0.037, 0.001, 1, 0.001]), (0.5, [0.998, 0.001, 1, 0.001])):
        method, geometry = FAEDKV(budget=Budget(share=budget)), Geometry(2, 2, 64)
        for layer, share in enumerate(shares):
            stream, cache = Stream(geometry), make_cache(method, geometry, layer=layer)
            prefill(cache, stream.rows(1100))
            if share == 1:
                assert cache.spectrum is None and cache.memory().host == cache.store.nbytes
                continue
            assert cache.spectrum is not None
            n_rows = cache.spectrum.n_rows / cache.spectrum.n_segments  # a block's
            assert n_rows == pytest.approx(max(1, 128 * share), abs=2.5)


def test_a_budget_in_tokens_is_a_share_of_what_is_transformed():
    geometry, stream = Geometry(2, 2, 64), Stream(Geometry(2, 2, 64))
    method = FAEDKV(budget=Budget(tokens=200), allocation="uniform")
    cache = make_cache(method, geometry)
    prefill(cache, stream.rows(60 + 399))
    assert cache.spectrum is None  # not twice the budget yet
    decode(cache, stream.rows(1))
    assert cache.spectrum is not None and cache.spectrum.n_tokens == 3 * 128
    assert cache.spectrum.n_rows == 3 * (2 * round(65 / 2) - 1)
    other = make_cache(method, geometry)
    prefill(other, stream.rows(60 + 800))
    assert other.spectrum is not None and other.spectrum.n_tokens == 6 * 128
    assert other.spectrum.n_rows == 6 * (2 * round(65 / 4) - 1)


# --- memory, ledger, rewinding --------------------------------------------------------------------


@pytest.mark.parametrize("update", ["block", "additive"])
def test_memory_is_what_the_formula_says(update):
    """r M rows of f16, or of f32 where tokens are added; sinks, recent and waiting rows exact."""
    geometry, n, r = Geometry(4, 2, 64), 8192, 0.25
    rows = tuple(
        np.random.default_rng(0).standard_normal((h, n, 64), np.float32) for h in (4, 2, 2)
    )
    method = uniform(r, update)
    cache = make_cache(method, geometry)
    cache.reserve(n + 512)
    prefill(cache, rows, chunk=2048)
    row_bytes = 2 * 2 * 64 * 2  # K and V of two kv heads, f16
    dense = n * row_bytes
    middle = n - 60
    exact = (60 + (128 if update == "block" else 8)) * row_bytes
    formula = exact + r * middle * row_bytes * (1 if update == "block" else 2)
    held = cache.memory().host
    assert held == pytest.approx(formula, rel=0.1)
    assert held < (0.29 if update == "block" else 0.55) * dense
    of_spectrum = [cache.spectrum] if update == "block" else cache.spectrum.segments
    arrays = [cache.store, *of_spectrum]
    n_bytes = sum(a.k.nbytes + a.v.nbytes for a in arrays)
    if update == "block":
        assert n_bytes < held < 1.04 * n_bytes  # and the waves
    else:
        assert n_bytes == held
    stream = Stream(geometry)
    for _ in range(300):
        decode(cache, stream.rows(1))
    # A first growth adds an eighth. Coefficients that tokens are added to have a copy of what they
    # were after the prompt, as the exact rows have.
    n_copies = 1 if update == "block" else 2
    assert cache.memory().host < (n_copies + 0.125) * formula + 300 * row_bytes + 40_000 + exact


def test_the_rows_of_a_prefill_are_given_back():
    geometry = Geometry(2, 2, 64)
    cache, stream = make_cache(uniform(0.25), geometry), Stream(geometry)
    cache.reserve(3000)
    prefill(cache, stream.rows(900))
    assert cache.store.capacity == 10 + 50 + 128 + 1
    first = cache.memory().host
    cache.reserve(3000)
    rows = stream.rows(100)
    q, k, v = rows
    attend_chunk(cache, AttnInput(q, k, v, q, k, cache.n))
    assert cache.memory().host >= first + 3000 * 2 * 2 * 64 * 2
    cache.finish_prefill()
    assert cache.store.capacity == 189 and cache.memory().host < 1.3 * first


def test_ledger():
    geometry, stream = Geometry(6, 2, 64), Stream(Geometry(6, 2, 64))
    cache = make_cache(uniform(0.25), geometry)
    prefill(cache, stream.rows(160))
    lengths, stored = [], []
    for i in range(60):
        decode(cache, stream.rows(1))
        lengths.append(161 + i)
        # 128 tokens go when 188 rows are exact: 31 coefficients instead
        stored.append(161 + i if 161 + i < 188 else 161 + i - 128 + 31)
    counts = cache.counters()
    assert counts["rows_total"] == counts["sparse_rows_total"] == 6 * sum(lengths)
    assert counts["rows_attended"] == counts["rows_scored"] == 6 * sum(stored)
    assert counts["bytes_read"] == 2 * 2 * 2 * 64 * sum(stored)
    assert counts["tokens_transformed"] == 128 and counts["coefficient_rows"] == 31


@pytest.mark.parametrize("update", ["block", "additive"])
def test_rewinding(update):
    """To the end of the prompt; and over rows that came after the last one was transformed."""
    geometry, stream = Geometry(4, 2, 64), Stream(Geometry(4, 2, 64))
    cache = make_cache(uniform(0.25, update), geometry)
    prefill(cache, stream.rows(700))
    more = stream.rows(300)
    first = [decode(cache, more, i).copy() for i in range(300)]
    for n_steps in (300, 120):
        assert cache.truncate(700) == 700 == cache.n
        for i in range(n_steps):
            np.testing.assert_array_equal(decode(cache, more, i), first[i])
    last = cache.spectrum.n_tokens
    while cache.spectrum.n_tokens == last:
        decode(cache, more, cache.n - 700)
    n_changed = cache.n
    for _ in range(5):
        decode(cache, more, cache.n - 700)
    assert cache.truncate(n_changed - 1) == 0 and cache.n == n_changed + 5
    assert cache.truncate(n_changed) == n_changed == cache.n
    for i in range(n_changed - 700, 300):
        np.testing.assert_array_equal(decode(cache, more, i), first[i])


def test_an_interrupted_turn_is_forgotten():
    geometry, stream = Geometry(4, 2, 64), Stream(Geometry(4, 2, 64))
    method = uniform(0.25)
    caches = [make_cache(method, geometry) for _ in range(2)]
    rows, turn, more = stream.rows(700), stream.rows(40), stream.rows(5)
    for cache in caches:
        prefill(cache, rows)
    q, k, v = turn
    caches[0].extend(AttnInput(q, k, v, q, k, 700))
    assert caches[0].n == 740
    assert caches[0].truncate(700) == 700 == caches[0].n
    np.testing.assert_array_equal(*(prefill(cache, turn) for cache in caches))
    for i in range(5):
        np.testing.assert_array_equal(*(decode(cache, more, i).copy() for cache in caches))


# --- options --------------------------------------------------------------------------------------


def test_importance_chooses_the_ranking():
    geometry, stream = Geometry(2, 2, 64), Stream(Geometry(2, 2, 64))
    rows, kept = stream.rows(700), []
    for name in ("kld", "ppl"):
        cache = make_cache(uniform(0.25, importance=name), geometry)
        prefill(cache, rows)
        kept.append(cache.spectrum.basis.bins)
        expected = frequencies.kept_bins(128, 0.25, of_frequencies()[f"imp_{name}"][2])
        np.testing.assert_array_equal(kept[-1], expected)
    assert kept[0].tolist() != kept[1].tolist()


def test_rows_wider_than_the_head_are_zero():
    """d = 80 lies in rows of 80, d = 72 would lie in rows of 80: the padding stays 0."""
    geometry = Geometry(2, 1, 72)
    cache, stream = make_cache(uniform(0.5), geometry), Stream(geometry)
    prefill(cache, stream.rows(700))
    decode(cache, stream.rows(1))
    assert cache.spectrum is not None and cache.spectrum.k.shape[2] == padded(72) == 80
    for array in (cache.spectrum.k, cache.spectrum.v):
        assert not array[..., 72:].any() and array[..., :72].any()
