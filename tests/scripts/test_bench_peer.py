"""scripts/bench/peer without llama.cpp: the table, the turns, the worker's side, and refusals."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from scripts_as_modules import FOLDER, load_script
from tiny_models import make_model

script = load_script("bench/peer")
worker = sys.modules["peer_worker"]


class FakeWorker:
    """Stands for a process: ours takes 1 ms a token, llama.cpp 4 ms; the first burst is slower."""

    log: list[tuple[str, str, Any]]

    def __init__(self, name: str, setup: dict[str, Any]) -> None:
        self.name, self.setup, self.about = name, setup, {"version": "0"}
        self.n_bursts = 0

    def __enter__(self) -> FakeWorker:
        return self

    def __exit__(self, *_: object) -> None:
        self.log.append((self.name, "end", None))

    def rate(self, case: Any) -> float:
        self.log.append((self.name, "rate", (case.n_prompt, case.n_gen, case.n_depth)))
        self.n_bursts += 1
        base = 250.0 if self.setup["method"] is None else 1000.0
        return base / 2 if self.n_bursts == 1 else base

    warm_up = script.Worker.warm_up

    def fill(self, depth: int) -> None:
        self.log.append((self.name, "fill", depth))

    def peak_memory(self) -> int:
        return (100 if self.setup["method"] is None else 120) << 20


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str, Any]]:
    log: list[tuple[str, str, Any]] = []
    monkeypatch.setattr(FakeWorker, "log", log, raising=False)
    monkeypatch.setattr(script, "Worker", FakeWorker)
    monkeypatch.setattr(script.importlib.util, "find_spec", lambda name: object())
    return log


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model") / "tiny.gguf", n_embd=128, n_ff=128)


def test_turns_and_table(fakes, model, tmp_path, capsys):
    file = tmp_path / "result.json"
    arguments = ["-m", str(model), "--pp", "700", "--depths", "8192,0", "--methods", "full,lfps"]
    arguments += ["--tokens", "4", "--pairs", "3", "--memory", "16384", "--json", str(file)]
    assert script.main(arguments) == 0
    ours, lfps, peer = "sparsekv-cli full", "sparsekv-cli lfps", "llama.cpp"
    deep = [(name, "fill", 8192) for name in (ours, lfps, peer)]
    deep += [(name, "rate", (0, 4, 8192)) for name in (ours, lfps, peer)] * 3
    prompts = [(name, "rate", (188, 0, 0)) for name in (ours, peer)]
    prompts += [(name, "rate", (700, 0, 0)) for name in (ours, peer)] * 3
    shallow = [(name, "rate", (0, 4, 0)) for name in (ours, lfps, peer)] * 3
    n = len(prompts + shallow + deep)
    assert fakes[:n] == prompts + shallow + deep
    assert {name for name, what, _ in fakes[n : n + 3] if what == "end"} == {ours, lfps, peer}
    out = capsys.readouterr().out.splitlines()
    assert out[0] == "| test | sparsekv-cli | llama.cpp | ratio |"
    assert out[1] == "|---|---:|---:|---:|"
    assert out[2] == "| pp700 | 1000 (1000 to 1000) | 250 (250 to 250) | 4.00 |"
    assert out[3].startswith("| tg4 @ d0, full | ") and out[3].endswith("| 4.00 |")
    assert out[4] == "| tg4 @ d0, lfps | 1000 (500 to 1000) | 250 (250 to 250) | 4.00 |"
    assert out[6].startswith("| tg4 @ d8192, lfps | ")
    assert out[7] == "| peak memory @ d16384, full | 120 MiB | 100 MiB | 1.20 |" and len(out) == 9
    result = json.loads(file.read_text())
    assert result["threads"] >= 1 and set(result["programs"]) == {ours, lfps, peer}
    assert result["rows"][2]["sparsekv_cli"]["samples"] == [500.0, 1000.0, 1000.0]
    assert result["rows"][0]["peers"]["llama.cpp"]["median"] == 250.0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--methods", "nonsense"], "unknown method"),
        (["--methods", ","], "names no method"),
        (["--methods", "lfps:nonsense=1"], "no option"),
        (["--pp", "0"], "one token at least"),
        (["--batch", "8"], "give --pp ''"),
        (["--pp", "x"], "whole numbers"),
        (["--pairs", "0"], "above 0"),
        (["--pp", "", "--depths", ""], "nothing to measure"),
        (["--json", "no/such/folder/x.json"], "no such folder"),
    ],
)
def test_usage_errors(arguments, message, fakes, capsys):
    with pytest.raises(SystemExit) as error:
        script.main(arguments)
    assert error.value.code == 2
    assert message in capsys.readouterr().err
    assert fakes == []


def test_without_any_peer(monkeypatch, capsys):
    monkeypatch.setattr(script.importlib.util, "find_spec", lambda name: None)
    assert script.main(["--pp", "8"]) == 1
    printed = capsys.readouterr()
    assert printed.err.startswith("error: no peer to compare with: pip install")
    assert "--ik" in printed.err and printed.err.count("\n") == 1 and printed.out == ""


def test_worker_measures_ours_and_reports_its_memory(model):
    """A real process with this program in it: speeds, memory, and an end without a word."""
    setup = {"model": str(model), "threads": 1, "n_ctx": 200, "seed": 0}
    setup |= {"method": "lfps:budget=16", "n_seqs": 1, "folder": ""}
    with script.Worker("ours", setup) as ours:
        assert ours.about["method_options"]["budget"] == "16"
        ours.fill(100)
        assert ours.rate(script.Case(0, 8, 100, "lfps")) > 1
        assert ours.rate(script.Case(64, 0, 0, None)) > 1
        assert 50 << 20 < ours.peak_memory() < 8 << 30
    assert ours._process.returncode == 0


def test_worker_decodes_sequences_together(model, tmp_path):
    setup = {"model": str(model), "threads": 1, "n_ctx": 400, "seed": 0}
    setup |= {"n_seqs": 3, "folder": str(tmp_path), "method": "quest"}
    ours = worker.Ours(setup)
    ours.warm_up()
    for _ in range(2):
        ours.go_to(0, 8, 300)
        assert [len(each.tokens) for each in ours._sequences] == [300] * 3
        assert ours.run(0, 8) > 0
        texts = [each.tokens for each in ours._sequences]
        assert texts[0] == texts[1] == texts[2] and len(texts[0]) == 308


def test_worker_failures_are_one_line(model, tmp_path):
    setup = {"model": str(tmp_path / "none.gguf"), "threads": 1, "n_ctx": 8, "seed": 0}
    setup |= {"method": "full", "n_seqs": 1, "folder": ""}
    with pytest.raises(script.SparseKVError, match=r"ours: .*none\.gguf"):
        script.Worker("ours", setup).__enter__()


def test_a_crash_names_its_signal(monkeypatch):
    """llama.cpp is C++: it may end without a reply."""

    def crash(*_: Any, **keywords: Any) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", "import os; os.kill(os.getpid(), 4)"]
        return real(command, **keywords)

    real = subprocess.Popen
    monkeypatch.setattr(script.subprocess, "Popen", crash)
    with pytest.raises(script.SparseKVError, match=r"llama\.cpp ended by SIGILL"):
        script.Worker("llama.cpp", {}).__enter__()


def test_serving_in_order():
    class Program:
        calls: list[Any] = []  # noqa: RUF012

        def about(self) -> dict[str, Any]:
            return {"version": "1"}

        def fill(self, n_depth: int) -> None:
            self.calls.append(("fill", n_depth))

        def go_to(self, *shape: int) -> None:
            self.calls.append(("go", *shape))

        def run(self, *shape: int) -> int:
            self.calls.append(("run", *shape))
            return 42

    replies = io.StringIO()
    requests = io.StringIO('{"fill": 9}\n{"run": [0, 4, 9]}\n{"peak": true}\n')
    worker.serve(Program(), requests, replies)
    lines = [json.loads(line) for line in replies.getvalue().splitlines()]
    assert lines[:3] == [{"ready": {"version": "1"}}, {"filled": 9}, {"ns": 42}]
    assert lines[3]["bytes"] > 1 << 20
    assert Program.calls == [("fill", 9), ("go", 0, 4, 9), ("run", 0, 4)]


@pytest.mark.parametrize(("n_past", "depth", "expected"), [
    (0, 16, ["prefill 16"]),
    (5, 16, ["prefill 11"]),
    (0, 35, ["prefill 8", "double 8", "double 16", "prefill 3"]),
    (20, 32, ["double 16"]),
    (33, 64, ["double 16", "double 32"]),
    (40, 10, []),
])  # fmt: skip
def test_llama_cpps_deep_rows_are_copies(monkeypatch, n_past, depth, expected):
    done: list[str] = []

    class Fake(worker.LlamaCpp):
        def __init__(self) -> None:
            self._n_past, self._n_seqs = n_past, 1

        def go_to(self, n_prompt: int, n_gen: int, n_depth: int) -> None:
            if n_depth > self._n_past:
                done.append(f"prefill {n_depth - self._n_past}")
            self._n_past = n_depth

        def _double(self) -> None:
            done.append(f"double {self._n_past}")
            self._n_past *= 2

    monkeypatch.setattr(worker, "COPIED_FROM", 16)
    fake = Fake()
    fake.fill(depth)
    assert done == expected and fake._n_past == depth


def test_help_runs_without_a_model():
    done = subprocess.run(
        [sys.executable, str(FOLDER / "bench" / "peer"), "--help"],
        capture_output=True, text=True, timeout=240, check=True, env=dict(os.environ),
    )  # fmt: skip
    assert "--depths" in done.stdout
