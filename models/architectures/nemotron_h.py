"""Nemotron-H: each block is Mamba-2, attention without RoPE, or a feed-forward without a gate."""

from sparsekv_cli.models.architectures import Architecture

ARCHITECTURE = Architecture(
    name="nemotron_h",
    rope_interleaved=False,
    no_rope_step=1,
    ffn_norm="attn_norm.weight",
    activation="squared_relu",
    single_blocks=True,
    recurrence="mamba2",
)
