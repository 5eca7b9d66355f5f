"""Qwen3-VL, the language model: for text its interleaved M-RoPE is RoPE.

llama.cpp does not turn the pairs that the sections of M-RoPE leave over. These are two of 64, and
they turn by less than a hundredth of a radian in 20,000 tokens. The model was trained with all
pairs turned.
"""

from sparsekv_cli.models.architectures import Architecture

ARCHITECTURE = Architecture(name="qwen3vl", rope_interleaved=False, qk_norm=True)
