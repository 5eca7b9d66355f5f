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
    """The experts of an architecture. A router chooses some of them for each token."""

    # whether every model has experts; False: only models whose ``expert_count`` is not 0
    required: bool = True
    normalised: bool = True  # whether the weights of the chosen experts are made to sum to 1
    # The size of an expert is ``expert_feed_forward_length``; False: ``feed_forward_length``. If
    # the key is missing, it is feed_forward_length / n_expert_used.
    own_length: bool = True
    # An expert that all tokens take. ``none``: there is none. ``optional``: it is there if the file
    # states its length. ``gated``: it is always there, and the sigmoid of a product with the token
    # weighs it. ``dense``: it is the feed-forward of a layer without experts, next to the experts.
    # The inputs of router and experts, and the outputs of both, then have norms of their own.
    shared: str = "none"
    biases: bool = False  # whether router, gates, ups and downs have biases
    # How the router's products become weights. ``softmax``: over all experts. ``sigmoid``: of each
    # product. A bias of each expert then has a part in the choice, but not in the weights.
    gating: str = "softmax"
    # whether the first ``leading_dense_block_count`` layers have no experts
    dense_lead: bool = False


@dataclass(frozen=True)
class Windows:
    """Layers that attend to a window of the last tokens."""

    size: int  # ``attention.sliding_window`` if the file states none; 0: then no layer has a window
    # of so many layers the last one attends to all tokens, unless the file says otherwise
    step: int
    # The base of the windows' RoPE, which is not scaled, if the file has no rope.freq_base_swa. 0:
    # their RoPE is that of the other layers, but with the base that the file states.
    freq_base: float = 0.0


@dataclass(frozen=True)
class Architecture:
    """The differences of one architecture from the shared decoder."""

    name: str
    # The file pairs the elements 2i and 2i + 1 of a head (llama.cpp's NORM); False: i and i +
    # n_rot/2 (NEOX).
    rope_interleaved: bool
    # attn_q_norm and attn_k_norm must be there: an RMS norm of each head before the rotation
    qk_norm: bool = False
    # attn_{q,k,v}.bias must be there; False: they are used if they are there
    qkv_bias: bool = False
    o_bias: bool = False  # attn_output.bias must be there; False: it must not be there
    # attn_sinks must be there: for each head a score without a value in the softmax
    sinks: bool = False
    ffn_norm: str = "ffn_norm"  # the name of the tensor of the norm ahead of the feed-forward
    fused_gate_up: bool = False  # ffn_up holds the rows of the gate, then those of up
    no_rope_step: int = 0  # of so many layers the last one is not rotated; 0: all are rotated
    scalars: tuple[str, ...] = ()  # further keys to read, of SCALARS in models/hparams.py
    # of attention's scores and of the logits, if the file states none
    softcaps: tuple[float, float] = (0.0, 0.0)
    mixture: Mixture | None = None  # None: no experts
    windows: Windows | None = None  # None: no window layers
    # The outputs of attention and of the feed-forward have norms of their own before they are
    # added.
    post_norms: bool = False
    activation: str = "silu"  # of the gate, one of ACTIVATIONS in cpu/layer/activation.py
    embeds_by_width: bool = False  # embeddings are multiplied by the root of their length
    # In a model with so many layers the softmax scale follows n_embd / n_head, not the heads' size.
    # 0: there is no such model.
    wide_scale_layers: int = 0
    # Layers without attention have ``short_convolution`` or ``delta_net`` in its place; empty: all
    # layers have attention.
    recurrence: str = ""
    # attn_q holds each head's query rows, then its gate rows. The gate's sigmoid multiplies the
    # head's attention.
    output_gate: bool = False
    output_norm: str = "output_norm"  # the name of the tensor of the norm after the last layer
    attention_scale: float = 0.0  # the softmax scale; 0: it follows the heads' size
    # Values have an RMS norm without a weight. A layer without attn_v takes its keys, before their
    # norm, as values.
    value_norm: bool = False
    # Layers may have their own input next to the residual stream, and a factor of their output.
    # They may read the rows of another layer instead of their own.
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
