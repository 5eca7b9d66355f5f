"""Qwen3: RMS norm of every query and key head before the rotation; explicit head size."""

from sparsekv_cli.models.architectures import Architecture

ARCHITECTURE = Architecture(name="qwen3", rope_interleaved=False, qk_norm=True)
