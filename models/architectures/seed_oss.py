"""Seed-OSS: biases on q, k and v; the norm before the feed-forward has another name."""

from sparsekv_cli.models.architectures import Architecture

ARCHITECTURE = Architecture(
    name="seed_oss", rope_interleaved=False, ffn_norm="post_attention_norm.weight"
)
