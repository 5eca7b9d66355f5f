"""Gemma 3: windows in five of six layers, norms around both blocks, q and k with a norm, GELU.

Windows have their own RoPE. Only full layers have the RoPE scaling for long contexts.
"""

from sparsekv_cli.models.architectures import Architecture, Windows

ARCHITECTURE = Architecture(
    name="gemma3",
    rope_interleaved=False,
    qk_norm=True,
    scalars=("final_logit_softcapping",),
    windows=Windows(size=0, step=6, freq_base=10000.0),
    post_norms=True,
    activation="gelu",
    embeds_by_width=True,
    wide_scale_layers=62,
)
