"""Blocks that are not run, and files of special layers that are refused by name."""

from dataclasses import replace

import numpy as np
import pytest
from opened import open_sequence
from reference_records import LONG_CASES
from tiny_architectures import TRAITS
from tiny_models import make_model
from tiny_recurrent import Mamba2
from tiny_sequences import tokens

from sparsekv_cli.errors import SparseKVError
from sparsekv_cli.methods.full import Full
from sparsekv_cli.settings.config import SessionConfig

CONFIG = SessionConfig(threads=1, prefill_dtype="f32")


def logits(path):
    sequence = open_sequence(path, Full(), CONFIG)
    result = sequence.prefill(tokens(20))
    sequence.model.gguf.close()
    return result


@pytest.mark.parametrize(
    "arch", ["bailingmoe2", "qwen35", "qwen3next", "glm4", "glm4moe", "exaone4"]
)
def test_blocks_that_predict_further_tokens_are_not_run(arch, tmp_path):
    shape = LONG_CASES[arch]
    plain = make_model(tmp_path / "plain.gguf", **shape)
    keys = {f"{arch}.nextn_predict_layers": 1}
    longer = make_model(tmp_path / "mtp.gguf", **{**shape, "n_layer": 3}, metadata=keys)
    np.testing.assert_array_equal(logits(plain), logits(longer))
    if arch != "qwen35":  # whose block makes drafts
        with pytest.raises(SparseKVError, match="has no next-token block that can make drafts"):
            open_sequence(longer, Full(), SessionConfig(speculate="mtp"))


def test_the_block_of_a_nemotron_that_predicts_further_tokens_is_not_run(tmp_path):
    shape = LONG_CASES["nemotron_h_moe"]
    plain = make_model(tmp_path / "plain.gguf", **shape)
    longer = make_model(
        tmp_path / "mtp.gguf",
        **{**shape, "n_layer": 8, "recurrent": Mamba2(pattern="M-M*-M-+")},
        metadata={"nemotron_h_moe.nextn_predict_layers": 1},
    )
    np.testing.assert_array_equal(logits(plain), logits(longer))


@pytest.mark.parametrize(
    ("arch", "metadata", "said"),
    [
        ("qwen35", {"qwen35.ssm.inner_size": 96}, "ssm.inner_size is 96; 4 heads have 128"),
        ("qwen35", {"qwen35.ssm.state_size": 300}, "ssm.state_size is 300; it must be 1 to 256"),
        ("qwen35", {"qwen35.ssm.group_count": 3}, "no multiple of group_count = 3"),
        ("qwen35", {"qwen35.ssm.conv_kernel": 1}, "ssm.conv_kernel is 1; it must be 2 to 64"),
        ("qwen35", {"qwen35.ssm.conv_kernel": 3}, "ssm_conv1d.weight is 256 x 4"),
        ("qwen3next", {"qwen3next.ssm.group_count": 4}, "attn_qkv.weight is 256 x 128, but"),
        ("granitehybrid", {"granitehybrid.ssm.inner_size": 250}, "inner_size is 250; each of 8"),
        ("granitehybrid", {"granitehybrid.ssm.state_size": 300}, "state_size is 300; it must be"),
        ("granitehybrid", {"granitehybrid.ssm.group_count": 3}, "no multiple of group_count = 3"),
        ("granitehybrid", {"granitehybrid.ssm.conv_kernel": 3}, "ssm_conv1d.weight is 416 x 4"),
        ("granitehybrid", {"granitehybrid.ssm.group_count": 1}, "ssm_in.weight is 680 x 128, but"),
        ("falcon-h1", {"falcon-h1.ssm.inner_size": 2056}, "inner_size is 2056; each of 8 heads"),
        (
            "nemotron_h",
            {"nemotron_h.feed_forward_length": [9, 9, 0, 0, 9, 0, 9]},
            "makes block 0 a",
        ),
        (
            "nemotron_h",
            {"nemotron_h.feed_forward_length": [0, 9, 9, 0, 9, 0, 9]},
            "makes block 2 a",
        ),
        ("nemotron_h_moe", {"nemotron_h_moe.moe_latent_size": 64}, "moe_latent_size is 64: such a"),
        ("nemotron_h_moe", {"nemotron_h_moe.expert_gating_func": 1}, "expert_gating_func is 1"),
        ("lfm2", {"lfm2.shortconv.l_cache": 2}, "shortconv.conv.weight is 128 x 3"),
        ("lfm2moe", {"lfm2moe.expert_gating_func": 1}, "expert_gating_func is 1"),
        ("glm4moe", {"glm4moe.expert_gating_func": 1}, "expert_gating_func is 1"),
        ("glm4moe", {"glm4moe.expert_shared_count": 3}, "ffn_gate_shexp.weight is 192 x 128, but"),
        ("glm4moe", {"glm4moe.expert_weights_scale": -1.0}, "weights_scale is -1; it must be at"),
        ("glm4moe", {"glm4moe.rope.dimension_count": 31}, "rope.dimension_count is 31; it must be"),
        ("deepseek", {"deepseek.expert_gating_func": 2}, "expert_gating_func is 2: such a mixture"),
        ("bailingmoe2", {"bailingmoe2.expert_gating_func": 1}, "expert_gating_func is 1: such a"),
        ("minimax-m2", {"minimax-m2.expert_weights_scale": 2.5}, "weights_scale is 2.5: it must"),
        ("glm4", {"glm4.rope.dimension_sections": [8, 4, 4, 0]}, "M-RoPE cannot be run with this"),
        ("glm4", {"glm4.rope.scaling.type": "ntk"}, "rope.scaling.type is 'ntk'; supported are"),
        ("ernie4_5-moe", {"ernie4_5-moe.interleave_moe_layer_step": 2}, "layer_step is 2: such a"),
        ("minicpm", {"minicpm.logit_scale": 0.0}, "logit_scale is 0; it must be above 0"),
    ],
)
def test_impossible_sizes_are_refused_by_name(arch, metadata, said, tmp_path):
    path = make_model(tmp_path / "model.gguf", **LONG_CASES[arch], metadata=metadata)
    with pytest.raises(SparseKVError, match=said):
        open_sequence(path, Full(), CONFIG)


@pytest.mark.parametrize(
    ("arch", "tensor", "said"),
    [
        ("ernie4_5", "ffn_norm.weight", "is missing"),
        ("exaone4", "post_ffw_norm.weight", "is missing"),
        ("exaone4", "attn_k_norm.weight", "is missing"),
        ("glm4", "post_attention_norm.weight", "is missing"),
        ("minimax-m2", "attn_q_norm.weight", "is missing"),
        ("olmo2", "attn_k_norm.weight", "is missing"),
        ("seed_oss", "post_attention_norm.weight", "is missing"),
        ("qwen3next", "attn_q_norm.weight", "is missing"),
        ("nemotron_h", "ffn_up.weight", "is missing"),
        ("nemotron_h_moe", "exp_probs_b.bias", "is missing"),
        ("falcon-h1", "ffn_norm", "is missing"),
        *(("granitehybrid", f"ssm_{name}", "is missing") for name in ("in.weight", "dt.bias")),
    ],
)
def test_a_missing_tensor_is_named(arch, tensor, said, tmp_path):
    name = f"blk.{int(not tensor.startswith('ssm'))}.{tensor}"
    path = make_model(tmp_path / "model.gguf", **LONG_CASES[arch], omit=[name])
    with pytest.raises(SparseKVError, match=f"tensor {name} {said}"):
        open_sequence(path, Full(), CONFIG)


@pytest.mark.parametrize("name", ["embedding_scale", "logit_scale", "residual_scale"])
def test_an_old_minicpm_without_scales_is_refused(name, tmp_path, monkeypatch):
    keys = {key: value for key, value in TRAITS["minicpm"].keys.items() if key != name}
    monkeypatch.setitem(TRAITS, "minicpm", replace(TRAITS["minicpm"], keys=keys))
    path = make_model(tmp_path / "model.gguf", **LONG_CASES["minicpm"])
    with pytest.raises(SparseKVError, match=f"minicpm.{name} is missing, and the model cannot"):
        open_sequence(path, Full(), CONFIG)


def test_a_small_exaone4_has_no_windows(tmp_path):
    """Only the model of 64 layers has them, whatever the others state. All layers are rotated."""
    shape, keys = LONG_CASES["exaone4"], {"exaone4.attention.sliding_window": 8}
    paths = [
        make_model(tmp_path / f"{i}.gguf", **shape, metadata=given)
        for i, given in enumerate(({}, keys))
    ]
    np.testing.assert_array_equal(*map(logits, paths))


@pytest.mark.parametrize("arch", ["lfm2", "granitehybrid", "nemotron_h", "falcon-h1"])
def test_a_gpu_refuses_them_by_name(arch, tmp_path):
    pytest.importorskip("torch")
    from sparsekv_cli.device.engine import open_device_engine

    path = make_model(tmp_path / "model.gguf", **LONG_CASES[arch])
    sequence = open_sequence(path, Full(), CONFIG)
    refusal = f"architecture {arch} with recurrent layers does not run"
    with pytest.raises(SparseKVError, match=refusal):
        open_device_engine(
            None, sequence.model.hparams, None, None, Full(), CONFIG, 1, 64, None
        )  # fmt: skip
    sequence.model.gguf.close()
