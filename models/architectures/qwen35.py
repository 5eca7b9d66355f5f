"""Qwen3.5 and 3.6: a gated delta net in most layers, attention with an output gate in others."""

from sparsekv_cli.models.architectures import Architecture

ARCHITECTURE = Architecture(
    name="qwen35",
    rope_interleaved=False,
    qk_norm=True,
    recurrence="delta_net",
    output_gate=True,
    next_blocks="drafts",
    ffn_norm="post_attention_norm.weight",
)
