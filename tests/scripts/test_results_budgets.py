"""scripts/results' part of budgets: a record a cell, what is run again, and its tables."""

import argparse
import json
import sys
from types import SimpleNamespace

import pytest
from scripts_as_modules import load_script

results = load_script("docs/results.py")
pages, parts = (sys.modules[f"results_{name}"] for name in ("pages", "parts"))
SIZES = {
    **parts.SIZES, "methods": "full,topk,lfps", "budget_shares": "2%,5%",
    "budget_lengths": "100,200",
}  # fmt: skip
SPECS = ["full", "topk:budget=2%", "topk:budget=5%", "lfps:budget=2%", "lfps:budget=5%"]


class FakeRunner:
    """Answers as the program does; a comparison after a prompt of 200 tokens fails ``n_failing``
    times.
    """

    def __init__(self, folder, n_failing=0):
        self.unfinished, self.commands, self.ran = folder, [], []
        self.n_failing = n_failing

    def cli(self, what, *arguments):
        self.commands.append(f"sparsekv-cli {what} {' '.join(arguments)}")
        self.ran.append(what)
        said = {"tokenize": self.tokenize, "eval": self.score, "compare": self.compare}
        return SimpleNamespace(stdout=json.dumps(said[what](arguments)))

    def tokenize(self, arguments):
        return {"ids": [1] * 50_000}

    def score(self, arguments):
        methods = arguments[arguments.index("--method") + 1].split(",")
        assert arguments[-2:] == ("--jsonl", str(self.unfinished / "ruler.jsonl"))
        average = {"score": 37.5, "low": 15.25, "high": 65.5, "n": 11}
        rows = [(int(n), spec) for n in ("100", "200") for spec in methods]
        return {"results": [{"length": n, "spec": s, "average": average} for n, s in rows]}

    def compare(self, arguments):
        path = arguments[arguments.index("-f") + 1]
        if "200" in path and self.n_failing:
            self.n_failing -= 1
            raise KeyboardInterrupt
        row = {"kld_mean": 0.25, "top1_agreement": 0.75, "rows_attended_mean": 66.0}
        specs = arguments[arguments.index("--methods") + 1].split(",")
        return {"context": len(open(path).read()), "methods": [
            {"spec": s, "name": s.partition(":")[0], "decode_tps": 10.0 * (1 + i), **row}
            for i, s in enumerate(specs)
        ]}  # fmt: skip


def test_cells_and_what_is_kept_of_a_stopped_run(tmp_path):
    run = FakeRunner(tmp_path / "kept", n_failing=1)
    with pytest.raises(KeyboardInterrupt):
        parts.PARTS["budgets"].measure(run, SIZES)
    again = FakeRunner(tmp_path / "kept")
    rows = parts.PARTS["budgets"].measure(again, SIZES)
    assert again.ran == ["eval", "tokenize", "compare"]  # that of 100 tokens is there
    assert [command.split()[1] for command in again.commands] == ["eval", "compare", "compare"]
    assert not any(str(tmp_path) in command for command in again.commands)
    assert [(row["length"], row["spec"]) for row in rows] == [
        (length, spec) for length in (100, 200) for spec in SPECS
    ]
    cell = rows[-1]
    assert (cell["method"], cell["ruler"], cell["kld"]) == ("lfps", 37.5, 0.25)
    assert (cell["tokens_per_s"], cell["of_full"]) == (50.0, 5.0)
    assert cell["compared_tokens"] == pytest.approx(2 * rows[0]["compared_tokens"], abs=2)
    other = FakeRunner(tmp_path / "kept")
    parts.PARTS["budgets"].measure(other, {**SIZES, "budget_steps": 8})
    assert other.ran.count("compare") == 2
    shown = pages.body(parts.PARTS["budgets"], rows)
    assert shown.count("| method | RULER |") == 2 and "### 200 tokens" in shown
    assert "| `lfps:budget=5%` | 38 | 15 | 66 | 0.250 | 0.75 | 66 | 50 | 5.00 |" in shown


def test_sizes_that_are_given():
    assert results.size_of("ruler_samples=3") == ("ruler_samples", 3)
    assert results.size_of("budget_shares=2%,5%") == ("budget_shares", "2%,5%")
    with pytest.raises(argparse.ArgumentTypeError, match="choose from model, "):
        results.size_of("shoe=42")
    with pytest.raises(ValueError):
        results.size_of("ruler_samples=few")
