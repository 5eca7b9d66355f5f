"""Granite 3 with experts: the four scales of Granite."""

from sparsekv_cli.models.architectures import Architecture, Mixture

ARCHITECTURE = Architecture(
    name="granitemoe",
    rope_interleaved=True,
    scalars=("attention.scale", "embedding_scale", "logit_scale", "residual_scale"),
    mixture=Mixture(required=False, own_length=False, shared="optional"),
)
