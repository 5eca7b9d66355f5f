"""Mixtures of experts: the tensors and keys that a file must have, bytes a token."""

import numpy as np
import pytest
from gguf import GGMLQuantizationType
from gguf.quants import quantize
from opened import open_sequence
from test_weights import copy_with, read
from tiny_architectures import TRAITS, Experts
from tiny_models import make_model

from sparsekv_cli.cpu.jit.pointers import address
from sparsekv_cli.errors import SparseKVError, UnsupportedModelError
from sparsekv_cli.methods import build_method
from sparsekv_cli.models.architectures import ARCHITECTURES
from sparsekv_cli.models.weights import ExpertWeights
from sparsekv_cli.settings.config import SessionConfig

SIZES = {"arch": "qwen2moe", "n_layer": 1, "n_embd": 64, "n_ff": 64, "tied": False}


def test_bytes_a_token_are_of_the_chosen_experts(tmp_path):
    experts = Experts(n=8, n_used=3, n_ff=96, n_shared=160, gate=True)
    weights = read(make_model(tmp_path / "model.gguf", wtype="Q8_0", experts=experts, **SIZES))
    matrices = 3 * 64 * (3 * 96 + 160) + 2 * 64 * 64 + 2 * 64 * 32 + 512 * 64
    assert weights.bytes_a_step(1) == matrices * 34 // 32 + 8 * 64 * 4  # and the router, F32
    unused = 3 * 64 * 5 * 96 * 34 // 32
    assert weights.n_bytes_held == weights.bytes_a_step(1) + unused - 8 * 64 * 4
    # Two rows choose 1 - (5/8)^2 of the experts between them, if they choose independently.
    chosen = round(weights.layers[0].ffn.experts.n_bytes * (1 - (5 / 8) ** 2))
    of_one = 3 * 64 * 3 * 96 * 34 // 32
    assert weights.bytes_a_step(2) == weights.bytes_a_step(1) - of_one + chosen
    assert weights.bytes_a_step(100) == weights.bytes_a_step(1) + unused


def test_an_expert_is_a_view_of_the_file(tmp_path):
    ffn = read(make_model(tmp_path / "model.gguf", wtype="Q8_0", **SIZES)).layers[0].ffn
    assert isinstance(ffn, ExpertWeights)
    gate = ffn.experts.gate_up[0].matrix(2)
    assert (gate.n_rows, gate.n_columns, gate.n_matrices) == (96, 64, 1)
    np.testing.assert_array_equal(gate.data, ffn.experts.gate_up[0].data[192:288])
    assert np.shares_memory(gate.data, ffn.experts.gate_up[0].data)


@pytest.mark.parametrize("kind", ["F32", "F16", "Q8_0"])
def test_a_gate_as_the_converter_writes_it(kind, tmp_path):
    """It keeps the dimension of 1, and quantises the gate as a matrix."""
    source, target = make_model(tmp_path / "model.gguf", **SIZES), tmp_path / "converted.gguf"
    name, kind = "blk.0.ffn_gate_inp_shexp.weight", GGMLQuantizationType[kind]
    copy_with(source, target, lambda t: t.update({name: (quantize(t[name][0][None], kind), kind)}))
    gate, wanted = (read(path).layers[0].ffn.shared_gate for path in (target, source))
    np.testing.assert_allclose(gate, wanted, atol=2e-3)


@pytest.mark.parametrize(
    ("name", "to", "change", "found"),
    [
        ("ffn_up_exps", "", None, "blk.0.ffn_up_exps.weight is missing"),
        ("ffn_gate_inp", "", None, "blk.0.ffn_gate_inp.weight is missing"),
        ("ffn_gate_inp_shexp", "", None, "gate_inp_shexp.weight is missing"),
        ("ffn_gate_exps", "ffn_gate_exps", lambda data: data[:7],
         "blk.0.ffn_gate_exps.weight is 7 x 96 x 64, but the hyper-parameters say 8 x 96 x 64"),
        ("ffn_down_exps", "ffn_down_exps", np.concatenate,
         "blk.0.ffn_down_exps.weight is 512 x 96, but the hyper-parameters say 8 x 64 x 96"),
        ("ffn_gate_exps", "ffn_gate.0", np.concatenate,
         "blk.0.ffn_gate.0.weight: its experts are separate tensors, an old form"),
    ],
)  # fmt: skip
def test_broken_experts_are_refused_in_one_line(name, to, change, found, tmp_path):
    def edit(tensors):
        data, kind = tensors.pop(f"blk.0.{name}.weight")
        if to:
            tensors[f"blk.0.{to}.weight"] = change(data), kind

    source = make_model(tmp_path / "model.gguf", **SIZES)
    broken = copy_with(source, tmp_path / "broken.gguf", edit)
    with pytest.raises(SparseKVError) as caught:
        read(broken)
    assert found in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("arch", "experts", "metadata", "found"),
    [
        ("qwen3moe", Experts(n=4, n_used=5), {}, "expert_used_count is 5; it must be 1 to 4"),
        ("qwen3moe", Experts(n_used=0), {}, "expert_used_count is 0; it must be 1"),
        ("qwen3", Experts(), {}, "expert_count is 8: no experts can be run with this architectur"),
        ("qwen3moe", None, {"expert_gating_func": 2}, "expert_gating_func is 2: such a mixture"),
        ("qwen3moe", None, {"expert_group_count": 4}, "expert_group_count is 4: such a mixture"),
        ("qwen3moe", None, {"expert_weights_scale": 2.5}, "expert_weights_scale is 2.5: it must"),
        ("qwen3moe", None, {"expert_weights_norm": False}, "expert_weights_norm must be true"),
        ("qwen2moe", None, {"expert_weights_norm": True}, "expert_weights_norm must be false"),
    ],
)
def test_keys_that_are_refused(arch, experts, metadata, found, tmp_path):
    keys = {f"{arch}.{key}": value for key, value in metadata.items()}
    path = make_model(
        tmp_path / "m.gguf", **{**SIZES, "arch": arch}, experts=experts, metadata=keys
    )
    with pytest.raises(SparseKVError) as caught:
        read(path)
    assert found in str(caught.value) and "\n" not in str(caught.value)
    assert isinstance(caught.value, UnsupportedModelError) != ("used_count" in found)


def test_experts_that_must_be_there(tmp_path, monkeypatch):
    monkeypatch.setitem(TRAITS, "qwen3moe", TRAITS["qwen3"])
    path = make_model(tmp_path / "m.gguf", arch="qwen3moe")
    with pytest.raises(SparseKVError, match="expert_count is missing or 0; this architecture has"):
        read(path)


def test_a_granite_without_a_logit_scale_is_refused(tmp_path):
    for value, found in ((0.0, "logit_scale is 0; it must be above 0"), (-1.0, "must be at least")):
        path = make_model(tmp_path / "m", arch="granite", metadata={"granite.logit_scale": value})
        with pytest.raises(SparseKVError, match=found):
            read(path)


def test_every_architecture_has_a_tiny_model():
    assert set(TRAITS) == set(ARCHITECTURES)


def test_what_a_step_prefetches_follows_the_order_of_use(tmp_path):
    """A layer's regions: attention, router, shared expert; then the next layer's, or the head."""
    path = make_model(tmp_path / "model.gguf", wtype="Q8_0", **{**SIZES, "n_layer": 2})
    sequence = open_sequence(path, build_method("full", {}), SessionConfig(threads=1, repack="off"))
    step, expected = sequence.model.decoder._step, []
    for layer in sequence.model.decoder.weights.layers:
        linears = [*layer.attention(), layer.ffn.router, *layer.ffn.shared.linears()]
        expected += [(address(w.data), w.data.nbytes) for w in linears]
    output = sequence.model.decoder.weights.output
    expected.append((address(output.data), output.data.nbytes))
    np.testing.assert_array_equal(step._regions, [*expected, *expected[:4]])
    first, second = (address(step._layers[i].regions) for i in range(2))
    assert first == address(step._regions) and second - first == 8 * 16
    sequence.model.gguf.close()
