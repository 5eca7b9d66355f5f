"""DeepSeek 1 with experts: a shared one, and first layers without experts."""

from sparsekv_cli.models.architectures import Architecture, Mixture

ARCHITECTURE = Architecture(
    name="deepseek",
    rope_interleaved=True,
    mixture=Mixture(normalised=False, shared="counted", dense_lead=True, weighted=True),
)
