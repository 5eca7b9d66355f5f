"""ERNIE 4.5 without experts: Llama's decoder."""

from sparsekv_cli.models.architectures import Architecture

ARCHITECTURE = Architecture(name="ernie4_5", rope_interleaved=True)
