"""Tiny models with a next-token block whose drafts are right now and then."""

from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader
from tiny_models import make_model
from tiny_recurrent import DeltaNet

SHAPE: dict[str, Any] = {
    "n_layer": 5, "n_embd": 128, "n_head": 2, "n_head_kv": 1, "n_ff": 128, "n_ctx": 900,
    "recurrent": DeltaNet(next_layer=4), "attention_gain": 4.0,
}  # fmt: skip


def knowing(path: Path, arch: str, **options: Any) -> Path:
    """A model that mostly says its last token again. Its block always does."""
    make_model(path, arch=arch, **SHAPE, **options)
    block = f"blk.{SHAPE['recurrent'].next_layer}."
    weak = ("attn_output", "ssm_out", "ffn_down", "ffn_down_exps", "ffn_down_shexp")
    for tensor in GGUFReader(path, "r+").tensors:
        if tensor.name.split(".")[-2] in weak:
            tensor.data[:] *= 0.0 if tensor.name.startswith(block) else 0.2
        elif tensor.name == f"{block}nextn.eh_proj.weight":
            tensor.data[:] = np.eye(*tensor.data.shape)
    return path
