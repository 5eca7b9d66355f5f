"""MiniCPM 1, 2 and 4: three of Granite's scales, which old files lack.

llama.cpp has defaults for them, and divides the logits by a number that such files multiply by.
"""

from sparsekv_cli.models.architectures import Architecture

ARCHITECTURE = Architecture(
    name="minicpm",
    rope_interleaved=True,
    scalars=("embedding_scale", "logit_scale", "residual_scale"),
    needs_scalars=True,
)
