"""ERNIE 4.5 with experts: a bias for the choice of experts, first layers without experts."""

from sparsekv_cli.models.architectures import Architecture, Mixture

ARCHITECTURE = Architecture(
    name="ernie4_5-moe",
    rope_interleaved=True,
    mixture=Mixture(shared="optional", choice_bias="optional", dense_lead=True),
)
