"""Qwen1.5-MoE and Qwen2-57B-A14B: the weights of the chosen experts do not sum to 1."""

from sparsekv_cli.models.architectures import Architecture, Mixture

ARCHITECTURE = Architecture(
    name="qwen2moe",
    rope_interleaved=False,
    qkv_bias=True,
    mixture=Mixture(normalised=False, shared="gated"),
)
