"""scripts/gpu/bench where there is no GPU: each part of it, on interpreted kernels."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from scripts_as_modules import load_script

# Each part of it in Triton's interpreter.
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("few_programs")]
SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "gpu" / "bench"


def run(
    folder: Path, *arguments: str, status: int = 0
) -> tuple[dict[str, Any], subprocess.CompletedProcess[str]]:
    """The figures of a run of small sizes, and the run."""
    path = folder / "figures.json"
    done = subprocess.run(
        [sys.executable, SCRIPT, "--tiny", "--json", path, *arguments],
        env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == status, done.stderr
    return json.loads(path.read_text(encoding="utf-8")), done


def run_here(folder: Path, *arguments: str) -> dict[str, Any]:
    """The figures of a run of small sizes of one part, in this process."""
    path = folder / "figures.json"
    assert load_script("gpu/bench").main(["--tiny", "--json", str(path), *arguments]) == 0
    figures: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return figures


def test_memory(tmp_path, capsys):
    figures = run_here(tmp_path, "--only", "memory")
    rows = {row["method"]: row for row in figures["memory"]}
    # A cache makes room for a multiple of 256 rows: 512 here, for a context of 304.
    assert rows["full"]["device of full"] == rows["fasa"]["device of full"] == 512 / 304
    assert rows["fasa"]["index"] > 0
    # FASA-M leaves V and all of K but its 16 dominant dims of 32 to the host.
    assert rows["fasa:variant=m"]["device of full"] < 0.3 and rows["fasa:variant=m"]["host"] > 0
    assert "| fasa:variant=m |" in capsys.readouterr().out


PARTS = {
    "logits": ("topk", [("logits", "topk"), ("whole budget", "topk")]),
    "weights": ("Q4_K", [("weights", None)]),
    "operators": ("tiny", [("operators", None)]),
    "tokens": ("topk", [("tokens, tiny", "topk")]),
    "prefill": ("full", [("prefill, tiny", None)]),
    "host": ("B=2,recorded", [("host", "lfps"), ("host", "full"), ("host", "freekv")]),
    "freekv": ("speculate=false", [("freekv", "freekv:speculate=false")]),
}  # fmt: skip


@pytest.mark.parametrize("part", PARTS)
def test_a_part_runs(part, tmp_path):
    match, expected = PARTS[part]
    figures = run_here(tmp_path, "--only", part, "--match", match)
    assert figures["errors"] == figures["left out"] == []
    for table, method in expected:
        rows = [row for row in figures[table] if method in (None, row.get("method"))]
        assert rows
        assert all(row.get("ok", True) for row in rows), rows
        assert all(row.get("ms", 1) > 0 for row in rows)


def test_a_part_that_fails_costs_the_others_nothing(tmp_path, capsys):
    missing, path = str(tmp_path / "no.gguf"), tmp_path / "figures.json"
    arguments = ["--only", "logits,memory", "-m", missing, "--match", "full"]
    assert load_script("gpu/bench").main(["--tiny", "--json", str(path), *arguments]) == 1
    figures = json.loads(path.read_text(encoding="utf-8"))
    assert len(figures["errors"]) == 1 and "no.gguf" in figures["errors"][0]
    assert "error: logits, full: " in capsys.readouterr().err
    assert [row["method"] for row in figures["memory"]] == ["full"]


@pytest.mark.nightly
def test_what_no_time_is_left_for_is_named(tmp_path):
    figures, done = run(tmp_path, "--only", "weights", "--seconds", "0")
    assert "weights, Q8_0: no time left" in figures["left out"]
    assert "left out: weights, Q8_0: no time left" in done.stderr
    assert "leaked" not in done.stderr


def test_without_a_gpu_it_says_so(monkeypatch, capsys):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert load_script("gpu/bench").main(["--only", "memory"]) == 1
    assert capsys.readouterr().err.startswith("error: --device cuda")
