"""scripts/differential: a sample of its cases, and a planted error that it finds."""

from __future__ import annotations

import json

import pytest
from scripts_as_modules import load_script

from sparsekv_cli.cpu.jit import bf16
from sparsekv_cli.methods.naive.base import Naive

script = load_script("differential")
pytestmark = pytest.mark.usefixtures("one_thread")


def test_a_sample_differs_nowhere(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(script, "FILE", tmp_path / "found.json")
    assert script.main(["--seed", "160", "--cases", "5", "--seconds", "1000", "--record"]) == 0
    assert capsys.readouterr().out == "5 cases, 0 found\n"
    told = json.loads(script.FILE.read_text())
    assert told["found"] == 0 and set(told["cases"]) == set(script.KINDS)


def test_prefills_that_round(monkeypatch, capsys):
    """In bf16 if the CPU has it, and in int8 of a type whose few rows take decode's products."""
    for seed in ("20261139", "20261159"):
        assert script.main(["--seed", seed, "--cases", "1", "--show"]) == 0
    told = capsys.readouterr().out
    assert (
        ("bf16" in told) == bf16.is_available()
        and "int8" in told
        and told.count("1 cases, 0 found") == 2
    )


def test_a_difference_is_found_and_its_seed_repeats_it(monkeypatch, capsys):
    attend = Naive.attend
    monkeypatch.setattr(Naive, "attend", lambda self, choices: attend(self, choices) * 1.01)
    monkeypatch.setattr(script, "KINDS", {"method": script.of_method})
    lines = []
    for _ in range(2):
        assert script.main(["--seed", "2", "--cases", "1"]) == 1
        lines.append(capsys.readouterr().out.splitlines())
    (found, last), again = lines
    assert found.startswith("differs: --seed 2: method ") and last == "1 cases, 1 found"
    assert again == lines[0]
