"""Qwen3-VL, the language model: for text its interleaved M-RoPE is RoPE.

llama.cpp does not rotate the pairs that are in no section of M-RoPE. These are two of 64, and they
rotate by less than a hundredth of a radian in 20,000 tokens. The model was trained with all pairs
rotated.
"""

from sparsekv_cli.models.architectures import Architecture

ARCHITECTURE = Architecture(name="qwen3vl", rope_interleaved=False, qk_norm=True)
