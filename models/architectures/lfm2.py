"""LFM2: gated short convolutions, and attention in the layers that have kv heads."""

from sparsekv_cli.models.architectures import Architecture

ARCHITECTURE = Architecture(
    name="lfm2",
    rope_interleaved=False,
    qk_norm=True,
    recurrence="short_convolution",
    output_norm="token_embd_norm",
)
