"""Ling 2 and Ring 2: norms of q and k, half of a head is rotated, sigmoid routing in groups.

The first layers have no experts. All tokens use a shared one.
"""

from sparsekv_cli.models.architectures import Architecture, Mixture

ARCHITECTURE = Architecture(
    name="bailingmoe2",
    rope_interleaved=False,
    qk_norm=True,
    mixture=Mixture(
        normalised=False, shared="counted", gating="sigmoid", choice_bias="optional",
        dense_lead=True, weighted=True, grouped=True,
    ),
    next_blocks="skipped",
)  # fmt: skip
