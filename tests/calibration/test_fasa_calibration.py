"""What FASA measures of a model, and sequences that use it."""

from dataclasses import replace

import numpy as np
import pytest
from layer_rows import GEOMETRIES, Geometry, Stream, half
from layer_stream import decode, make_cache, prefill
from opened import OpenSequence, open_sequence
from tiny_sequences import N_HEAD, N_KV, N_LAYER, SHAPE, tokens

from sparsekv_cli.cache.layer import DenseCache
from sparsekv_cli.cache.spec import Budget, LayerSpec
from sparsekv_cli.calibration import fasa
from sparsekv_cli.calibration.allocation import even_budgets, layer_count
from sparsekv_cli.calibration.fasa import SHARES
from sparsekv_cli.calibration.run import CalibrationRun
from sparsekv_cli.methods import build_method
from sparsekv_cli.methods.fasa import FASA
from sparsekv_cli.methods.full import Full
from sparsekv_cli.settings.config import SessionConfig

pytestmark = pytest.mark.usefixtures("one_thread")


# --- whole models ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model(tiny_model):
    return tiny_model(**SHAPE)


def open_with_method(model, method) -> OpenSequence:
    return open_sequence(model, method, SessionConfig(threads=1, prefill_dtype="f32", chunk=16))


def open_specs(model) -> list[LayerSpec]:
    sequence = open_with_method(model, Full())
    specs = sequence.model.decoder.layer_specs()
    sequence.model.gguf.close()
    return specs


def calibrate(sequence: OpenSequence, method: FASA, ids) -> dict[str, np.ndarray]:
    shares: list[float] = []
    run = CalibrationRun(
        sequence.model.decoder.layer_specs(), ids, sequence.model.decoder.forward,
        shares.append,
    )  # fmt: skip
    tensors = method.calibrate(run)
    assert shares == sorted(shares) and len(shares) > N_LAYER and shares[-1] == pytest.approx(1)
    return tensors


@pytest.fixture(scope="module")
def tensors(model):
    sequence = open_with_method(model, Full())
    yield calibrate(sequence, FASA(), tokens(300))
    sequence.model.gguf.close()


# --- calibration ----------------------------------------------------------------------------------


class RecordingCache(DenseCache):
    """Keeps the queries and keys that it is shown."""

    def extend(self, x):
        self.seen = [*getattr(self, "seen", []), (x.q.copy(), half(x.k))]
        return super().extend(x)


def test_calibration_is_what_it_says(model, tensors):
    ids = tokens(300)
    sequence = open_with_method(model, Full())
    specs = sequence.model.decoder.layer_specs()
    caches = [RecordingCache(spec) for spec in specs]
    sequence.model.decoder.forward(ids, 0, caches)
    sequence.model.gguf.close()
    assert {name: (a.shape, a.dtype) for name, a in tensors.items()} == {
        "score_var": ((N_LAYER, N_HEAD, 32), np.float32),
        "score_ca": ((N_LAYER, N_HEAD, 32), np.float32),
        "dom_var": ((N_LAYER, N_KV, 32), np.uint8),
        "dom_ca": ((N_LAYER, N_KV, 32), np.uint8),
        "tip_kld": ((N_LAYER, len(SHARES)), np.float32),
        "tip_budget": ((N_LAYER, len(SHARES), 2), np.float32),
    }
    positions = [int(75 + (i + 0.5) * 225 / 16) for i in range(16)]
    for layer, cache in enumerate(caches):
        q, k = (
            np.concatenate(parts, 1, dtype=np.float64) for parts in zip(*cache.seen, strict=True)
        )
        var, ca = np.zeros((N_HEAD, 32)), np.zeros((N_HEAD, 32))
        for h in range(N_HEAD):
            for t in positions:
                keys = k[h // 3, : t + 1]
                top = set(np.argsort(-(keys @ q[h, t]))[:64].tolist())
                for i in range(32):
                    scores = keys[:, i] * q[h, t, i] + keys[:, i + 32] * q[h, t, i + 32]
                    var[h, i] += scores.var() / 16
                    own = set(np.argsort(-scores)[:64].tolist())
                    ca[h, i] += len(top & own) / 64 / 16
        np.testing.assert_allclose(tensors["score_var"][layer], var, rtol=1e-4)
        np.testing.assert_allclose(tensors["score_ca"][layer], ca, atol=1e-3)
        for name in ("var", "ca"):
            score = tensors[f"score_{name}"][layer]
            group = (score / score.sum(1, keepdims=True)).reshape(N_KV, 3, 32).sum(1)
            ranked = np.take_along_axis(group, tensors[f"dom_{name}"][layer].astype(int), axis=1)
            assert (np.diff(ranked) <= 1e-6).all()
            assert (np.sort(tensors[f"dom_{name}"][layer]) == np.arange(32)).all()


def test_chunks_go_where_they_save_most(model, tensors):
    """Layers 0 and 1 are dense by default: they have the mean, and no part in the others' sum."""
    kld, budgets = tensors["tip_kld"], tensors["tip_budget"]
    assert not kld[:2].any() and (kld[2:] > 0).all()
    np.testing.assert_array_equal(kld[:, -1], kld[:, -2])
    np.testing.assert_array_equal(budgets[:2], [even_budgets(SHARES)] * 2)
    for n_tip in (3, 4, 6, 8, 13, 16, 32):
        tips = [layer_count(n_tip, 32, budget, SHARES) for budget in budgets]
        assert tips[:2] == [n_tip] * 2 and abs(sum(tips[2:]) - 2 * n_tip) <= 1
    calibration = {name: array[2] for name, array in tensors.items()}
    spec = replace(open_specs(model)[2], calibration=calibration)
    for n_tip in (0, 6, 13):
        own, same = (
            FASA(n_tip=n_tip, allocation=allocation).dominant_dims(spec)
            for allocation in ("layers", "uniform")
        )
        assert own[1] == 2 * layer_count(n_tip or 8, 32, calibration["tip_budget"], SHARES)
        assert same[1] == 2 * (n_tip or 8)


def test_a_layer_has_the_chunks_that_its_calibration_says():
    """A row of budgets that gives this layer half of the chunks where all have a quarter."""
    budgets = np.ones((len(SHARES), 2), np.float32)
    budgets[:4], budgets[4] = 0.1, (0.2, 0.9)
    usual = make_cache(FASA(budget=Budget(tokens=40)), GEOMETRIES[1])
    spec = replace(usual.spec, calibration={**usual.spec.calibration, "tip_budget": budgets})
    assert FASA().dominant_dims(spec)[1] == 32
    assert FASA(allocation="uniform").dominant_dims(spec)[1] == 16
    assert build_method("fasa", {"preset": "paper"}).allocation == "uniform"
    cache = FASA(budget=Budget(tokens=40)).layer(spec)
    prefill(cache, Stream(GEOMETRIES[1]).rows(90))
    assert cache.store.split().shape[2] == 32 and usual.store.dims.shape == (3, 64)


@pytest.mark.parametrize("geometry", [GEOMETRIES[1], Geometry(6, 2, 80, n_rot=20)], ids=str)
def test_rows_of_a_trial_attend_as_a_step_does(geometry, monkeypatch):
    """What a share of the chunks is judged by is the method's own attention."""
    n_chosen = 40
    monkeypatch.setattr(fasa, "N_CHOSEN", n_chosen)
    method = FASA(budget=Budget(tokens=n_chosen), n_tip=4, metric="var")
    cache, stream = make_cache(method, geometry), Stream(geometry)
    dims, n_dom = method.dominant_dims(cache.spec)
    prompt, new = stream.rows(90), stream.rows(7)
    prefill(cache, prompt)
    outs = [decode(cache, new, i).copy() for i in range(7)]
    store = DenseCache(cache.spec).store
    for rows in (prompt, new):
        store.append(*rows[1:3])
    out = fasa._attend_best(dims[:, :n_dom], 4, 16)(new[0], store, cache.spec)
    assert out.shape == (geometry.n_head, 7, geometry.d)
    np.testing.assert_allclose(out, np.stack(outs, axis=1), atol=1e-3)


def test_options_do_not_change_the_calibration(model, tensors):
    sequence = open_with_method(model, Full())
    other = calibrate(
        sequence, FASA(metric="ca", n_tip=3, budget=Budget(tokens=7), variant="m"), tokens(300)
    )
    sequence.model.gguf.close()
    for name, array in tensors.items():
        np.testing.assert_array_equal(other[name], array)
