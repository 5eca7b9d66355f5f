"""Comparisons on a tiny model: one prefill for all, what is watched, and what the figures mean."""

from dataclasses import dataclass

import calibrated_method
import numpy as np
import pytest
from opened import open_sequence
from tiny_models import make_model

from sparsekv_cli.cache import row_sizes
from sparsekv_cli.cache.attend import attend_dense
from sparsekv_cli.cache.layer import LayerCache
from sparsekv_cli.cache.spec import Memory
from sparsekv_cli.cache.store import padded
from sparsekv_cli.errors import SparseKVError
from sparsekv_cli.evaluation import compare as comparison
from sparsekv_cli.evaluation import prefill as shared_prefill
from sparsekv_cli.evaluation.compare import (
    build_spec,
    compare,
    decode_tokens,
    parse_methods,
    split_steps,
)
from sparsekv_cli.evaluation.observer import Measured, Observer, compare_rows, log_softmax
from sparsekv_cli.evaluation.prefill import batches, exact_keys, prefill_all
from sparsekv_cli.methods import build_method
from sparsekv_cli.methods.base import Method
from sparsekv_cli.models import decoder
from sparsekv_cli.sequence import Sequence
from sparsekv_cli.settings.config import SessionConfig

LENGTH, STEPS = 150, 6
CONFIG = SessionConfig(threads=1, prefill_dtype="f32", chunk=64, ctx_size=400)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("tiny") / "model.gguf", n_layer=3, n_ctx=400)


@pytest.fixture(scope="module")
def sequence(model):
    return open_sequence(model, build_method("full", {}), CONFIG)


def random_ids(n):
    return np.random.RandomState(0).randint(3, 512, n).tolist()


# --- methods by their text ------------------------------------------------------------------------


def test_method_texts():
    methods = parse_methods("topk, lfps:preset=paper;a=0.4,streaming:sinks=2,budget=64")
    assert list(methods) == [
        "full",
        "topk",
        "lfps:preset=paper;a=0.4",
        "streaming:sinks=2;budget=64",
    ]
    assert methods["lfps:preset=paper;a=0.4"] == build_method(
        "lfps", {"preset": "paper", "a": "0.4"}
    )
    dense = parse_methods("topk:dense_layers=0,-1,full")
    assert dense["topk:dense_layers=0,-1"].dense_layers == (0, -1) and "full" in dense
    for wrong in ("fulll", "lfps:preset=slow", "topk:a=1", "2"):
        with pytest.raises(ValueError):
            parse_methods(wrong)


def test_common_options_go_where_they_belong():
    methods = parse_methods("topk,lfps:budget=3%,streaming", {"budget": "10%", "recent": "8"})
    options = {spec: method.options() for spec, method in methods.items()}
    assert options["topk"]["budget"] == options["streaming"]["budget"] == "10%"
    assert options["lfps:budget=3%"]["budget"] == "3%"
    assert options["topk"]["recent"] == options["lfps:budget=3%"]["recent"] == 8
    with pytest.raises(ValueError, match="'scored_by'"):
        parse_methods("full,topk", {"scored_by": "group"})


def test_all_means_every_method(monkeypatch):
    monkeypatch.setattr(comparison, "METHODS", {"full": "", "topk": "", "lfps": ""})
    assert list(parse_methods("all,topk:budget=64")) == ["full", "topk", "lfps", "topk:budget=64"]


# --- the prefill ----------------------------------------------------------------------------------


def test_shared_prefill_decodes_as_a_prefill_of_its_own(model, sequence):
    ids = random_ids(LENGTH + STEPS)
    names = ["full", "lfps:budget=20%", "streaming:budget=10%"]
    methods = [build_spec(name) for name in names]
    prefilled = prefill_all(sequence.model, methods, ids[:LENGTH])
    for method, (logits, shared, _) in zip(methods, prefilled, strict=True):
        own = open_sequence(model, method, CONFIG)
        np.testing.assert_array_equal(own.prefill(ids[:LENGTH]), logits)
        for token in ids[LENGTH:]:
            np.testing.assert_array_equal(own.decode(token), shared.decode(token))


def test_dense_attention_is_computed_once(sequence, monkeypatch):
    calls, real = [], decoder.attend_causal

    def count(q, store, spec):
        calls.append(spec.layer)
        return real(q, store, spec)

    monkeypatch.setattr(decoder, "attend_causal", count)
    methods = [build_spec(name) for name in ("full", "topk", "lfps", "full")]
    prefill_all(sequence.model, methods, random_ids(LENGTH))
    assert calls == [layer for layer in range(3) for _ in range(0, LENGTH, 64)]


def test_a_method_pays_for_its_own_index_only(sequence, monkeypatch):
    """The clock advances in finish_prefill only: 1 s a layer of topk, 10 s a layer of streaming."""
    now = 0.0
    monkeypatch.setattr(shared_prefill.time, "perf_counter", lambda: now)

    def finish(cache):
        nonlocal now
        now += {"_TopKCache": 1.0, "_StreamingCache": 10.0}.get(type(cache).__name__, 0.0)

    monkeypatch.setattr(LayerCache, "finish_prefill", finish)
    methods = [build_spec(f"{name}:dense_layers=0") for name in ("full", "topk", "streaming")]
    names = {type(m.layer(sequence.model.decoder.layer_specs()[1])).__name__ for m in methods}
    assert {"_TopKCache", "_StreamingCache"} < names
    found = prefill_all(sequence.model, methods, random_ids(80))
    assert [each.seconds for each in found] == [0.0, 2.0, 20.0]


def test_batches_hold_what_memory_allows(sequence):
    methods = parse_methods("topk,lfps,streaming,topk:budget=64,topk:budget=65")
    a_method = 100 * 3 * 2 * 2 * (64 + 64)  # rows, layers, heads, bytes, K and V
    assert [list(b) for b in batches(sequence.model, methods, 100, None)] == [list(methods)]
    assert [list(b) for b in batches(sequence.model, methods, 100, 3 * a_method)] == [
        ["full", "topk", "lfps"],
        ["full", "streaming", "topk:budget=64"],
        ["full", "topk:budget=65"],
    ]
    assert len(list(batches(sequence.model, methods, 100, 1))) == 5
    assert [list(b) for b in batches(sequence.model, parse_methods("full"), 100, 1)] == [["full"]]


# --- what is watched ------------------------------------------------------------------------------


def test_compare_rows_against_a_plain_computation():
    rng = np.random.RandomState(1)
    n, d = 40, 10
    q = np.zeros((4, padded(d)), np.float32)
    k = np.zeros((2, n, padded(d)), np.float16)
    q[:, :d], k[..., :d] = rng.standard_normal((4, d)), rng.standard_normal((2, n, d))
    idx = np.stack([rng.permutation(n)[:20] for _ in range(4)]).astype(np.int32)
    counts = np.array([20, 11, 15, 12])
    overlap, mass, possible = compare_rows(q, k, (idx, counts), 0.5, 11)
    expected = []
    for head in range(4):
        scores = 0.5 * k[head // 2].astype(np.float64) @ q[head]
        rows = idx[head, : counts[head]]
        weights = np.exp(scores) / np.exp(scores).sum()
        assert mass[head] == pytest.approx(weights[rows].sum(), rel=1e-5)
        chosen = {row for row in rows if row >= 4}
        best = set((np.argsort(-scores[4:])[: len(chosen)] + 4).tolist())
        oracle = weights[[*best, *(set(rows.tolist()) & set(range(4)))]].sum()
        assert possible[head] == pytest.approx(oracle, rel=1e-5) and oracle >= mass[head] - 1e-6
        if counts[head] > 11:  # otherwise the head was bypassed
            expected.append(len(chosen & best) / len(chosen))
    assert overlap == pytest.approx(expected)
    shared, mass, _ = compare_rows(q, k, (idx[:2], counts[:1].repeat(2)), 0.5)
    assert len(shared) == len(mass) == 4  # one list a kv head serves its two query heads
    one, mass, _ = compare_rows(q, k, (idx[:1], counts[:1]), 0.5)
    assert len(one) == len(mass) == 4  # and one list a layer serves all
    # The keys in two pieces are the keys.
    parts = compare_rows(q, k[:, :33], (idx, counts), 0.5, 11, k[:, 33:])
    whole = compare_rows(q, k, (idx, counts), 0.5, 11)
    assert parts[0] == whole[0] and parts[1] == pytest.approx(whole[1], rel=1e-6)
    overlap, *masses = compare_rows(q, k, None, 0.5)
    assert overlap == [] and np.array(masses).tolist() == [[1.0] * 4] * 2
    only_sinks = np.arange(4, dtype=np.int32)[None], np.array([4])
    overlap, mass, possible = compare_rows(q, k, only_sinks, 0.5)
    assert overlap == [] and 0 < max(mass) < 1 and mass == pytest.approx(possible)


def test_an_observer_keeps_the_exact_keys(sequence):
    """Those of a method that stores all keys are the oracle's, row by row, over many steps."""
    ids = random_ids(LENGTH + 100)
    method = build_spec("topk:budget=20%;dense_layers=none")
    together = prefill_all(sequence.model, [build_spec("full"), method], ids[:LENGTH])
    full, watched = (each.sequence for each in together)
    keys, caches = exact_keys(full.caches, LENGTH), watched.caches
    observers = [Observer(c, k, Measured()) for c, k in zip(caches, keys, strict=True)]
    watched.caches = observers
    for token in ids[LENGTH:]:
        watched.decode(token)
    for observer, k, cache in zip(observers, keys, caches, strict=True):
        assert k.shape[1] == LENGTH and observer.n == len(ids)
        seen = np.concatenate([k, observer._tail[:, : observer._n_tail]], axis=1)
        np.testing.assert_array_equal(seen, cache.store.k[:, : cache.store.n])


@dataclass(frozen=True)
class Forgetful(Method):
    """Attends to the last rows, stores them only, and reports their original positions."""

    dense_layers: tuple[int, ...] = ()

    def sparse_layer(self, spec):
        return ForgetfulCache(spec)


class ForgetfulCache(LayerCache):
    kept = 40

    def finish_prefill(self):
        self.n_seen = self.store.n
        self.store.k, self.store.v = (a[:, -self.kept :].copy() for a in self._rows())
        self.store.n = self.kept
        self.store._use(self.store.k, self.store.v)

    def _rows(self):
        return self.store.k[:, : self.store.n], self.store.v[:, : self.store.n]

    def decode(self, x):
        self.store.append_row(x.k, x.v)
        self.n_seen += 1
        rows = np.arange(self.n_seen - self.store.n, self.n_seen, dtype=np.int32)[None]
        self.attended = (rows, np.array([self.store.n]))
        return attend_dense(x.q[None, :, 0], [self.store], [1], self.spec)[0]


def measure(sequence, method, length=LENGTH, steps=STEPS, watched=None):
    ids = random_ids(length + steps)
    full = build_spec("full")
    prefilled = prefill_all(sequence.model, [full, method], ids[:length])
    sequences = [each.sequence for each in prefilled]
    keys = exact_keys(sequences[0].caches, length)
    reference: list[np.ndarray] = []
    results = [Measured(), Measured()]
    watched = range(steps) if watched is None else watched
    for each, result in zip(sequences, results, strict=True):

        def see(logits, result=result):
            if result is results[0]:
                reference.append(logits)
            result.add_step(reference[len(result.kld)], logits)

        decode_tokens(each, ids[length:], result, keys, watched, see)
    return results[1], keys


def test_a_method_that_forgets_its_keys_is_measured_all_the_same(sequence):
    forgetful, _ = measure(sequence, Forgetful())
    recent, _ = measure(sequence, build_spec("streaming:sinks=0;budget=43;dense_layers=none"))
    assert len(forgetful.mass) == len(recent.mass) == 3 * 4 * STEPS
    assert np.mean(forgetful.mass) == pytest.approx(np.mean(recent.mass), abs=0.02)
    assert np.mean(forgetful.overlap) == pytest.approx(np.mean(recent.overlap), abs=0.05)
    assert 0 < np.mean(forgetful.overlap) < 0.6


def test_what_is_watched_and_what_is_not(sequence):
    method = build_spec("topk:budget=20%")
    whole, _ = measure(sequence, method)
    some, _ = measure(sequence, method, watched=range(1, 3))
    none, _ = measure(sequence, method, watched=())
    a_step = 4  # one sparse layer of 4 heads
    assert len(whole.mass) == STEPS * a_step and len(some.mass) == 2 * a_step
    assert none.mass == none.overlap == []
    assert some.mass == whole.mass[a_step : 3 * a_step]
    assert list(some.by_layer) == [2]
    assert np.ravel(some.by_layer[2]).tolist() == some.mass
    assert some.by_step["mass"] == pytest.approx(np.mean(np.reshape(some.mass, (2, 4)), axis=1))
    assert len(some.by_step["oracle"]) == len(some.by_step["overlap"]) == 2
    assert len(whole.by_step["rows_attended"]) == STEPS
    assert sum(whole.by_step["rows_attended"]) == whole.counts["rows_attended"]
    for result in (some, none):  # watching changes nothing that is decoded
        assert result.kld == whole.kld and result.counts == whole.counts
        assert len(result.step_s) == STEPS and min(result.step_s) > 0


def test_layers_that_do_not_choose_are_not_watched(sequence, monkeypatch):
    monkeypatch.setattr(ForgetfulCache, "attends_to_some", False)
    result, _ = measure(sequence, Forgetful())
    assert result.mass == result.overlap == [] and np.mean(result.kld) > 0
    assert measure(sequence, build_spec("topk:dense_layers=0,1,2"))[0].mass == []


def test_steps_are_split():
    assert split_steps(64) == (range(1, 32), range(32, 64))
    assert split_steps(comparison.LEAST_STEPS) == (range(1, 2), range(2, 4))
    assert split_steps(5) == (range(1, 3), range(3, 5))


def test_kld_of_a_known_pair():
    result = Measured()
    p, q = np.array([0.5, 0.25, 0.25]), np.array([0.2, 0.4, 0.4])
    result.add_step(np.log(p).astype(np.float32) + 5, np.log(q).astype(np.float32) - 7)
    assert result.kld[0] == pytest.approx((p * np.log(p / q)).sum(), rel=1e-5)
    assert result.same_top1 == [False]
    assert np.exp(log_softmax(np.array([1e4, 0.0], np.float32))).tolist() == [1.0, 0.0]


# --- the figures ----------------------------------------------------------------------------------


def test_figures_of_dense_exact_and_recent_rows(sequence):
    names = "topk:budget=100%,topk:budget=20%;recent=1,streaming:budget=20%,lfps"
    progress: list[tuple[int, int]] = []
    rows = full, everything, best, recent, lfps = list(compare(
        sequence.model, parse_methods(names), random_ids(LENGTH), 8, random_ids(8)[::-1], None,
        lambda *done: progress.append(done)
    ))  # fmt: skip
    assert [row.name for row in rows] == ["full", "topk", "topk", "streaming", "lfps"]
    assert full.kld_mean == 0 and full.top1_agreement == 1
    assert full.attn_mass_recall is None and full.topk_overlap is None
    n_rows = LENGTH + (1 + 8) / 2
    assert full.rows_attended_mean == full.rows_scored_mean == n_rows
    assert everything.kld_mean == 0 and everything.attn_mass_recall == 1
    assert everything.topk_overlap is None and everything.rows_attended_mean == n_rows
    assert best.options["budget"] == "20%" and best.rows_scored_mean == n_rows
    # Two dense layers of three.
    sparse = 3 * best.rows_attended_mean - 2 * n_rows
    assert sparse == pytest.approx(0.2 * n_rows + 4, abs=1)
    assert 0.95 < best.topk_overlap <= 1 and recent.topk_overlap < 0.5
    assert recent.attn_mass_recall < best.attn_mass_recall < 1 and best.kld_mean > 0
    assert lfps.index_bytes > 0 == full.index_bytes
    a_row = 3 * 2 * (64 + 64) * 2
    assert full.bytes_host == best.bytes_host == (LENGTH + 8) * a_row and full.bytes_device == 0
    for row in rows:
        assert row.decode_tps > 0 and row.ttft_s > 0
    assert progress == [(i + 1, 40) for i in range(40)]


def test_the_continuation_is_what_full_would_write(sequence, monkeypatch):
    """And never a token that would end the text."""
    prompt = random_ids(60)
    seen: list[int] = []
    real = Sequence.decode

    def remember(each, token):
        seen.append(token)
        return real(each, token)

    with monkeypatch.context() as patch:
        patch.setattr(Sequence, "decode", remember)
        rows = list(compare(sequence.model, parse_methods("topk"), prompt, 8))
    assert len(seen) == 16 and seen[:8] == seen[8:]
    sequence.reset()
    banned = list(sequence.model.tokenizer.eog_ids)
    logits, expected = sequence.prefill(prompt), []
    for _ in range(8):
        logits[banned] = -np.inf
        expected.append(int(logits.argmax()))
        logits = sequence.decode(expected[-1])
    assert seen[:8] == expected and rows[0].kld_mean == 0
    sequence.reset()


def test_greedy_tokens_skip_what_is_banned():
    first = np.array([0.0, 5.0, 4.0, 3.0], np.float32)
    seen: list[np.ndarray] = []
    tokens = comparison.greedy_tokens(first, seen, 3, {1, 77, -1})
    assert next(tokens) == 2
    seen.append(np.array([9.0, 9.5, 0.0, 0.0], np.float32))
    assert next(tokens) == 0
    seen.append(np.array([0.0, 0.0, 0.0, 1.0], np.float32))
    assert list(tokens) == [3]


def test_what_does_not_fit_the_context(sequence):
    with pytest.raises(SparseKVError, match="395 tokens and 8 steps do not fit the context of 400"):
        next(compare(sequence.model, parse_methods("topk"), random_ids(395), 8))


def test_logits_that_do_not_fit_memory(sequence, monkeypatch):
    monkeypatch.setattr(row_sizes, "available_memory", lambda: 4 * 8 * 512 - 1)
    with pytest.raises(SparseKVError, match=r"the logits of 8 steps .* give fewer --steps"):
        next(compare(sequence.model, parse_methods("topk"), random_ids(9), 8))


def test_calibrated_methods_are_compared_too(model, sequence, monkeypatch):
    fake = calibrated_method.install(monkeypatch)
    reports: list[tuple[str, float, str]] = []
    methods = parse_methods("fake,fake:budget=100%")
    for method in methods.values():
        sequence.model.prepare(method, None, lambda *report: reports.append(report))
    assert len(fake.runs) == 1 and reports[-1][1] == 1.0
    _, sparse, everything = compare(sequence.model, methods, random_ids(LENGTH), 8)
    assert everything.kld_mean == 0 < sparse.kld_mean
    assert 0 < sparse.attn_mass_recall < 1
    model.with_name("model.calibration.npz").unlink()


def test_memory_is_taken_after_decoding(sequence, monkeypatch):
    monkeypatch.setattr(ForgetfulCache, "memory", lambda self: Memory(1, 20, 300))
    methods = {"full": build_spec("full"), "x": Forgetful()}
    _, row = compare(sequence.model, methods, random_ids(80), 4)
    assert (row.bytes_host, row.bytes_device, row.index_bytes) == (3, 60, 900)
