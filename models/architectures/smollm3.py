"""SmolLM3: every fourth layer is not rotated."""

from sparsekv_cli.models.architectures import Architecture

ARCHITECTURE = Architecture(name="smollm3", rope_interleaved=True, no_rope_step=4)
