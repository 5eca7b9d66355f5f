"""scripts/accuracy/perplexity: the same chunks, its figures, and when it fails."""

import json

import numpy as np
import pytest
from reference_decoder import reference_logits
from scripts_as_modules import load_script
from tiny_models import make_model

script = load_script("accuracy/perplexity")


class FakeModel:
    """A plain decoder in place of llama.cpp; its logits times ``sharper``."""

    sharper = 1.0

    def __init__(self, library, path, n_ctx):
        self.path = path

    def evaluate(self, ids, n_past, n_last):
        return (self.sharper * reference_logits(self.path, ids, n_last=n_last)).astype(np.float32)

    def close(self):
        pass


@pytest.mark.parametrize(("sharper", "code"), [(1.0, 0), (3.0, 1)])
def test_figures(tmp_path, monkeypatch, capsys, sharper, code):
    monkeypatch.setattr(script, "LlamaLibrary", lambda n_threads: None)
    monkeypatch.setattr(script, "LlamaModel", FakeModel)
    monkeypatch.setattr(script.importlib.util, "find_spec", lambda name: True)
    monkeypatch.setattr(FakeModel, "sharper", sharper)
    model = make_model(tmp_path / "m.gguf", n_embd=128, n_ff=128)
    text, told = tmp_path / "text", tmp_path / "told.json"
    text.write_text("the quick brown fox jumps over the lazy dog and runs away " * 4)
    arguments = ["-m", str(model), "-f", str(text), "-c", "40", "--chunks", "2", "--threads", "1"]
    assert script.main([*arguments, "--prefill-dtype", "f32", "--json", str(told)]) == code
    llama, prefill, full = json.loads(told.read_text())
    assert [row["program"] for row in (llama, prefill, full)] == ["llama.cpp", "prefill", "full"]
    for row in (prefill, full):
        assert row["ratio"] == row["ppl"] / llama["ppl"] and (row["kld"] > 0.01) == (code == 1)
    assert capsys.readouterr().out.startswith(f"llama.cpp  PPL {llama['ppl']:.4f} (+0.000%)")


def test_without_llama(monkeypatch, capsys):
    monkeypatch.setattr(script.importlib.util, "find_spec", lambda name: None)
    assert script.main([]) == 1 and "pip install" in capsys.readouterr().err
