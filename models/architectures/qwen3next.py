"""Qwen3-Next: Qwen3.5 with experts, but adjacent value heads of a delta net use one key head."""

from dataclasses import replace

from sparsekv_cli.models.architectures.qwen35moe import ARCHITECTURE as QWEN35MOE

ARCHITECTURE = replace(QWEN35MOE, name="qwen3next", grouped_heads=True, next_blocks="skipped")
