"""scripts/bench/kinds: bytes of the kinds of layers, and that steps are taken with every method."""

import json
from pathlib import Path

import pytest
from scripts_as_modules import load_script
from tiny_models import make_model

kinds = load_script("bench/kinds")
DEPTH = 256


def test_bytes_and_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = [
        make_model(tmp_path / f"{arch}.gguf", arch=arch, n_layer=4, n_embd=64)
        for arch in ("gemma4", "qwen35")
    ]
    result = tmp_path / "result.json"
    options = ("--depth", str(DEPTH), "--steps", "1", "--methods", "full,topk", "--json", result)
    monkeypatch.setattr("sys.argv", ["kinds", *map(str, (*options, *paths))])
    assert kinds.main() == 0
    gemma4, qwen35 = json.loads(result.read_text())["models"]
    assert gemma4["full"] == 2 * 2 * DEPTH * 2 * 2 * 512 and gemma4["state"] == 0
    assert gemma4["window"] == 2 * 2 * 40 * 2 * 2 * 256
    assert qwen35["full"] == 2 * 2 * DEPTH * 2 * 2 * 16 and qwen35["window"] == 0
    others = qwen35["weights"] + qwen35["state"]
    assert qwen35["at_most"] == pytest.approx((others + qwen35["full"]) / others)
    assert qwen35["brings"]["topk"] > 0
