"""Qwen3 with experts: 30B-A3B, 235B-A22B and Qwen3-Coder."""

from sparsekv_cli.models.architectures import Architecture, Mixture

ARCHITECTURE = Architecture(
    name="qwen3moe", rope_interleaved=False, qk_norm=True, mixture=Mixture()
)
