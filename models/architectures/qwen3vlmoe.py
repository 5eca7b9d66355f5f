"""Qwen3-VL with experts, the language model."""

from sparsekv_cli.models.architectures import Architecture, Mixture

ARCHITECTURE = Architecture(
    name="qwen3vlmoe", rope_interleaved=False, qk_norm=True, mixture=Mixture()
)
