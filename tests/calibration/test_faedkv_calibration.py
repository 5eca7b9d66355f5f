"""What FAEDKV measures of a model, and sequences that use it."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from faedkv_layer import EVERY_BIN, uniform
from layer_calibration import of_frequencies
from opened import open_sequence
from tiny_sequences import SHAPE, tokens

from sparsekv_cli.cache.layer import DenseCache
from sparsekv_cli.cache.spec import Budget
from sparsekv_cli.calibration.faedkv import without
from sparsekv_cli.calibration.run import CalibrationRun
from sparsekv_cli.calibration.study import _window
from sparsekv_cli.calibration.trials import Trial, Window, unchanged
from sparsekv_cli.methods import build_method
from sparsekv_cli.methods.faedkv import FAEDKV
from sparsekv_cli.settings.config import SessionConfig


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def sequence(request, tiny_model):
    shape = {**SHAPE, "arch": request.param, "n_layer": 3, "rope_scaling": ("yarn", 4.0, 256)}
    config = SessionConfig(threads=1, prefill_dtype="f32", chunk=100)
    opened = open_sequence(tiny_model(**shape), build_method("full", {}), config)
    yield opened
    opened.model.gguf.close()


def run_of(sequence, ids, progress=lambda share: None) -> CalibrationRun:
    return CalibrationRun(
        sequence.model.decoder.layer_specs(), ids, sequence.model.decoder.forward,
        progress,
    )  # fmt: skip


def without_bins(x, dropped):
    """x (G, n, d) with some bins of its DFT along n set to 0: f32."""
    n = x.shape[1]
    dft = np.exp(-2j * np.pi * np.outer(np.arange(n), np.arange(n)) / n)
    spectrum = dft @ x.astype(np.float64)
    spectrum[:, np.concatenate([dropped, -dropped % n])] = 0
    return (np.einsum("kn,gkd->gnd", dft.conj(), spectrum).real / n).astype(np.float32)


@pytest.mark.parametrize("n", [45, 64])
def test_a_change_leaves_bins_out(n):
    k, v = np.random.default_rng(0).standard_normal((2, 2, n, 3)).astype(np.float32)
    for dropped in ([0, 3, 4, n // 2], [], np.arange(2, n // 2), np.arange(n // 2 + 1)):
        dropped = np.array(dropped, np.int64)
        expected = [without_bins(rows, dropped) for rows in (k, v)]
        changed = k.copy(), v.copy()
        without(dropped)(*changed)
        np.testing.assert_allclose(changed, expected, atol=1e-5)


def test_a_trial_equals_one_by_itself(sequence):
    """Eleven copies of 30 rows in chunks of 100 against one forward on changed K and V."""
    run, middle = run_of(sequence, tokens(231)), slice(10, 150)
    caches = [DenseCache(spec) for spec in run.specs]
    run.forward(run.ids[:200], 0, caches)
    window = Window(run, run.ids, 30, middle, caches)
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
                array[:, middle] = without_bins(array[:, middle], dropped)
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


def test_calibration_and_what_comes_of_it(sequence):
    shares: list[float] = []
    run = run_of(sequence, tokens(400), shares.append)
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
        sequence.model.decoder.forward(ids, 0, caches)
        decode = sequence.model.decoder.decode_batch
        logits = [decode([t], [400 + i], [caches])[0] for i, t in enumerate(following)]
        answers.append(torch.from_numpy(np.stack(logits)).log_softmax(-1))
    full, actual = answers
    kld = float((full.exp() * (full - actual)).sum(-1).mean())
    assert 1e-6 < kld < 0.3
    assert sum(cache.counters()["tokens_transformed"] for cache in caches) > 0


def test_every_bin_answers_like_full(sequence):
    """docs/methods.md: r = 1 has a KLD below 1e-5; in f32, since f16 coefficients round."""
    specs = [
        replace(spec, calibration={name: array[spec.layer] for name, array in tensors.items()})
        for tensors in [of_frequencies(3)]
        for spec in sequence.model.decoder.layer_specs()
    ]
    ids, following = tokens(400, 3), tokens(80, 4)
    answers, exact, fewer = [], uniform(EVERY_BIN.share, "additive"), uniform(0.7, "additive")
    for method in (build_method("full", {}), exact, fewer):
        caches = [method.layer(spec) for spec in specs]
        sequence.model.decoder.forward(ids, 0, caches)
        decode = sequence.model.decoder.decode_batch
        logits = [decode([t], [400 + i], [caches])[0] for i, t in enumerate(following)]
        answers.append(torch.from_numpy(np.stack(logits)).double().log_softmax(-1))
    full = answers[0]
    klds = [float((full.exp() * (full - each)).sum(-1).mean()) for each in answers[1:]]
    assert klds[0] < 1e-5 and klds[1] > 1e-4


def test_a_text_that_is_too_short_is_refused(sequence):
    with pytest.raises(Exception, match="110 tokens is too short"):
        FAEDKV().calibrate(run_of(sequence, tokens(110)))
