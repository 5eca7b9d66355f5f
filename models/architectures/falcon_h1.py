"""Falcon-H1: attention and Mamba-2 in each block, which add to the same input."""

from sparsekv_cli.models.architectures import Architecture

ARCHITECTURE = Architecture(
    name="falcon-h1",
    rope_interleaved=False,
    ffn_norm="ffn_norm",
    recurrence="mamba2",
    parallel=True,
    state_norm=False,
)
