"""scripts/accuracy/perplexity: its figures, its greedy choice, and when it fails."""

import json

import numpy as np
import pytest
from reference_decoder import reference_logits
from scripts_as_modules import load_script
from tiny_models import make_model

from sparsekv_cli.models.gguf.file import open_gguf
from sparsekv_cli.models.tokenizer.tokenizer import load_tokenizer

script = load_script("accuracy/perplexity")
TEXT = "the quick brown fox jumps over the lazy dog and runs away " * 4


class FakeModel:
    """A plain decoder in place of llama.cpp; its logits times ``sharper``."""

    sharper = 1.0
    shift = 0  # added to every token of a text
    lifted = -1  # a token whose logit is the greatest

    def __init__(self, library, path, n_ctx):
        self.path, self.ids = path, []

    def tokenize(self, text):
        ids = load_tokenizer(open_gguf(self.path).metadata).encode(text, parse_special=False)
        return [token + self.shift for token in ids]

    def evaluate(self, ids, n_past, n_last):
        self.ids = [*self.ids[:n_past], *ids]
        found = self.sharper * reference_logits(self.path, self.ids, n_last=n_last)
        if self.lifted >= 0:
            found[:, self.lifted] = found.max() + 10
        return found.astype(np.float32)

    def close(self):
        pass


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Runs the script on a tiny model; returns its exit code and rows."""
    monkeypatch.setattr(script, "LlamaLibrary", lambda n_threads: None)
    monkeypatch.setattr(script, "LlamaModel", FakeModel)
    monkeypatch.setattr(script.importlib.util, "find_spec", lambda name: True)
    model = make_model(tmp_path / "m.gguf", n_embd=128, n_ff=128)
    text, told = tmp_path / "text", tmp_path / "told.json"
    text.write_text(TEXT)

    def run(*arguments):
        given = ["-m", str(model), "-f", str(text), "--threads", "1", "--prefill-dtype", "f32"]
        code = script.main([*given, "--json", str(told), *arguments])
        return code, json.loads(told.read_text()) if told.is_file() else []

    return run


@pytest.mark.parametrize(("sharper", "expected"), [(1.0, 0), (3.0, 1)])
def test_perplexity(run, monkeypatch, capsys, sharper, expected):
    monkeypatch.setattr(FakeModel, "sharper", sharper)
    code, rows = run("-c", "40", "--chunks", "2")
    assert code == expected
    llama, f32, prefill, full = rows
    assert [row["program"] for row in rows] == ["llama.cpp", "f32", "prefill", "full"]
    for row in (f32, prefill, full):
        assert row["percent"] == pytest.approx(100 * abs(row["ppl"] / llama["ppl"] - 1), abs=1e-4)
        assert (row["kld"] > 0.01) == (expected == 1) and row["kld_f32"] < 0.001
    assert (llama["kld_f32"] > 0.01) == (expected == 1) and llama["kld"] == 0
    shown = f"text text, program llama.cpp, ppl {llama['ppl']:.5g}, percent "
    assert capsys.readouterr().out.startswith(shown)
    code, rows = run("-c", "40", "--chunks", "2", "--no-f32")
    assert code == expected and len(rows) == 3 and rows[2]["kld"] == full["kld"]
    code, rows = run("-c", "40", "--chunks", "2", "--no-decode")
    assert code == expected and rows == [llama, f32, prefill]


def test_greedy_choice(run, monkeypatch, capsys):
    monkeypatch.setattr(script, "CHARACTERS", 30)
    code, (row,) = run("--greedy", "6", "-c", "64")
    assert code == 0 and row["equal"] == row["prompts"] == 5 and row["firsts"] == ""
    same = {row[f"same_{pair}"] for pair in ("llama_ours", "llama_f32", "ours_f32")}
    assert same == {30} == {row["tokens"]} and row["noise_llama_ours"] < 0.01
    monkeypatch.setattr(FakeModel, "lifted", 7)
    code, (row,) = run("--greedy", "6", "-c", "64")
    assert code == 1 and row["equal"] == 0 and row["same_ours_f32"] == 30
    assert row["gap"] >= 10 and row["firsts"].startswith("0 (1")
    first = row["differences"][0]
    assert (first["prompt"], first["step"]) == (0, 0) and first["gap"] > 6 * first["noise"]
    assert f"gap {row['gap']:.5g}" in capsys.readouterr().out


def test_other_tokens_are_refused(run, monkeypatch, capsys):
    monkeypatch.setattr(FakeModel, "shift", 1)
    monkeypatch.setattr(script, "CHARACTERS", 30)
    assert run("-c", "40") == (1, []) and run("--greedy", "2") == (1, [])
    assert "error: token 0 of the text is [" in capsys.readouterr().err


def test_without_llama(monkeypatch, capsys):
    monkeypatch.setattr(script.importlib.util, "find_spec", lambda name: None)
    assert script.main([]) == 1 and "pip install" in capsys.readouterr().err


def test_bad_input_is_a_line(run, tmp_path, capsys):
    assert run("--greedy", "2") == (1, [])
    assert f"error: the text has {len(TEXT)} characters" in capsys.readouterr().err
    (tmp_path / "text").write_bytes(b"\xff" * 2000)
    assert run("-c", "40") == (1, []) and "can't decode" in capsys.readouterr().err
    with pytest.raises(SystemExit) as stopped:
        run("-c", "7")
    assert stopped.value.code == 2 and "-c must be at least 8" in capsys.readouterr().err


def test_a_prompt_that_is_too_long_is_refused_ahead_of_llama(run, monkeypatch, capsys):
    monkeypatch.setattr(script, "CHARACTERS", 100)
    monkeypatch.setattr(FakeModel, "evaluate", None)
    assert run("--greedy", "6", "-c", "8") == (1, []) and "error: " in capsys.readouterr().err
