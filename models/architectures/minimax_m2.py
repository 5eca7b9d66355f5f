"""MiniMax M2: a norm of q and k over all heads, half of a head is rotated, sigmoid routing."""

from sparsekv_cli.models.architectures import Architecture, Mixture

ARCHITECTURE = Architecture(
    name="minimax-m2",
    rope_interleaved=False,
    wide_qk_norm=True,
    mixture=Mixture(gating="sigmoid", choice_bias="needed"),
)
