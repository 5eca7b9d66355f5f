"""GLM-4 of 2025: norms around both blocks, half of a head is rotated, a fused gate and up."""

from sparsekv_cli.models.architectures import Architecture

ARCHITECTURE = Architecture(
    name="glm4",
    rope_interleaved=True,
    fused_gate_up=True,
    post_norms=True,
    next_blocks="skipped",
)
