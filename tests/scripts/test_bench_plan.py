"""scripts/bench/plan: predictions beside what is measured, with a tiny model."""

import json

import pytest
from scripts_as_modules import load_script
from tiny_models import make_model

from sparsekv_cli.planning import kept, measure


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
