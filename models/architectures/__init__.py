"""Supported architectures, one small file each; add a file and its name to ARCHITECTURES.

A file defines ``ARCHITECTURE``, an ``Architecture``. All architectures share the decoder
(decoder.py). It has pre-norm layers with RMS norm and grouped-query attention with rotary
positions. Its feed-forward is gated, or a mixture of gated experts. The differences are data.
"""

from dataclasses import dataclass
from importlib import import_module

from sparsekv_cli.errors import UnsupportedModelError

# general.architecture; a module of this package has the name, with _ for -.
ARCHITECTURES = (
    *("gemma2", "gemma3", "gemma4", "gpt-oss", "granite", "granitemoe", "lfm2", "lfm2moe"),
    *("llama", "mistral3", "phi3", "qwen2", "qwen2moe", "qwen2vl", "qwen3", "qwen35"),
    *("qwen35moe", "qwen3moe", "qwen3vl", "qwen3vlmoe", "smollm3"),
)


@dataclass(frozen=True)
class Mixture:
    """The experts of an architecture; a softmax over all of them routes.

    required: whether every model has experts; otherwise those whose ``expert_count`` is not 0.
    normalised: whether the weights of the chosen experts are made to sum to 1. own_length: whether
    ``expert_feed_forward_length`` is the experts' size; otherwise ``feed_forward_length`` is. If
    the key is missing, the size is the feed-forward length over the number of experts used. shared:
    an expert that all tokens take. ``none``: there is none. ``optional``: it is there if its length
    is stated. ``gated``: it is always there, and the sigmoid of a product with the token weighs it.
    ``dense``: it is the feed-forward of a layer without experts, next to the experts. The inputs of
    router and experts, and the outputs of both, then have norms of their own. biases: whether
    router, gates, ups and downs have biases. gating: how the router's products become weights.
    ``softmax`` is over all experts. ``sigmoid`` is of each product. A bias of each expert then has
    a part in the choice, but not in the weights. dense_lead: whether the first
    ``leading_dense_block_count`` layers have no experts.
    """

    required: bool = True
    normalised: bool = True
    own_length: bool = True
    shared: str = "none"
    biases: bool = False
    gating: str = "softmax"
    dense_lead: bool = False


@dataclass(frozen=True)
class Windows:
    """Layers that attend to a window of the last tokens.

    size: ``attention.sliding_window`` where the file has none; 0: then no layer has one. step: of
    so many layers the last one attends to all tokens, unless the file says otherwise. freq_base: of
    the windows' RoPE, which is not scaled, if the file has no rope.freq_base_swa. 0: the windows'
    RoPE is that of the other layers, but with the base that the file states.
    """

    size: int
    step: int
    freq_base: float = 0.0


@dataclass(frozen=True)
class Architecture:
    """The differences of one architecture from the shared decoder.

    rope_interleaved: the file pairs neighbouring elements (2i, 2i+1) of a head (llama.cpp's NORM);
    otherwise i and i + n_rot/2 (NEOX). qk_norm: attn_q_norm and attn_k_norm (RMS norm of each head
    before the rotation) must be there. qkv_bias: attn_{q,k,v}.bias must be there; where it is False
    they are used if present. o_bias: attn_output.bias must be there; otherwise it must not. sinks:
    attn_sinks must be there: of each head a score without a value in the softmax. ffn_norm: the
    name of the tensor of the norm ahead of the feed-forward. fused_gate_up: ffn_up holds the rows
    of the gate, then those of up. no_rope_step: every so many layers the last one is not rotated;
    0: all are. scalars: keys that only some architectures have, of SCALARS in models/hparams.py.
    softcaps: those of attention's scores and of the logits where the file has none. mixture: its
    experts; None: it has none. windows: its window layers; None: it has none. post_norms: what
    attention and feed-forward add to the residual stream has a norm of its own. activation: of the
    gate, of ACTIVATIONS in cpu/layer/activation.py. embeds_by_width: embeddings are multiplied by
    the root of their length. wide_scale_layers: the number of layers of a model whose softmax scale
    does not follow the heads' size. It then follows the embedding's length over the number of
    heads. 0: there is no such model. recurrence: what stands in place of attention in layers that
    have none: ``short_convolution`` or ``delta_net``; empty: all have attention. output_gate:
    attn_q holds for each head its query's rows, then the rows of a gate. The gate's sigmoid
    multiplies the head's attention. output_norm: the name of the tensor of the norm of the last
    layer's output. attention_scale: of the softmax, where it is not that of the heads' size.
    value_norm: values have an RMS norm without a weight. A layer without attn_v takes its keys,
    ahead of their norm, as values. layer_inputs: layers may have an input of their own next to the
    residual stream, and a factor of their output. They may read the rows of another layer instead
    of their own.
    """

    name: str
    rope_interleaved: bool
    qk_norm: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    sinks: bool = False
    ffn_norm: str = "ffn_norm"
    fused_gate_up: bool = False
    no_rope_step: int = 0
    scalars: tuple[str, ...] = ()
    softcaps: tuple[float, float] = (0.0, 0.0)
    mixture: Mixture | None = None
    windows: Windows | None = None
    post_norms: bool = False
    activation: str = "silu"
    embeds_by_width: bool = False
    wide_scale_layers: int = 0
    recurrence: str = ""
    output_gate: bool = False
    output_norm: str = "output_norm"
    attention_scale: float = 0.0
    value_norm: bool = False
    layer_inputs: bool = False

    @property
    def host_only(self) -> str:
        """The parts of its blocks that run on the CPU only, in words. Empty if there are none."""
        parts = {
            "norms behind its blocks": self.post_norms,
            "sinks": self.sinks,
            "softcaps": self.softcaps[0] > 0,
            "its activation": self.activation != "silu",
        }
        return " and ".join(name for name, has in parts.items() if has)


def architecture_of(name: str) -> Architecture:
    """Returns the architecture of a model. Raises UnsupportedModelError if there is none."""
    if name not in ARCHITECTURES:
        shown = repr(name if len(name) <= 80 else name[:77] + "...")
        supported = ", ".join(sorted(ARCHITECTURES))
        raise UnsupportedModelError(
            f"architecture {shown} is not supported; supported are {supported}"
        )
    module = import_module(f"sparsekv_cli.models.architectures.{name.replace('-', '_')}")
    return module.ARCHITECTURE
