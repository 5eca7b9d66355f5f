"""Qwen3-VL, the language model: for text its interleaved M-RoPE is RoPE.

llama.cpp does not turn the pairs that the sections of M-RoPE leave over, two of 64, which turn by
less than a hundredth of a radian in 20,000 tokens; the model was trained with all of them turned.
"""

from sparsekv_cli.models.architectures import Architecture

ARCHITECTURE = Architecture(name="qwen3vl", rope_interleaved=False, qk_norm=True)
