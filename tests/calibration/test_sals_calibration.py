"""What SALS measures of a model, and sequences that use it."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from opened import OpenSequence, generated, open_sequence
from tiny_sequences import SHAPE

from sparsekv_cli.cache.counters import total_counters
from sparsekv_cli.cache.layer import DenseCache
from sparsekv_cli.cache.spec import AttnInput, Budget
from sparsekv_cli.calibration import sals
from sparsekv_cli.calibration.allocation import even_budgets, layer_count
from sparsekv_cli.calibration.run import CalibrationRun
from sparsekv_cli.calibration.sals import SHARES, study_keys
from sparsekv_cli.methods import build_method
from sparsekv_cli.methods.sals import SALS
from sparsekv_cli.settings.config import SessionConfig


@pytest.fixture(scope="module")
def sequence(tiny_model):
    config = SessionConfig(threads=1, prefill_dtype="f32", chunk=64)
    sequence = open_sequence(tiny_model(**SHAPE), build_method("full", {}), config)
    yield sequence
    sequence.model.gguf.close()


def run_of(sequence: OpenSequence, ids) -> CalibrationRun:
    decoder = sequence.model.decoder
    return CalibrationRun(decoder.layer_specs(), ids, decoder.forward, lambda share: None)


@pytest.fixture(scope="module")
def calibration(sequence) -> dict[str, np.ndarray]:
    ids = np.random.RandomState(0).randint(3, 512, 400).tolist()
    return SALS().calibrate(run_of(sequence, ids))


def test_calibration(sequence, calibration):
    size = 2 * 64
    assert {name: a.shape for name, a in calibration.items()} == {
        "weights": (4, size),
        **{f"vectors_{basis}": (4, size, size) for basis in ("diag", "pca")},
        **{f"eigenvalues_{basis}": (4, size) for basis in ("diag", "pca")},
        "rank_kld": (4, len(SHARES)),
        "rank_budget": (4, len(SHARES), 2),
    }
    assert all(a.dtype == np.float32 for a in calibration.values())
    for layer in range(4):
        w = calibration["weights"][layer].astype(np.float64)
        pairs = w.reshape(2, 64)
        np.testing.assert_array_equal(pairs[:, :32], pairs[:, 32:])
        assert np.log(w).mean() == pytest.approx(0, abs=1e-5) and w.std() > 0.01
        for basis, weights in (("diag", w), ("pca", np.ones(size))):
            vectors = calibration[f"vectors_{basis}"][layer]
            encode, decode = weights[:, None] * vectors, vectors / weights[:, None]
            assert abs(encode.T @ decode - np.eye(size)).max() < 1e-5
            values = calibration[f"eigenvalues_{basis}"][layer]
            assert (np.diff(values) <= 1e-6 * values[0]).all()


def test_ranks_go_where_they_save_most(sequence):
    """One dense layer of four: the others have the sum of columns, where a column saves most."""
    ids = np.random.RandomState(0).randint(3, 512, 400).tolist()
    run, shares = run_of(sequence, ids), []
    method = SALS(dense_layers=(0,))
    tensors = study_keys(replace(run, progress=shares.append), method.is_dense, 16, 64)
    kld, budgets = tensors["rank_kld"], tensors["rank_budget"]
    assert shares == sorted(shares) and shares[-1] == pytest.approx(1)
    assert not kld[0].any()
    np.testing.assert_array_equal(kld[:, -1], kld[:, -2])
    assert (kld[1:, 0] > kld[1:, -2]).all() and (kld[1:, :-1] > 0).all()
    np.testing.assert_array_equal(budgets[0], even_budgets(SHARES))
    for rank in (16, 20, 32, 48, 100, 128):
        ranks = [layer_count(rank, 128, budget, SHARES) for budget in budgets]
        assert ranks[0] == rank and abs(sum(ranks[1:]) - 3 * rank) <= 1
    ranks = np.array([layer_count(48, 128, budget, SHARES) for budget in budgets[1:]])
    costs = [np.interp(ranks, 128 * np.array(SHARES), row) for row in kld[1:]]
    assert np.trace(costs) <= sum(np.interp(48, 128 * np.array(SHARES), row) for row in kld[1:])
    assert [layer_count(10, 128, budget, SHARES) for budget in budgets] == [
        10
    ] * 4  # below what was studied

    # What is studied is what a cache keeps of the keys before window and undo rows.
    spec = replace(run.specs[2], calibration={k: v[2] for k, v in tensors.items()})
    caches = [DenseCache(each) for each in run.specs]
    run.forward(ids[:200], 0, caches)
    k = caches[2].store.k[:, 16:150].copy()
    sals._cut(run.specs[2], tensors, slice(16, 150), 1 / 4)(k, k)
    cache = SALS(rank=32, allocation="uniform", bits=16, sinks=0, window=34).layer(spec)
    cache.store.reserve(200)
    cache.store.k[:, :200], cache.store.v[:, :200] = (
        each[:, :200] for each in (caches[2].store.k, caches[2].store.v)
    )
    cache.store.n = 200
    cache._compress()
    cache.store.reserve(200)
    cache._restore(cache._latents)
    assert abs(cache.store.k[:, 16:150].astype("f4") - k.astype("f4")).max() < 0.02 * abs(k).max()


def test_calibration_measures_keys_and_queries(sequence, calibration):
    """Statistics of a layer, from the rows that its cache is shown."""
    kept: list[AttnInput] = []

    class Keeper(DenseCache):
        def extend(self, x):
            if self.spec.layer == 1:
                kept.append(AttnInput(*(t.copy() for t in x[:5]), x.pos))
            return super().extend(x)

    ids = np.random.RandomState(0).randint(3, 512, 400).tolist()
    specs = sequence.model.decoder.layer_specs()
    sequence.model.decoder.forward(ids, 0, [Keeper(spec) for spec in specs])
    keys = np.concatenate([x.k_nope for x in kept], 1, dtype=np.float64)  # (G, n, d)
    queries = np.concatenate([x.q_nope for x in kept], 1, dtype=np.float64)  # (H, n, d)
    stacked = np.concatenate(list(keys), axis=1)
    covariance = stacked.T @ stacked / 400
    for basis, w in (("diag", calibration["weights"][1]), ("pca", np.ones(128))):
        vectors = calibration[f"vectors_{basis}"][1].astype(np.float64)
        found = vectors.T @ (w[:, None] * covariance * w) @ vectors
        values = calibration[f"eigenvalues_{basis}"][1]
        np.testing.assert_allclose(np.diag(found), values, rtol=1e-3, atol=1e-4 * values[0])
        assert abs(found - np.diag(np.diag(found))).max() < 1e-4 * values[0]
    weights = calibration["weights"][1].reshape(2, 64)
    for g in range(2):
        chunk = queries[3 * g : 3 * g + 3]
        squares = (chunk[..., :32] ** 2 + chunk[..., 32:] ** 2).mean((0, 1)) / 2
        ratio = weights[g, :32] / np.sqrt(squares)
        np.testing.assert_allclose(ratio, ratio[0], rtol=1e-4)


def calibrated_caches(sequence: OpenSequence, calibration, method: SALS) -> list[Any]:
    return [
        method.layer(replace(spec, calibration={k: v[spec.layer] for k, v in calibration.items()}))
        for spec in sequence.model.decoder.layer_specs()
    ]


def logits_of(sequence: OpenSequence, caches, prompt, text) -> np.ndarray:
    sequence.tokens, sequence.caches = [], list(caches)
    sequence.prefill(prompt)
    return np.stack([sequence.decode(token) for token in text])


def kld(expected: np.ndarray, actual: np.ndarray) -> float:
    p, q = (torch.from_numpy(x).double().log_softmax(-1) for x in (expected, actual))
    return float((p.exp() * (p - q)).sum(-1).mean())


def test_a_model_with_everything_kept_answers_like_full(sequence, calibration, monkeypatch):
    monkeypatch.setattr(SALS, "is_dense_at", lambda self, n: False)
    rng = np.random.RandomState(1)
    prompt, text = rng.randint(3, 512, 200).tolist(), rng.randint(3, 512, 40).tolist()
    full = build_method("full", {})
    expected = logits_of(sequence, [full.layer(s) for s in sequence.model.decoder.layer_specs()],
                         prompt, text)  # fmt: skip
    whole = SALS(rank=128, score_rank=128, bits=16, budget=Budget(tokens=10**6), dense_layers=())
    caches = calibrated_caches(sequence, calibration, whole)
    assert kld(expected, logits_of(sequence, caches, prompt, text)) < 1e-5
    counts = total_counters(caches)
    assert counts["rows_encoded"] == 4 * (240 - 80) and counts["rows_reconstructed"] > 0

    rough = SALS(rank=16, budget=Budget(tokens=20), dense_layers=())
    caches = calibrated_caches(sequence, calibration, rough)
    assert kld(expected, logits_of(sequence, caches, prompt, text)) > 1e-3


def test_generation_as_long_as_the_prompt_and_a_second_turn(sequence, calibration):
    method = SALS(budget=Budget(tokens=20))
    texts = []
    for _ in range(2):
        sequence.tokens = []
        sequence.caches = calibrated_caches(sequence, calibration, method)
        rng = np.random.RandomState(2)
        prompt, question = rng.randint(3, 512, 150).tolist(), rng.randint(3, 512, 20).tolist()
        produced = list(generated(sequence, prompt, lambda x, _: int(x.argmax()), 150))
        produced += list(generated(sequence, question, lambda x, _: int(x.argmax()), 20))
        texts.append(produced)
        assert {cache.n for cache in sequence.caches} == {len(sequence.tokens)} == {338}
    assert texts[0] == texts[1]
