"""Llama 1 to 3, Mistral, TinyLlama, SmolLM and SmolLM2."""

from sparsekv_cli.models.architectures import Architecture

ARCHITECTURE = Architecture(name="llama", rope_interleaved=True)
