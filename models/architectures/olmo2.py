"""OLMo 2 and 3: norms only after the blocks, and norms of q and k over all heads.

OLMo 3 has windows in three of four layers. Only full layers have the RoPE scaling.
"""

from sparsekv_cli.models.architectures import Architecture, Windows

ARCHITECTURE = Architecture(
    name="olmo2",
    rope_interleaved=False,
    wide_qk_norm=True,
    windows=Windows(size=0, step=4, scaled=False),
    post_norms=True,
    pre_norms=False,
)
