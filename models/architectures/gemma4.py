"""Gemma 4: Gemma 3's decoder with larger heads in the full layers, whose RoPE rotates few dims.

Values have a norm, and the softmax has no scale. Small models have an input for each layer, and
layers that read the rows of another layer. One large model has experts next to the feed-forward.
"""

from sparsekv_cli.models.architectures import Architecture, Mixture, Windows

ARCHITECTURE = Architecture(
    name="gemma4",
    rope_interleaved=False,
    qk_norm=True,
    scalars=("final_logit_softcapping",),
    mixture=Mixture(required=False, shared="dense"),
    windows=Windows(size=0, step=6, freq_base=10000.0),
    post_norms=True,
    activation="gelu",
    embeds_by_width=True,
    attention_scale=1.0,
    value_norm=True,
    layer_inputs=True,
)
