"""What the tiny models of each architecture have beyond Llama's, in sizes that show in few tokens.

An independent description: it says what llama.cpp wants in a file, not what the package reads.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from gguf import GGUFWriter
from tiny_gemma4 import Gemma4Layers
from tiny_recurrent import DeltaNet, ShortConvolution

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
    router and of the experts' matrices. n_dense: the first layers, which have none; gating:
    expert_gating_func, 2 for a sigmoid with a bias. beside: the feed-forward stays beside them;
    router, experts and it have norms, gate and up are one tensor, and each expert has a scale.
    """

    n: int = 8
    n_used: int = 3
    n_ff: int = 96
    n_shared: int = 0
    gate: bool = False
    own_length: bool = True
    biases: bool = False
    n_dense: int = 0
    gating: int = 0
    beside: bool = False


@dataclass(frozen=True)
class Traits:
    """pairing: which dims RoPE turns together: ``norm`` 2i and 2i + 1, ``neox`` i and i + n/2.

    rotated: share of a head's dims. no_rope_step: of so many layers the last is not turned.
    norm_of_heads: mean and deviation of its weights. post_norms: norms of what a block adds.
    fused: attn_qkv, and ffn_up with the gate's rows first.
    factors: LongRoPE's tensors. sinks: a score of each head without a value, and a bias of the
    output. ffn_norm: name of the norm ahead of the feed-forward.
    keys: metadata, without the architecture's name; a list is an array of integers. recurrent: what
    some layers have instead of attention. gated: attn_q has a gate behind each head's query.
    layers: what the layers of Gemma 4 have.
    """

    pairing: str = "neox"
    biases: bool = False
    qk_norm: bool = False
    norm_of_heads: tuple[float, float] = (1.0, 0.3)
    rotated: float = 1.0
    no_rope_step: int = 0
    fused: bool = False
    factors: bool = False
    experts: Experts | None = None
    post_norms: bool = False
    sinks: bool = False
    recurrent: ShortConvolution | DeltaNet | None = None
    gated: bool = False
    layers: Gemma4Layers | None = None
    ffn_norm: str = "ffn_norm"
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
        ffn_norm="post_attention_norm",
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
    "gemma4": Traits(
        qk_norm=True,
        norm_of_heads=(0.25, 0.08),  # the softmax has no scale
        post_norms=True,
        layers=Gemma4Layers(),
        keys={
            "attention.sliding_window": 40,
            "rope.freq_base": 50000.0,
            "final_logit_softcapping": 5.0,
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
_QWEN35 = Traits(
    qk_norm=True,
    rotated=0.25,
    recurrent=DeltaNet(),
    gated=True,
    ffn_norm="post_attention_norm",
    keys={"rope.dimension_sections": [3, 3, 2, 0]},
)
TRAITS |= {
    "lfm2": Traits(qk_norm=True, recurrent=ShortConvolution()),
    "lfm2moe": Traits(
        qk_norm=True, recurrent=ShortConvolution(), experts=Experts(n_dense=1, gating=2)
    ),
    "qwen35": _QWEN35,
    "qwen35moe": replace(_QWEN35, experts=Experts(n_shared=160, gate=True)),
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


def llama3_factors(head_dim: int, freq_base: float) -> np.ndarray:
    """rope_freqs.weight (head_dim // 2,) as Llama 3.1's converter writes it: factor 8, context 64.

    High frequencies keep 1, low ones are divided by 8, those between are blended. The original
    context is 64 positions here, so that all three cases occur in a small head.
    """
    factor, low, high, context = 8.0, 1.0, 4.0, 64.0
    frequencies = freq_base ** -(np.arange(0, head_dim, 2) / head_dim)
    turns = context * frequencies / (2 * np.pi)
    smooth = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return (1.0 / ((1.0 - smooth) / factor + smooth)).astype(np.float32)


def add_expert_keys(writer: GGUFWriter, arch: str, experts: Experts) -> None:
    writer.add_uint32(f"{arch}.expert_count", experts.n)
    writer.add_uint32(f"{arch}.expert_used_count", experts.n_used)
    if experts.own_length:
        writer.add_uint32(f"{arch}.expert_feed_forward_length", experts.n_ff)
    if experts.gating:
        writer.add_uint32(f"{arch}.expert_gating_func", experts.gating)
    if experts.n_dense:
        writer.add_uint32(f"{arch}.leading_dense_block_count", experts.n_dense)
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
