"""gpt-oss: experts with biases and a clamped SwiGLU, sinks in the softmax, windows of 128 tokens.

The softmax of the router is over the chosen experts. A normalised softmax over all is the same.
"""

from sparsekv_cli.models.architectures import Architecture, Mixture, Windows

ARCHITECTURE = Architecture(
    name="gpt-oss",
    rope_interleaved=False,
    qkv_bias=True,
    o_bias=True,
    sinks=True,
    ffn_norm="post_attention_norm.weight",
    activation="clamped",
    windows=Windows(size=0, step=2),
    mixture=Mixture(biases=True),
)
