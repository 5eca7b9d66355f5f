"""scripts/soak: a short run of every part on a small model, and what it calls flat."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from scripts_as_modules import load_script
from tiny_models import make_model

from sparsekv_cli.errors import SparseKVError


@pytest.mark.slow
@pytest.mark.parametrize("part", ["serve", "chat", "folder"])
def test_a_short_run(part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = load_script("soak")
    monkeypatch.setattr("numbers_of_runs.FOLDER", tmp_path)
    monkeypatch.setitem(script.chats.Curve.check.__globals__, "SLACK_MB", 96)  # it still warms up
    monkeypatch.delenv("SPARSEKV_NO_CACHE", raising=False)  # the server has a folder of its own
    monkeypatch.setattr("sys.argv", ["soak", part, "-m", "tiny", "--seconds", "3", "--record"])
    script.main()
    found = json.loads((tmp_path / "soak.json").read_text("utf-8"))[part]["found"]
    if part == "chat":
        (found,) = found
        assert found["context_shifts"] > 0 and min(found["tokens_past_the_context"].values()) > 0
    elif part == "serve":
        assert found["answers"] > 0 and found["counted cached_tokens"] > 0
    else:
        assert found["hours"] >= 24 and found["found"] > 0
    assert len(found["pss_mb"]) > 1


@pytest.mark.nightly
def test_a_client_is_answered_under_attack(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its times are for a run by hand: other tests use the machine."""
    script = load_script("soak")
    names = ("slow bodies with the key", "giant lists", "abrupt ends")
    kept = {name: script.attacks.ATTACKS[name] for name in names}
    monkeypatch.setattr(script.attacks, "ATTACKS", kept)
    monkeypatch.setattr(script.attacks, "MOST", 100.0)
    rows = script.attacks.soak(make_model(tmp_path / "tiny.gguf", **script.SHAPE), 3.0)
    assert [row["attack"] for row in rows] == list(names)
    assert all(row["requests"] > 0 and row["usual_s"] > 0 for row in rows)


@pytest.mark.parametrize("name", ["pss_mb", "files", "threads"])
def test_what_grows_is_no_flat_curve(name: str) -> None:
    usage = sys.modules[load_script("soak").chats.Curve.__module__]
    flat = [usage.Usage(float(i), 300 + 5 * (i % 3), 9 + 3 * (i > 20), 4) for i in range(40)]
    curve = usage.Curve()
    curve.look = lambda: None
    curve.points = flat
    assert curve.check("it", n_sockets=32)["seconds"] == 39
    curve.points = [
        each._replace(**{name: getattr(each, name) + 2 * i}) for i, each in enumerate(flat)
    ]
    with pytest.raises(SparseKVError, match=f"{name} grows"):
        curve.check("it", n_sockets=32)
