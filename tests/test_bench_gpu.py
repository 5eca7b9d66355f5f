"""scripts/bench_gpu where there is no GPU: a part of it, on interpreted kernels."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parent.parent / "scripts" / "bench_gpu"


def test_a_part_runs(tmp_path):
    pytest.importorskip("triton")
    path = tmp_path / "figures.json"
    done = subprocess.run(
        [sys.executable, SCRIPT, "--tiny", "--only", "memory", "--json", path],
        env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    rows = {row["method"]: row for row in json.loads(path.read_text())["memory"]}
    assert rows["fasa"]["device of full"] == 1 and rows["fasa"]["index"] > 0
    # FASA-M leaves V and all of K but its 16 dominant dims of 32 to the host.
    assert rows["fasa:variant=m"]["device of full"] < 0.3 and rows["fasa:variant=m"]["host"] > 0
    assert "| fasa:variant=m |" in done.stdout


def test_without_a_gpu_it_says_so():
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, SCRIPT, "--only", "memory"],
        env={**environment, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 1 and done.stderr.startswith("error: --device cuda")
