"""scripts/bench/prefix: which questions it asks, with the cache and without, what it reports."""

import json

import pytest
from scripts_as_modules import load_script
from tiny_models import make_model

from sparsekv_cli.errors import SparseKVError


@pytest.fixture
def script():
    return load_script("bench/prefix")


def test_questions_without_and_with_the_cache(script, monkeypatch, tmp_path, capsys):
    asked = []

    def ask(command, question):
        asked.append((question, "--no-cache" in command, "--cache-dir" in command))
        seconds = 8.0 if "--no-cache" in command else [9.0, 0.1, 0.3][len(asked) - 3]
        timings = {"ttft_s": seconds}
        answer = {"timings": timings, "tokens": [1], "prompt_tokens": 700, "cached_tokens": 640}
        return {**answer, "process_s": seconds + 1}

    def answer_of(command):
        return {"timings": {"ttft_s": 7.0}, "prompt_tokens": 690, "process_s": 7.5}

    monkeypatch.setattr(script, "ask", ask)
    monkeypatch.setattr(script, "answer_of", answer_of)
    model, told = make_model(tmp_path / "model.gguf"), tmp_path / "told.json"
    arguments = ["-m", str(model), "--questions", "3", "--methods", "full", "--json", str(told)]
    arguments += ["--cold", "2", "--llama"]
    assert script.main(arguments) == 0
    questions = list(script.QUESTIONS[:3])
    cold = [(q, True, False) for q in questions[:2]]
    assert asked == cold + [(q, False, True) for q in questions]
    row, llama = json.loads(told.read_text())
    assert (llama["without_n"], llama["without_s"], llama["without_process_s"]) == (2, 7.0, 7.5)
    assert (row["without_process_s"], row["all_cached_s"]) == (9.0, 12.4)
    assert (row["without_s"], row["filling_s"], row["cached_s"]) == (8.0, 9.0, 0.2)
    assert (row["cached_least_s"], row["cached_most_s"]) == (0.1, 0.3)
    assert row["same_answers"] == 2 and "| full | 700 | 8.00 | 0.200 |" in capsys.readouterr().out
    for bad in (["--questions", "1"], ["--cold", "0"], ["--cold", "11"]):
        with pytest.raises(SystemExit):
            script.main(["-m", str(model), *bad])


def test_a_command_that_fails(script):
    with pytest.raises(SparseKVError, match="failed"):
        script.ask(["false"], "Who?")
