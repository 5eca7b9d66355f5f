"""EXAONE 4: norms only after the blocks, q and k with a norm.

The large model has windows in three of four layers, and only these are rotated.
"""

from sparsekv_cli.models.architectures import Architecture, Windows

ARCHITECTURE = Architecture(
    name="exaone4",
    rope_interleaved=False,
    qk_norm=True,
    windows=Windows(size=4096, step=4, rotates_full=False, n_layer=64),
    post_norms=True,
    pre_norms=False,
    next_blocks="skipped",
)
