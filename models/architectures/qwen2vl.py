"""Qwen2-VL and Qwen2.5-VL, the language model: for text its M-RoPE is RoPE."""

from sparsekv_cli.models.architectures import Architecture

ARCHITECTURE = Architecture(name="qwen2vl", rope_interleaved=False, qkv_bias=True)
