"""Llama 1 to 3, Mistral, TinyLlama, SmolLM and SmolLM2; with experts Mixtral."""

from sparsekv_cli.models.architectures import Architecture, Mixture

ARCHITECTURE = Architecture(
    name="llama", rope_interleaved=True, mixture=Mixture(required=False, own_length=False)
)
