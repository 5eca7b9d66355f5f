"""Mixtures of experts: the choice, the tensors and keys that a file must have, bytes a token."""

from __future__ import annotations

import numpy as np
import pytest
from test_weights import copy_with, read
from tiny_architectures import TRAITS, Experts
from tiny_models import make_model

from sparsekv_cli.errors import SparseKVError, UnsupportedModelError
from sparsekv_cli.models.architectures import ARCHITECTURES
from sparsekv_cli.models.experts import route
from sparsekv_cli.models.hparams import ExpertParams
from sparsekv_cli.models.weights import ExpertWeights

SIZES = {"arch": "qwen2moe", "n_layer": 1, "n_embd": 64, "n_ff": 64, "tied": False}


def params(n: int, n_used: int, *, normalised: bool) -> ExpertParams:
    return ExpertParams(n, n_used, 32, 0, False, normalised)


@pytest.mark.parametrize("normalised", [True, False])
@pytest.mark.parametrize(("n", "n_used"), [(8, 2), (128, 8), (3, 3), (1, 1)])
def test_route(n, n_used, normalised):
    logits = np.random.default_rng(0).standard_normal((5, n)).astype(np.float32)
    chosen, weights = route(logits, params(n, n_used, normalised=normalised))
    shares = np.exp(logits.astype(np.float64))
    shares /= shares.sum(1, keepdims=True)
    for row in range(5):
        assert set(chosen[row]) == set(np.argsort(shares[row])[n - n_used :])
        expected = shares[row, chosen[row]]
        assert (np.diff(expected) <= 0).all()
        if normalised:
            expected = expected / expected.sum()
        np.testing.assert_allclose(weights[row], expected, rtol=1e-5)


def test_of_equal_experts_the_first_is_chosen_and_large_logits_stay_finite():
    logits = np.array([[1.0, 2.0, 2.0, 2.0], [0.0, 1e4, -1e4, 0.0]], np.float32)
    chosen, weights = route(logits, params(4, 2, normalised=True))
    assert chosen[0].tolist() == [1, 2] and chosen[1, 0] == 1
    np.testing.assert_allclose(weights, [[0.5, 0.5], [1, 0]])


def test_bytes_a_token_are_of_the_chosen_experts(tmp_path):
    experts = Experts(n=8, n_used=3, n_ff=96, n_shared=160, gate=True)
    weights = read(make_model(tmp_path / "model.gguf", wtype="Q8_0", experts=experts, **SIZES))
    matrices = 3 * 64 * (3 * 96 + 160) + 2 * 64 * 64 + 2 * 64 * 32 + 512 * 64
    assert weights.n_bytes == matrices * 34 // 32 + 8 * 64 * 4  # and the router, F32
    unused = 3 * 64 * 5 * 96 * 34 // 32
    assert weights.n_bytes_held == weights.n_bytes + unused - 8 * 64 * 4


def test_an_expert_is_a_view_of_the_file(tmp_path):
    ffn = read(make_model(tmp_path / "model.gguf", wtype="Q8_0", **SIZES)).layers[0].ffn
    assert isinstance(ffn, ExpertWeights)
    gate = ffn.expert(2).gate
    assert (gate.n_rows, gate.n_columns, gate.n_matrices) == (96, 64, 1)
    np.testing.assert_array_equal(gate.data, ffn.experts.gate.data[192:288])
    assert np.shares_memory(gate.data, ffn.experts.gate.data)


@pytest.mark.parametrize(
    ("edit", "found"),
    [
        (lambda t: t.pop("blk.0.ffn_up_exps.weight"), "blk.0.ffn_up_exps.weight is missing"),
        (lambda t: t.pop("blk.0.ffn_gate_inp.weight"), "blk.0.ffn_gate_inp.weight is missing"),
        (lambda t: t.pop("blk.0.ffn_gate_inp_shexp.weight"), "gate_inp_shexp.weight is missing"),
        (
            lambda t: t.update({"blk.0.ffn_gate_exps.weight": cut(t, "blk.0.ffn_gate_exps")}),
            "blk.0.ffn_gate_exps.weight is 7 x 96 x 64, but the hyper-parameters say 8 x 96 x 64",
        ),
        (
            lambda t: t.update({"blk.0.ffn_down_exps.weight": flat(t, "blk.0.ffn_down_exps")}),
            "blk.0.ffn_down_exps.weight is 512 x 96, but the hyper-parameters say 8 x 64 x 96",
        ),
        (
            lambda t: t.update({"blk.0.ffn_gate.0.weight": flat(t, "blk.0.ffn_gate_exps")}),
            "blk.0.ffn_gate.0.weight: its experts are separate tensors, an old form",
        ),
    ],
)
def test_broken_experts_are_refused_in_one_line(edit, found, tmp_path):
    source = make_model(tmp_path / "model.gguf", **SIZES)
    broken = copy_with(source, tmp_path / "broken.gguf", edit)
    with pytest.raises(SparseKVError) as caught:
        read(broken)
    assert found in str(caught.value) and "\n" not in str(caught.value)


def cut(tensors, name):
    data, kind = tensors[f"{name}.weight"]
    return data[:7], kind


def flat(tensors, name):
    data, kind = tensors[f"{name}.weight"]
    return data.reshape(-1, data.shape[-1]), kind


@pytest.mark.parametrize(
    ("arch", "experts", "metadata", "found"),
    [
        ("qwen3moe", Experts(n=4, n_used=5), {}, "expert_used_count is 5, but expert_count is 4"),
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
        keys = {"granite.logit_scale": value}
        path = make_model(tmp_path / "m.gguf", arch="granite", metadata=keys)
        with pytest.raises(SparseKVError, match=found):
            read(path)


def test_every_architecture_has_a_tiny_model():
    assert set(TRAITS) == set(ARCHITECTURES)
