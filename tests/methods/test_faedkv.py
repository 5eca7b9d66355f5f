"""FAEDKV against its literal twin, its limits, turns, memory, ledger and calibration."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from chunks import attend_chunk
from faedkv_twin import FAEDKVTwin, TwinOptions
from layer_stream import Geometry, Stream, decode, prefill
from tiny_models import make_model

from sparsekv_cli.cache.layer import DenseCache
from sparsekv_cli.cache.spec import AttnInput, Budget, LayerSpec
from sparsekv_cli.cache.store import padded
from sparsekv_cli.calibration.allocation import budgets_of_levels
from sparsekv_cli.calibration.faedkv import without
from sparsekv_cli.calibration.run import CalibrationRun
from sparsekv_cli.calibration.trials import Trial, Window, _window, unchanged
from sparsekv_cli.config import SessionConfig
from sparsekv_cli.cpu.faedkv import frequencies
from sparsekv_cli.methods import build_method
from sparsekv_cli.methods.faedkv import FAEDKV, FAEDKVCache
from sparsekv_cli.session import load_session

N_STEPS = 300
GEOMETRIES = [Geometry(4, 4, 64), Geometry(9, 3, 64), Geometry(8, 2, 80), Geometry(8, 1, 128)]
TOLERANCE = {"block": 2e-3, "additive": 2e-5}  # f16 and f32 rows
EVERY_BIN = Budget(share=0.99999)  # rounds to all bins; 100% transforms nothing


def importance(seed: int = 0) -> np.ndarray:
    """The mean's chunk first, the others anyhow."""
    order = np.random.default_rng(seed).permutation(frequencies.N_CHUNKS)
    return np.where(np.arange(frequencies.N_CHUNKS) == 0, 99, order).astype(np.float32)


def calibration(n_layer: int = 4) -> dict[str, np.ndarray]:
    """As ``calibrate`` makes it, (n_layer, ...): layer 2 wants to be whole most, then 0, 1, 3."""
    kld = np.outer([3.0, 2.0, 4.0, 1.0][:n_layer], [1.0, 0.99, 0.95, 0.8, 0.0])
    return {
        "imp_kld": np.stack([importance(i) for i in range(n_layer)]),
        "imp_ppl": np.stack([importance(10 + i) for i in range(n_layer)]),
        "layer_kld": kld.astype(np.float32),
        "layer_budget": budgets_of_levels(kld),
    }


def spec_of(geometry: Geometry, layer: int = 2, n_threads: int = 1) -> LayerSpec:
    g = geometry
    return LayerSpec(
        layer=layer, n_layer=4, n_head=g.n_head, n_head_kv=g.n_head_kv, head_dim=g.d, value_dim=g.d,
        n_threads=n_threads, calibration={k: v[layer] for k, v in calibration().items()},
    )  # fmt: skip


def make_cache(method: FAEDKV, geometry: Geometry, **spec: Any) -> FAEDKVCache:
    cache = method.layer(spec_of(geometry, **spec))
    assert isinstance(cache, FAEDKVCache)
    return cache


def uniform(share: float, update: str = "block", **options: Any) -> FAEDKV:
    budget = Budget(share=share)
    return FAEDKV(budget=budget, allocation="uniform", update=update, **options)


def make_twin(method: FAEDKV, geometry: Geometry) -> FAEDKVTwin:
    assert method.budget.share is not None
    options = TwinOptions(
        method.budget.share, method.update, method.block, method.sinks, method.recent
    )
    return FAEDKVTwin(options, importance(2), geometry.n_head, geometry.n_head_kv)


def follow(cache: FAEDKVCache, twin: FAEDKVTwin, stream: Stream, n_steps: int) -> set[int]:
    """Decodes n_steps tokens in both; the numbers of exact rows that occurred."""
    limit, seen = TOLERANCE[cache.method.update], set()
    for _ in range(n_steps):
        rows = stream.rows(1)
        out = decode(cache, rows)
        expected = twin.step(*(x[:, 0] for x in rows))
        np.testing.assert_allclose(out, expected, atol=limit)
        assert cache.n == twin.k.shape[1]
        assert cache.store.n == cache.n - twin.first_exact + cache.method.sinks
        seen.add(cache.store.n)
    return seen


# --- against the twin -----------------------------------------------------------------------------


@pytest.mark.parametrize("n_prefill", [40, 150, 700])
@pytest.mark.parametrize("update", ["block", "additive"])
@pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
def test_faedkv_equals_its_twin(geometry, update, n_prefill):
    """Past the borders of aging, of blocks, and of an additive basis."""
    method = uniform(0.25, update, block=48)
    cache, twin, stream = (
        make_cache(method, geometry),
        make_twin(method, geometry),
        Stream(geometry),
    )
    rows = stream.rows(n_prefill)
    np.testing.assert_allclose(prefill(cache, rows), twin.prefill(*rows), atol=2e-5)
    seen = follow(cache, twin, stream, N_STEPS)
    assert cache.spectrum is not None
    first, n_waiting = method.sinks + method.recent, 48 if update == "block" else 8
    assert set(range(first, first + n_waiting)) <= seen
    assert max(seen) < first + n_waiting or n_prefill == 40  # it grows up to there first
    assert len(cache.spectrum.table) == len(twin.segments) >= 5
    lengths = [segment.length for segment in twin.segments]
    assert (max(lengths) > 512) == (n_prefill == 700) and lengths.count(48) >= 4


@pytest.mark.parametrize("update", ["block", "additive"])
@pytest.mark.parametrize("share", [0.001, 0.03, 0.6, 0.99999])
def test_other_shares(share, update):
    geometry, method = Geometry(6, 2, 64), uniform(share, update, block=32, sinks=3, recent=20)
    cache, twin, stream = (
        make_cache(method, geometry),
        make_twin(method, geometry),
        Stream(geometry),
    )
    rows = stream.rows(620)
    prefill(cache, rows)
    twin.prefill(*rows)
    follow(cache, twin, stream, 80)


@pytest.mark.parametrize("update", ["block", "additive"])
def test_later_turns(update):
    """A turn attends to what is left of the old tokens; its own tokens age from exact rows."""
    geometry, method = Geometry(6, 2, 64), uniform(0.3, update, block=32)
    cache, twin, stream = (
        make_cache(method, geometry),
        make_twin(method, geometry),
        Stream(geometry),
    )
    for n_new in (200, 1, 30, 700, 90):
        rows = stream.rows(n_new)
        limit = 2e-3 if twin.segments else 2e-5  # old tokens come back as f16
        np.testing.assert_allclose(prefill(cache, rows), twin.prefill(*rows), atol=limit)
        follow(cache, twin, stream, 20)
    assert len([s for s in twin.segments if s.length > 512]) == 1


def test_a_turn_does_not_transform_old_tokens_again():
    geometry, stream = Geometry(2, 2, 64), Stream(Geometry(2, 2, 64))
    cache = make_cache(uniform(0.25), geometry)
    prefill(cache, stream.rows(900))
    assert cache.spectrum is not None
    n_rows, k = cache.spectrum.n_rows, cache.spectrum.k.copy()
    for _ in range(3):
        prefill(cache, stream.rows(200))
    assert cache.spectrum.n_rows > n_rows
    np.testing.assert_array_equal(cache.spectrum.k[:, :n_rows], k[:, :n_rows])


def test_threads_change_nothing_but_rounding():
    geometry = Geometry(9, 3, 64)
    outs = []
    for n_threads in (1, 2):
        stream, cache = Stream(geometry), make_cache(uniform(0.25), geometry, n_threads=n_threads)
        prefill(cache, stream.rows(1900))
        outs.append(np.stack([decode(cache, stream.rows(1)).copy() for _ in range(10)]))
    np.testing.assert_allclose(*outs, atol=1e-5)


# --- limits ---------------------------------------------------------------------------------------


def both(method: FAEDKV, geometry: Geometry, n_prefill: int, n_steps: int):
    """Outputs of the method and of dense attention, and the method's cache."""
    stream, cache = Stream(geometry, 5), make_cache(method, geometry)
    dense = DenseCache(spec_of(geometry))
    rows = stream.rows(n_prefill)
    outs = [prefill(cache, rows)], [prefill(dense, rows)]
    for _ in range(n_steps):
        rows = stream.rows(1)
        outs[0].append(decode(cache, rows)[:, None].copy())
        outs[1].append(decode(dense, rows)[:, None].copy())
    return *(np.concatenate(parts, axis=1) for parts in outs), cache


@pytest.mark.parametrize("update", ["block", "additive"])
@pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
def test_every_bin_equals_dense(geometry, update):
    method = FAEDKV(budget=EVERY_BIN, allocation="uniform", update=update, block=32)
    out, dense, cache = both(method, geometry, 800, 150)
    assert cache.spectrum is not None and cache.spectrum.n_tokens > 800
    np.testing.assert_allclose(out, dense, atol=1e-3 if update == "block" else 1e-5)


@pytest.mark.parametrize("allocation", ["layers", "uniform"])
def test_a_budget_of_the_context_changes_no_bit(allocation):
    method = FAEDKV(budget=Budget(share=1.0), allocation=allocation)
    out, dense, cache = both(method, Geometry(6, 2, 64), 700, 150)
    np.testing.assert_array_equal(out, dense)
    assert cache.spectrum is None


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
            n_rows = share * cache.spectrum.n_tokens
            assert cache.spectrum.n_rows == pytest.approx(max(1, n_rows), abs=2.5)


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
    assert other.spectrum is not None and other.spectrum.n_tokens == 800
    assert other.spectrum.n_rows == pytest.approx(200, abs=2)


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
    arrays = [cache.store.k, cache.store.v, cache.spectrum.k, cache.spectrum.v]
    assert held == sum(a.nbytes for a in arrays) + cache.spectrum.block.matrix.nbytes + \
        cache.spectrum.table.nbytes  # fmt: skip
    stream = Stream(geometry)
    for _ in range(300):
        decode(cache, stream.rows(1))
    # A first growth adds an eighth.
    assert cache.memory().host < 1.125 * formula + 300 * row_bytes + 40_000


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


def test_rewinding_ends_at_the_first_exact_row():
    geometry, stream = Geometry(4, 2, 64), Stream(Geometry(4, 2, 64))
    method = uniform(0.25)
    cut, straight = make_cache(method, geometry), make_cache(method, geometry)
    rows = stream.rows(700)
    for cache in (cut, straight):
        prefill(cache, rows)
    n_gone = 10 + cut.spectrum.n_tokens
    more = stream.rows(30)
    for i in range(10):
        decode(cut, more, i)
    assert cut.truncate(700) == 700 and cut.n == 700
    for i in range(20):
        np.testing.assert_array_equal(decode(cut, more, i), decode(straight, more, i))
    assert cut.truncate(n_gone) == n_gone == cut.n
    assert cut.truncate(n_gone - 1) == 0 == cut.n
    out = prefill(cut, rows)  # as good as new
    fresh = make_cache(method, geometry)
    np.testing.assert_array_equal(out, prefill(fresh, rows))
    np.testing.assert_array_equal(decode(cut, more, 0), decode(fresh, more, 0))


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


@pytest.mark.parametrize(
    ("option", "value"),
    [
        *[("block", v) for v in ("0", "15", "257", "x")],
        *[("recent", v) for v in ("0", "-1")],
        ("sinks", "-1"),
        ("importance", "entropy"),
        ("allocation", "head"),
        ("update", "multiplicative"),
        ("preset", "fast"),
        ("budget", "0%"),
    ],
)
def test_a_bad_value_names_the_option(option, value):
    with pytest.raises(ValueError, match=option) as error:
        build_method("faedkv", {option: value})
    assert value in str(error.value)


def test_presets():
    tuned, paper = (build_method("faedkv", {"preset": name}).options() for name in
                    ("tuned", "paper"))  # fmt: skip
    assert (tuned["importance"], tuned["allocation"], tuned["update"]) == ("kld", "layers", "block")
    assert (paper["importance"], paper["allocation"], paper["update"]) == (
        "ppl",
        "uniform",
        "additive",
    )
    assert tuned["budget"] == paper["budget"] == "25%"
    assert tuned["dense_layers"] == paper["dense_layers"] == ()


def test_importance_chooses_the_ranking():
    geometry, stream = Geometry(2, 2, 64), Stream(Geometry(2, 2, 64))
    rows, kept = stream.rows(700), []
    for name in ("kld", "ppl"):
        cache = make_cache(uniform(0.25, importance=name), geometry)
        prefill(cache, rows)
        kept.append(cache.spectrum.block.bins)
        expected = frequencies.kept_bins(128, 0.25, calibration()[f"imp_{name}"][2])
        np.testing.assert_array_equal(kept[-1], expected)
    assert kept[0].tolist() != kept[1].tolist()


# --- calibration ----------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def session(request, tmp_path_factory):
    path = tmp_path_factory.mktemp("model") / "model.gguf"
    make_model(
        path, arch=request.param, n_layer=3, n_head=6, n_head_kv=2, head_dim=64, n_embd=128,
        n_ff=128, attention_gain=4.0, rope_scaling=("yarn", 4.0, 256),
    )  # fmt: skip
    config = SessionConfig(threads=1, prefill_dtype="f32", chunk=100)
    opened = load_session(path, build_method("full", {}), config)
    yield opened
    opened.gguf.close()


def run_of(session, ids, progress=lambda share: None) -> CalibrationRun:
    return CalibrationRun(
        session.decoder.layer_specs(), ids, session.decoder.forward,
        progress,
    )  # fmt: skip


def tokens(n: int, seed: int = 0) -> list[int]:
    return np.random.RandomState(seed).randint(3, 512, n).tolist()


def test_a_trial_equals_one_by_itself(session):
    """Eleven copies of 30 rows in chunks of 100 against one forward on changed K and V."""
    run, middle = run_of(session, tokens(231)), slice(10, 150)
    window = Window(run, run.ids, 30, middle)
    changes = [(0, np.empty(0, np.int64)), (-1, np.arange(71))]
    changes += [(layer, np.arange(a, 71, 2)) for layer in range(3) for a in (0, 1, 40)]
    trials = [Trial(layer, without(dropped)) for layer, dropped in changes]
    klds, nlls = window.score(trials)
    assert window.score([Trial(0, unchanged)])[0] == [0]
    assert klds[0] < 1e-4 and abs(nlls[0] - window.nll) < 1e-3  # an FFT there and back
    # BLAS sums a row in another order when it lies elsewhere in a chunk
    assert klds[1] < 1e-9 and nlls[1] == pytest.approx(window.nll, abs=1e-5)
    assert klds[2:].min() > 5 * klds[0]

    def log_probabilities(layer, dropped):
        caches = [DenseCache(spec) for spec in run.specs]
        run.forward(run.ids[:200], 0, caches)
        if layer >= 0:
            for array in (caches[layer].store.k, caches[layer].store.v):
                array[:, middle] = frequencies.without_bins(
                    array[:, middle].astype(np.float32), dropped
                )
        logits = run.forward(run.ids[200:230], 200, caches, all_logits=True)
        return torch.from_numpy(logits).log_softmax(-1)

    full = log_probabilities(-1, None)
    for change, kld, nll in zip(changes, klds, nlls, strict=True):
        actual = log_probabilities(*change)
        assert kld == pytest.approx(float((full.exp() * (full - actual)).sum(-1).mean()), abs=2e-4)
        target = torch.tensor(run.ids[201:231])[:, None]
        plain = actual.gather(1, target)[:15]  # the rows before those that repeat a passage
        assert nll == pytest.approx(-float(plain.mean()), abs=2e-3)


def test_half_of_the_scored_rows_repeat_what_trials_change():
    middle = slice(10, 150)
    ids = _window(list(range(1000)), 200, 30, middle)
    assert ids[:215] == list(range(215)) and len(ids) == 231
    repeated = ids[215:]
    assert repeated == list(range(repeated[0], repeated[0] + 16))
    assert middle.start <= repeated[0] and repeated[-1] < middle.stop


def test_calibration_and_what_comes_of_it(session):
    shares: list[float] = []
    run = run_of(session, tokens(400), shares.append)
    tensors = FAEDKV().calibrate(run)
    assert {name: array.shape for name, array in tensors.items()} == {
        "imp_kld": (3, 22), "imp_ppl": (3, 22), "layer_kld": (3, 5), "layer_budget": (3, 5, 2),
    }  # fmt: skip
    assert all(array.dtype == np.float32 and np.isfinite(array).all() for array in tensors.values())
    assert shares == sorted(shares) and shares[-1] == pytest.approx(1)
    assert (tensors["layer_kld"][:, -1] == 0).all() and (tensors["layer_kld"][:, :-1] > 0).all()
    assert (tensors["imp_kld"] > 0).all() and (tensors["imp_ppl"] < 0).any()
    other = FAEDKV(**FAEDKV.presets["paper"]).calibrate(run)
    for name, array in tensors.items():
        np.testing.assert_array_equal(array, other[name])

    # In use: every layer has its slice, and the answers stay near those of full.
    specs = [
        replace(spec, calibration={name: array[spec.layer] for name, array in tensors.items()})
        for spec in run.specs
    ]
    ids, following = tokens(400, 1), tokens(20, 2)
    answers = []
    for method in (build_method("full", {}), FAEDKV(budget=Budget(share=0.7))):
        caches = [method.layer(spec) for spec in specs]
        session.decoder.forward(ids, 0, caches)
        logits = [session.decoder.decode(t, 400 + i, caches) for i, t in enumerate(following)]
        answers.append(torch.from_numpy(np.stack(logits)).log_softmax(-1))
    full, actual = answers
    kld = float((full.exp() * (full - actual)).sum(-1).mean())
    assert 1e-6 < kld < 0.3
    assert sum(cache.counters()["tokens_transformed"] for cache in caches) > 0


def test_every_bin_answers_like_full(session):
    """docs/methods.md: r = 1 has a KLD below 1e-5; in f32, since f16 coefficients round."""
    specs = [
        replace(spec, calibration={name: array[spec.layer] for name, array in tensors.items()})
        for tensors in [calibration(3)]
        for spec in session.decoder.layer_specs()
    ]
    ids, following = tokens(400, 3), tokens(80, 4)
    answers, exact, fewer = [], uniform(EVERY_BIN.share, "additive"), uniform(0.7, "additive")
    for method in (build_method("full", {}), exact, fewer):
        caches = [method.layer(spec) for spec in specs]
        session.decoder.forward(ids, 0, caches)
        logits = [session.decoder.decode(t, 400 + i, caches) for i, t in enumerate(following)]
        answers.append(torch.from_numpy(np.stack(logits)).double().log_softmax(-1))
    full = answers[0]
    klds = [float((full.exp() * (full - each)).sum(-1).mean()) for each in answers[1:]]
    assert klds[0] < 1e-5 and klds[1] > 1e-4


def test_a_text_that_is_too_short_is_refused(session):
    with pytest.raises(Exception, match="110 tokens is too short"):
        FAEDKV().calibrate(run_of(session, tokens(110)))


def test_rows_wider_than_the_head_are_zero():
    """d = 80 lies in rows of 80, d = 72 would lie in rows of 80: the padding stays 0."""
    geometry = Geometry(2, 1, 72)
    cache, stream = make_cache(uniform(0.5), geometry), Stream(geometry)
    prefill(cache, stream.rows(700))
    decode(cache, stream.rows(1))
    assert cache.spectrum is not None and cache.spectrum.k.shape[2] == padded(72) == 80
    for array in (cache.spectrum.k, cache.spectrum.v):
        assert not array[..., 72:].any() and array[..., :72].any()
