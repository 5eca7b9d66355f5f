"""scripts/random_model: types and shapes of what it writes, and the memory that it takes."""

import os
import subprocess
import sys

import numpy as np
import pytest
from gguf import GGUFReader
from scripts_as_modules import load_script
from tiny_architectures import Experts

from sparsekv_cli.methods import build_method
from sparsekv_cli.model import load_model
from sparsekv_cli.settings.config import SessionConfig

script = load_script("random_model")
SMALL = {"n_embd": 256, "n_head": 8, "n_head_kv": 2, "n_ff": 512, "n_vocab": 512, "n_ctx": 256}


@pytest.fixture
def small(monkeypatch):
    """The known shapes with small layers."""
    shapes = {name: shape | SMALL for name, shape in script.SHAPES.items()}
    monkeypatch.setattr(script, "SHAPES", shapes)


def tensors(path):
    return {tensor.name: tensor for tensor in GGUFReader(path).tensors}


def test_8b_has_the_published_sizes():
    """8.03 billion weights in 4.9 GB, as Llama-3.1-8B in Q4_K_M."""
    shape = script.SHAPES["llama-3.1-8b"]
    types = script.weight_types(shape, "q4_k_m")
    n_kv = shape["n_head_kv"] * shape["n_embd"] // shape["n_head"]
    rows = {"attn_q": shape["n_embd"], "attn_k": n_kv, "attn_v": n_kv}
    rows |= {"attn_output": shape["n_embd"], "ffn_gate": shape["n_ff"], "ffn_up": shape["n_ff"]}
    rows |= {"ffn_down": shape["n_embd"], "token_embd": shape["n_vocab"]}
    rows["output"] = shape["n_vocab"]
    n_weights = n_bytes = 0
    for name, kind in types.items():
        part = name.removesuffix(".weight").rpartition(".")[2]
        columns = shape["n_ff"] if part == "ffn_down" else shape["n_embd"]
        n_weights += rows[part] * columns
        n_bytes += rows[part] * columns // 256 * {"Q4_K": 144, "Q6_K": 210}[kind]
    assert n_weights == pytest.approx(8.03e9, rel=1e-3)
    assert n_bytes == pytest.approx(4.92e9, rel=5e-3)


def test_4b_with_experts_has_the_sizes_that_it_states():
    """4.2 billion weights, 1.0 of them a token; the router is F32."""
    shape = script.SHAPES["qwen3moe-4b"]
    experts, n_embd, n_layer = shape["experts"], shape["n_embd"], shape["n_layer"]
    n_rows = (2 * shape["n_head"] + 2 * shape["n_head_kv"]) * shape["head_dim"]
    common = shape["n_vocab"] * n_embd + n_layer * n_embd * (n_rows + experts.n)
    expert = 3 * n_embd * experts.n_ff * n_layer
    assert common + experts.n * expert == pytest.approx(4.16e9, rel=5e-3)
    assert common + experts.n_used * expert == pytest.approx(0.99e9, rel=5e-3)
    types = script.weight_types(shape, "q4_k_m")
    wide = [i for i in range(n_layer) if types[f"blk.{i}.ffn_down_exps.weight"] == "Q6_K"]
    assert wide == [0, 3, 6, 9, 10, 11] and "blk.0.ffn_gate_inp.weight" not in types
    assert not any(name.endswith("ffn_down.weight") for name in types)


@pytest.mark.nightly
def test_4b_at_a_small_size(small, tmp_path, monkeypatch):
    small_experts = Experts(n=6, n_used=2, n_ff=256)
    monkeypatch.setitem(script.SHAPES["qwen3moe-4b"], "experts", small_experts)
    path = tmp_path / "4b.gguf"
    assert script.main(["qwen3moe-4b", "q4_k_m", str(path)]) == 0
    found = tensors(path)
    assert found["blk.1.ffn_gate_inp.weight"].tensor_type.name == "F32"
    assert found["blk.1.ffn_down_exps.weight"].tensor_type.name == "Q4_K"
    assert found["blk.3.ffn_down_exps.weight"].tensor_type.name == "Q6_K"
    assert answers(path)


def answers(path):
    """Whether the model of the file has logits that are numbers."""
    sequence = load_model(path, build_method("full", {}), SessionConfig(threads=1)).sequence()
    logits = sequence.prefill([1, 2, 3])
    return np.isfinite(logits).all() and np.isfinite(sequence.decode(4)).all()


@pytest.mark.parametrize("mix", ["q8_0", pytest.param("q4_k_m", marks=pytest.mark.nightly)])
def test_8b_can_be_run(mix, small, tmp_path):
    path = tmp_path / "8b.gguf"
    assert script.main(["llama-3.1-8b", mix, str(path)]) == 0
    assert answers(path)


def test_8b_at_a_small_size(small, tmp_path, capsys):
    path = tmp_path / "8b.gguf"
    assert script.main(["llama-3.1-8b", "q4_k_m", str(path)]) == 0
    assert capsys.readouterr().out == f"{path}: {path.stat().st_size / 1e6:.0f} MB\n"
    found = tensors(path)
    kinds = {name: tensor.tensor_type.name for name, tensor in found.items()}
    assert kinds["output.weight"] == "Q6_K" and kinds["token_embd.weight"] == "Q4_K"
    wide = [i for i in range(32) if kinds[f"blk.{i}.ffn_down.weight"] == "Q6_K"]
    assert wide == [0, 1, 2, 3, 6, 9, 12, 15, 18, 21, 24, 27, 28, 29, 30, 31]
    assert {kinds[f"blk.{i}.attn_q.weight"] for i in range(32)} == {"Q4_K"}
    assert "rope_freqs.weight" in found
    first, last = (found[f"blk.{i}.ffn_up.weight"].data for i in (0, 31))
    assert np.array_equal(first, last)


@pytest.mark.parametrize(
    ("mix", "most", "more", "last"),
    [("q5_k_m", "Q5_K", "Q6_K", "Q6_K"), ("mxfp4", "MXFP4", "MXFP4", "Q8_0")],
)
def test_other_mixes(mix, most, more, last, small, tmp_path):
    path = tmp_path / "model.gguf"
    assert script.main(["llama-3.1-8b", mix, str(path)]) == 0
    kinds = {name: tensor.tensor_type.name for name, tensor in tensors(path).items()}
    assert kinds["blk.0.attn_q.weight"] == kinds["blk.4.ffn_down.weight"] == most
    assert kinds["blk.0.ffn_down.weight"] == kinds["blk.31.attn_v.weight"] == more
    assert kinds["token_embd.weight"] == most and kinds["output.weight"] == last


def test_tied_models_keep_their_mix(small, tmp_path):
    path = tmp_path / "1b.gguf"
    assert script.main(["llama-3.2-1b", "q4_k_m", str(path)]) == 0
    found = tensors(path)
    assert found["token_embd.weight"].tensor_type.name == "Q6_K" and "output.weight" not in found


MEMORY = """
import sys, tracemalloc
from scripts_as_modules import load_script
from tiny_architectures import Experts

script = load_script("random_model")
script.SHAPES["llama-3.1-8b"] |= {small}
tracemalloc.start()
assert script.main(["llama-3.1-8b", "q8_0", sys.argv[1]]) == 0
print(tracemalloc.get_traced_memory()[1])
"""


def test_memory_does_not_grow_with_the_layers(tmp_path):
    """32 layers are written with the memory of a few; in a process without other threads."""
    path = tmp_path / "8b.gguf"
    done = subprocess.run(
        [sys.executable, "-c", MEMORY.replace("{small}", repr(SMALL)), path],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert path.stat().st_size > 15e6
    assert int(done.stdout.split()[-1]) < path.stat().st_size / 4
