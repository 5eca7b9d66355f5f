"""scripts/bench/start: what it times, an empty cache a method, and a command that says nothing."""

import json
from pathlib import Path

import pytest
from scripts_as_modules import load_script
from tiny_models import make_model

from sparsekv_cli.errors import SparseKVError


@pytest.fixture
def script():
    return load_script("bench/start")


def test_the_time_to_the_first_byte(script, tmp_path):
    command = ["sh", "-c", 'sleep 0.2; echo "$XDG_CACHE_HOME" > "$0"; echo x; sleep 0.5']
    seen = tmp_path / "seen"
    assert 0.2 < script.first_byte([*command, str(seen)], "/elsewhere") < 0.6
    assert seen.read_text() == "/elsewhere\n"
    with pytest.raises(SparseKVError, match="gave no token"):
        script.first_byte(["true"], str(tmp_path))


def test_one_cold_start_and_some_warm_ones(script, monkeypatch, tmp_path, capsys):
    calls = []

    def first_byte(command, cache):
        calls.append(
            (command[command.index("--method") + 1], cache, len(list(Path(cache).iterdir())))
        )
        (Path(cache) / str(len(calls))).touch()
        return [30.0, 3.0, 1.0, 2.0][(len(calls) - 1) % 4]

    monkeypatch.setattr(script, "first_byte", first_byte)
    model, told = make_model(tmp_path / "model.gguf"), tmp_path / "told.json"
    assert script.main(["-m", str(model), "--warm", "3", "--json", str(told)]) == 0
    assert [(method, n) for method, _, n in calls] == [
        (method, n) for method in ("full", "lfps") for n in range(4)
    ]
    assert len({cache for _, cache, _ in calls}) == 2
    row = json.loads(told.read_text("utf-8"))[1]
    assert row == {
        "method": "lfps", "cold_s": 30, "warm_s": 2, "warm_least_s": 1, "warm_most_s": 3,
    }  # fmt: skip
    assert "| lfps | 30.0 | 2.00 | 1.00 to 3.00 |" in capsys.readouterr().out
