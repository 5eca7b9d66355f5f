"""scripts/bench/plan: predictions beside what is measured, with a tiny model."""

import json

import numpy as np
import pytest
from scripts_as_modules import load_script
from tiny_models import make_model

from sparsekv_cli.methods import build_method
from sparsekv_cli.model import load_model
from sparsekv_cli.planning import kept, measure
from sparsekv_cli.settings.config import SessionConfig


@pytest.fixture
def briefly(monkeypatch, tmp_path):
    monkeypatch.setattr(measure, "DEPTHS", (200, 400))
    monkeypatch.setattr(measure, "QUICK_DEPTHS", (200, 400))
    monkeypatch.setattr(measure, "N_STEPS", 2)
    monkeypatch.setattr(measure, "measure_bandwidth", lambda n_threads: 1e10)
    monkeypatch.setattr(kept, "user_cache", tmp_path.joinpath)


def test_predictions_beside_measurements(tmp_path, briefly, capsys):
    script, path = load_script("bench/plan"), make_model(tmp_path / "model.gguf", n_layer=3)
    told = tmp_path / "told.json"
    given = ["-m", str(path), "--methods", "full,snapkv", "--tokens", "1", "--repetitions", "2"]
    given += ["--depths", "200,300", "--json", str(told)]
    assert script.main([*given, "--within", "1e9"]) == 0
    rows = json.loads(told.read_text("utf-8"))["rows"]
    assert [(row["depth"], row["method"]) for row in rows] == [
        (depth, name) for depth in (200, 300) for name in ("full", "snapkv")
    ]
    for row in rows:
        assert row["off"] == pytest.approx(row["predicted_tps"] / row["measured_tps"] - 1)
    assert script.main([*given, "--rows", "100", "--within", "-1"]) == 1
    assert "| snapkv | 300 |" in capsys.readouterr().out


def test_rows_are_laid_end_to_end(tmp_path):
    script, path = load_script("bench/plan"), make_model(tmp_path / "model.gguf")
    model = load_model(path, build_method("full", {}), SessionConfig())
    recorded, ids = script.record(model, 100), script.random_ids(model, 250)
    deep, sequence = script.laid_out(model, model.method, recorded, ids, 1), model.sequence()
    assert deep.tokens == ids
    sequence.prefill(script.random_ids(model, 100))
    for laid, prefilled in zip(deep.caches, sequence.caches, strict=True):
        assert laid.n == 250
        np.testing.assert_array_equal(laid.store.k[:, :100], prefilled.store.k[:, :100])
        np.testing.assert_array_equal(laid.store.v[:, 200:250], prefilled.store.v[:, :50])
