"""DeepSeek-V2 to V3.1, GLM-4.7-Flash: latent attention, groups of experts, a shared expert.

The first layers have no experts. Some models have no groups, or no experts at all.
"""

from sparsekv_cli.models.architectures import Architecture, Mixture

ARCHITECTURE = Architecture(
    name="deepseek2",
    rope_interleaved=True,
    latent=True,
    scalars=("rope.scaling.yarn_log_multiplier",),
    mixture=Mixture(
        required=False,
        normalised=False,
        shared="counted",
        gating="stated",
        choice_bias="optional",
        dense_lead=True,
        weighted=True,
        grouped=True,
    ),
    next_blocks="skipped",
)
