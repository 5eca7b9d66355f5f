"""EXAONE 3 and 3.5: Llama's decoder; RoPE turns the dims i and i + n_rot/2."""

from sparsekv_cli.models.architectures import Architecture

ARCHITECTURE = Architecture(name="exaone", rope_interleaved=False)
