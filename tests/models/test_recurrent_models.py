"""Models with recurrent layers: blocks that are not run, and files that are refused by name."""

import numpy as np
import pytest
from opened import open_sequence
from reference_records import LONG_CASES
from tiny_models import make_model
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


def test_blocks_that_predict_further_tokens_are_not_run(tmp_path):
    shape = LONG_CASES["qwen35"]
    plain = make_model(tmp_path / "plain.gguf", **shape)
    keys = {"qwen35.nextn_predict_layers": 1}
    longer = make_model(tmp_path / "mtp.gguf", **{**shape, "n_layer": 3}, metadata=keys)
    np.testing.assert_array_equal(logits(plain), logits(longer))


@pytest.mark.parametrize(
    ("arch", "metadata", "said"),
    [
        ("qwen35", {"qwen35.ssm.inner_size": 96}, "ssm.inner_size is 96; 4 heads have 128"),
        ("qwen35", {"qwen35.ssm.state_size": 300}, "ssm.state_size is 300; it must be 1 to 256"),
        ("qwen35", {"qwen35.ssm.group_count": 3}, "no multiple of group_count = 3"),
        ("qwen35", {"qwen35.ssm.conv_kernel": 1}, "ssm.conv_kernel is 1; it must be 2 to 64"),
        ("qwen35", {"qwen35.ssm.conv_kernel": 3}, "ssm_conv1d.weight is 256 x 4"),
        ("lfm2", {"lfm2.shortconv.l_cache": 2}, "shortconv.conv.weight is 128 x 3"),
        ("lfm2moe", {"lfm2moe.expert_gating_func": 1}, "expert_gating_func is 1"),
    ],
)
def test_impossible_sizes_are_refused_by_name(arch, metadata, said, tmp_path):
    path = make_model(tmp_path / "model.gguf", **LONG_CASES[arch], metadata=metadata)
    with pytest.raises(SparseKVError, match=said):
        open_sequence(path, Full(), CONFIG)


def test_a_gpu_refuses_them_by_name(tmp_path):
    pytest.importorskip("torch")
    from sparsekv_cli.device.engine import open_device_engine

    path = make_model(tmp_path / "model.gguf", **LONG_CASES["lfm2"])
    sequence = open_sequence(path, Full(), CONFIG)
    with pytest.raises(SparseKVError, match="architecture lfm2 with state layers does not run"):
        open_device_engine(
            None, sequence.model.hparams, None, None, Full(), CONFIG, 1, 64, None
        )  # fmt: skip
    sequence.model.gguf.close()
