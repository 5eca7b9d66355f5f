"""``calibrate`` and ``--calibration`` on a tiny model with a small calibrated method."""

import hashlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import calibrated_method
import pytest
from tiny_models import make_model

from sparsekv_cli.calibration import calibrations
from sparsekv_cli.commands.shared import progress
from sparsekv_cli.methods import METHODS, calibrated_methods

Invoke = Callable[..., Any]
N_CTX = 320
RUN = ["-p", "the sand and the thing in an inn", "-n", "3", "--temp", "0", "--ignore-eos"]


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "models"
    folder.mkdir()
    return make_model(folder / "tiny.gguf", n_embd=64, n_ff=64, n_ctx=N_CTX)


@pytest.fixture
def no_calibrated() -> Iterator[None]:
    """No method needs a calibration; afterwards all are back in their order."""
    with patch.dict(METHODS):
        for name in calibrated_methods():
            del METHODS[name]
        yield


@pytest.fixture
def fake(no_calibrated: None, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The only method that needs a calibration."""
    return calibrated_method.install(monkeypatch)


def calibrate(invoke: Invoke, model: Path, *arguments: str) -> dict[str, Any]:
    result = invoke("calibrate", "-m", str(model), "-t", "1", "--json", *arguments)
    assert result.code == 0, result.err
    return json.loads(result.out)


def refused(invoke: Invoke, code: int, *arguments: str) -> str:
    result = invoke(*arguments)
    assert (result.code, result.out) == (code, ""), result.err
    assert result.err.startswith("error: ") and result.err.count("\n") == 1
    return result.err


def test_what_is_written_and_said(model, fake, invoke):
    beside = model.with_name("tiny.calibration.npz")
    found = calibrate(invoke, model)
    assert found["model"] == str(model) and found["path"] == str(beside)
    assert found["bytes"] == beside.stat().st_size
    (row,) = found["methods"]
    text = calibrations.built_in_text().text
    assert (row["name"], row["tokens"], row["text"]) == ("fake", N_CTX, "built-in")
    assert row["text_sha256"] == hashlib.sha256(text.encode()).hexdigest() and row["seconds"] > 0
    assert row["tensors"] == [
        {"name": "means", "type": "float32", "shape": [2, 2, 16]},
        {"name": "stride", "type": "uint8", "shape": [2]},
    ]
    options = ["--tokens", "270", "--scored-rows", "6"]
    people = invoke("calibrate", "-m", str(model), "--method", "fake", *options)
    assert people.code == 0 and people.out == ""
    assert people.err.startswith("calibrating fake for this model") and "270 tokens" in people.err
    assert str(beside) in people.err and people.err.endswith("MiB\n")
    assert [len(ids) for ids in fake.runs] == [N_CTX, 270] and fake.scored == [0, 6]


def test_runs_take_what_was_calibrated(model, fake, invoke):
    first = invoke("run", "-m", str(model), "--method", "fake", *RUN)
    assert first.code == 0 and "calibrating fake" in first.err and "stored in" in first.err
    again = invoke("run", "-m", str(model), "--method", "fake", *RUN)
    assert again.code == 0 and "calibrat" not in again.err and again.out == first.out
    assert len(fake.runs) == 1


def test_a_text_and_a_place_of_ones_own(model, fake, invoke, tmp_path):
    text, place = tmp_path / "text.txt", tmp_path / "elsewhere" / "mine.npz"
    text.write_text("the sand and the thing " * 60)
    found = calibrate(invoke, model, "-f", str(text), "--output", str(place))
    assert found["path"] == str(place) and list(model.parent.iterdir()) == [model]
    assert found["methods"][0]["text"] == str(text) and found["methods"][0]["tokens"] == N_CTX
    piped = invoke(
        "calibrate", "-m", str(model), "-f", "-", "--json", "--output", str(place),
        stdin=text.read_bytes(),
    )  # fmt: skip
    assert json.loads(piped.out)["methods"][0]["text"] == "-"
    assert fake.runs[0] == fake.runs[1]
    method = ["--method", "fake", "--calibration", str(place)]
    result = invoke("run", "-m", str(model), *method, *RUN)
    assert result.code == 0 and len(fake.runs) == 2
    missing = str(tmp_path / "missing.npz")
    arguments = ["run", "-m", str(model), "--method", "fake", "--calibration", missing, *RUN]
    assert missing in refused(invoke, 1, *arguments)


def test_a_damaged_sidecar_is_named_and_made_again(model, fake, invoke):
    beside = model.with_name("tiny.calibration.npz")
    calibrate(invoke, model)
    beside.write_bytes(beside.read_bytes()[:-100])
    line = refused(invoke, 1, "run", "-m", str(model), "--method", "fake", *RUN)
    assert str(beside) in line and "sparsekv-cli calibrate -m MODEL --method fake" in line
    calibrate(invoke, model)
    assert invoke("run", "-m", str(model), "--method", "fake", *RUN).code == 0


def test_what_cannot_be_done(model, fake, invoke, tmp_path, monkeypatch):
    base = ["calibrate", "-m", str(model)]
    for name in ("topk", "nothing", "fake,", ""):
        assert "choose from fake" in refused(invoke, 2, *base, "--method", name)
    assert "--tokens" in refused(invoke, 2, *base, "--tokens", "0")
    for n in ("1", "49", "x"):
        assert "2 to 48" in refused(invoke, 2, *base, "--scored-rows", n)
    line = refused(invoke, 2, *base, "--scored-rows", "4", "--method", "auto")
    assert "--scored-rows: --method auto" in line
    short = tmp_path / "short.txt"
    short.write_text("a few words")
    assert "too few" in refused(invoke, 1, *base, "-f", str(short))
    before = model.read_bytes()
    assert "no calibration" in refused(invoke, 1, *base, "--output", str(model))
    assert model.read_bytes() == before and fake.runs == []
    below = str(short / "x.npz")
    assert "cannot be written" in refused(invoke, 1, *base, "--output", below)
    assert "no-such.txt" in refused(invoke, 1, *base, "-f", str(tmp_path / "no-such.txt"))
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert "cuda" in refused(invoke, 1, *base, "--device", "cuda")


def test_nothing_to_calibrate(no_calibrated, model, invoke):
    assert "no method needs" in refused(invoke, 2, "calibrate", "-m", str(model))


def test_the_need_is_listed(fake, invoke):
    described = json.loads(invoke("methods", "--json").out)
    needs = {method["name"]: method["needs"] for method in described}
    assert needs["fake"] == "calibration" and needs["topk"] == needs["full"] == ""
    text = invoke("methods", "fake").out
    assert "  needs    calibration\n" in text


def test_what_remains_is_told_without_a_terminal(monkeypatch, capsys):
    monkeypatch.setattr(progress, "LINE_S", 0.0)
    with progress.CalibrationProgress() as calibrating, progress.MeasureProgress() as measuring:
        calibrating("sals", 0.009, "")
        for done in range(5):
            calibrating("sals", done / 4, "")
            measuring("quest", done, 4)
    told = capsys.readouterr().err
    assert "calibrate sals: 25 %, about 0 s left" in told
    assert "measure quest: 75 %, about 0 s left" in told and "100 %" not in told
    assert "calibrate sals: 1 %" not in told
