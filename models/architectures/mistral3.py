"""Ministral 3: YaRN, and queries that grow with the position (attention temperature)."""

from sparsekv_cli.models.architectures import Architecture, Mixture

ARCHITECTURE = Architecture(
    name="mistral3",
    rope_interleaved=True,
    scalars=("attention.temperature_scale", "rope.scaling.yarn_log_multiplier"),
    mixture=Mixture(required=False, own_length=False),
)
