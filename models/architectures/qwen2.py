"""Qwen2 and Qwen2.5: biases on q, k and v."""

from sparsekv_cli.models.architectures import Architecture

ARCHITECTURE = Architecture(name="qwen2", rope_interleaved=False, qkv_bias=True)
