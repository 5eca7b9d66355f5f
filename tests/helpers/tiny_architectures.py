"""What the tiny models of each architecture have beyond Llama's, in sizes that show in few tokens.

An independent description: it says what llama.cpp wants in a file, not what the package reads.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from gguf import GGUFWriter

GRANITE_SCALES = {
    "attention.scale": 0.2,
    "embedding_scale": 3.0,
    "residual_scale": 0.4,
    "logit_scale": 0.7,
}
ORIGINAL_CONTEXT = 96  # of mistral3 and phi3: what depends on it shows in a prompt of 100 tokens


@dataclass(frozen=True)
class Experts:
    """n_used of n experts of length n_ff; n_shared: length of the shared one, gate: whether gated.

    own_length: whether the length has a key of its own, or is feed_forward_length. biases: of the
    router and of the experts' matrices.
    """

    n: int = 8
    n_used: int = 3
    n_ff: int = 96
    n_shared: int = 0
    gate: bool = False
    own_length: bool = True
    biases: bool = False


@dataclass(frozen=True)
class Traits:
    """pairing: which dims RoPE turns together: ``norm`` 2i and 2i + 1, ``neox`` i and i + n/2.

    rotated: share of a head's dims. no_rope_step: of so many layers the last is not turned.
    post_norms: norms of what a block adds. fused: attn_qkv, and ffn_up with the gate's rows first.
    factors: LongRoPE's tensors. sinks: a score of each head without a value, and a bias of the
    output; the norm ahead of the experts has the name of a norm behind attention.
    keys: metadata, without the architecture's name; a list is an array of integers.
    """

    pairing: str = "neox"
    biases: bool = False
    qk_norm: bool = False
    rotated: float = 1.0
    no_rope_step: int = 0
    fused: bool = False
    factors: bool = False
    experts: Experts | None = None
    post_norms: bool = False
    sinks: bool = False
    keys: Mapping[str, Any] = field(default_factory=dict)


TRAITS = {
    "llama": Traits("norm"),
    "qwen2": Traits(biases=True),
    "qwen3": Traits(qk_norm=True),
    "qwen2vl": Traits(biases=True, keys={"rope.dimension_sections": [16, 8, 8, 0]}),
    "qwen3vl": Traits(
        qk_norm=True, keys={"rope.dimension_sections": [11, 11, 10, 0], "n_deepstack_layers": 0}
    ),
    "qwen2moe": Traits(biases=True, experts=Experts(n_shared=160, gate=True)),
    "qwen3moe": Traits(qk_norm=True, experts=Experts()),
    "qwen3vlmoe": Traits(
        qk_norm=True,
        experts=Experts(),
        keys={"rope.dimension_sections": [11, 11, 10, 0], "n_deepstack_layers": 0},
    ),
    "granite": Traits("norm", keys=GRANITE_SCALES),
    "granitemoe": Traits(
        "norm", experts=Experts(n_shared=128, own_length=False), keys=GRANITE_SCALES
    ),
    "smollm3": Traits("norm", no_rope_step=4),
    "gemma2": Traits(
        post_norms=True,
        keys={
            "attention.sliding_window": 40,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 5.0,
        },
    ),
    "gpt-oss": Traits(
        biases=True,
        sinks=True,
        experts=Experts(biases=True),
        keys={
            "attention.sliding_window": 40,
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": 4.0,
            "rope.scaling.original_context_length": ORIGINAL_CONTEXT,
        },
    ),
    "gemma3": Traits(
        qk_norm=True,
        post_norms=True,
        keys={
            "attention.sliding_window": 40,
            "rope.scaling.type": "linear",
            "rope.scaling.factor": 4.0,
            "rope.freq_base": 50000.0,
        },
    ),
    "mistral3": Traits(
        "norm",
        keys={
            "attention.temperature_scale": 0.4,
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": 4.0,
            "rope.scaling.original_context_length": ORIGINAL_CONTEXT,
            "rope.scaling.yarn_log_multiplier": 1.0,
        },
    ),
    "phi3": Traits(
        rotated=0.75,
        fused=True,
        factors=True,
        keys={
            "rope.scaling.original_context_length": ORIGINAL_CONTEXT,
            "rope.scaling.attn_factor": 1.19,
            "attention.sliding_window": 32,
        },
    ),
}


def rotated_dims(arch: str, head_dim: int) -> int:
    """Dims of a head that are turned, in layers where any are."""
    return int(TRAITS[arch].rotated * head_dim) // 2 * 2


def long_factors(n_rot: int) -> dict[str, np.ndarray]:
    """LongRoPE's tensors: factors near 1 for short contexts, growing ones for long ones."""
    pair = np.arange(n_rot // 2)
    return {
        "rope_factors_short.weight": (1 + 0.01 * pair).astype(np.float32),
        "rope_factors_long.weight": (1 + 0.2 * pair).astype(np.float32),
    }


def add_expert_keys(writer: GGUFWriter, arch: str, experts: Experts) -> None:
    writer.add_uint32(f"{arch}.expert_count", experts.n)
    writer.add_uint32(f"{arch}.expert_used_count", experts.n_used)
    if experts.own_length:
        writer.add_uint32(f"{arch}.expert_feed_forward_length", experts.n_ff)
    if experts.n_shared:
        writer.add_uint32(f"{arch}.expert_shared_feed_forward_length", experts.n_shared)


def add_value(writer: GGUFWriter, key: str, value: Any) -> None:
    """One metadata value by its Python type."""
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_int32(key, value)
    elif isinstance(value, np.uint32):
        writer.add_uint32(key, int(value))
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    elif isinstance(value, list):
        writer.add_array(key, value)
    else:
        raise ValueError(f"metadata {key}: {type(value).__name__} is no kind of value here")
