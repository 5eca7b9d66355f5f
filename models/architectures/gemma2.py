"""Gemma 2: a window in every other layer, norms around both blocks, softcaps, GELU."""

from sparsekv_cli.models.architectures import Architecture, Windows

ARCHITECTURE = Architecture(
    name="gemma2",
    rope_interleaved=False,
    scalars=("attn_logit_softcapping", "final_logit_softcapping"),
    softcaps=(50.0, 30.0),
    windows=Windows(size=4096, step=2),
    post_norms=True,
    activation="gelu",
    embeds_by_width=True,
    wide_scale_layers=46,
)
