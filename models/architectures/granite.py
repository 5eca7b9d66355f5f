"""Granite 3 and 4 without recurrent layers: four scales; a file may switch RoPE off."""

from sparsekv_cli.models.architectures import Architecture, Mixture

ARCHITECTURE = Architecture(
    name="granite",
    rope_interleaved=True,
    scalars=(
        "attention.scale",
        "embedding_scale",
        "logit_scale",
        "residual_scale",
        "rope.scaling.finetuned",
    ),
    mixture=Mixture(required=False, own_length=False, shared="optional"),
)
