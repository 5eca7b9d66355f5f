"""GLM-4.5 to 4.7 with experts: partial rotation, sigmoid routing, a shared expert.

The first layers have no experts. Large models have norms of q and k.
"""

from sparsekv_cli.models.architectures import Architecture, Mixture

ARCHITECTURE = Architecture(
    name="glm4moe",
    rope_interleaved=False,
    ffn_norm="post_attention_norm.weight",
    mixture=Mixture(
        normalised=False,
        shared="counted",
        gating="sigmoid",
        choice_bias="needed",
        dense_lead=True,
        weighted=True,
    ),
    next_blocks="skipped",
)
