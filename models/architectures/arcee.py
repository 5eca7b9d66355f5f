"""Arcee's AFM: Llama's decoder with a feed-forward without a gate."""

from sparsekv_cli.models.architectures import Architecture

ARCHITECTURE = Architecture(name="arcee", rope_interleaved=True, activation="squared_relu")
