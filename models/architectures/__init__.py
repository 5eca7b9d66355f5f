"""Supported architectures, one small file each.

To add one, add a file and its name in ARCHITECTURES. A file defines ``ARCHITECTURE``, an
``Architecture``. All architectures share the decoder (decoder.py). It has pre-norm layers with RMS
norm and grouped-query attention with rotary positions. Its feed-forward is gated, or a mixture of
gated experts. The differences are data.
"""

from dataclasses import dataclass
from importlib import import_module

from sparsekv_cli.errors import UnsupportedModelError

# general.architecture; a module of this package has the name, with _ for -.
ARCHITECTURES = (
    "arcee", "bailingmoe2", "deepseek", "deepseek2", "ernie4_5", "ernie4_5-moe", "exaone",
    "exaone4", "falcon-h1", "gemma2", "gemma3", "gemma4", "glm4", "glm4moe", "gpt-oss",
    "granite", "granitehybrid", "granitemoe", "lfm2", "lfm2moe", "llama", "minicpm",
    "minimax-m2", "mistral3", "nemotron_h", "nemotron_h_moe", "olmo2", "phi3", "qwen2",
    "qwen2moe", "qwen2vl", "qwen3", "qwen35", "qwen35moe", "qwen3moe", "qwen3next", "qwen3vl",
    "qwen3vlmoe", "seed_oss", "smollm3",
)  # fmt: skip


@dataclass(frozen=True)
class Mixture:
    """The experts of an architecture. A router chooses some of them for each token."""

    # whether every model has experts; False: only models whose ``expert_count`` is not 0
    required: bool = True
    normalised: bool = True  # whether the weights of the chosen experts are made to sum to 1
    # The size of an expert is ``expert_feed_forward_length``; False: ``feed_forward_length``. If
    # the key is missing, it is feed_forward_length / n_expert_used.
    own_length: bool = True
    # An expert that all tokens use. ``none``: there is none. ``optional``: there is one if the
    # file states its length. ``counted``: the file states how many lengths of an expert it has.
    # ``gated``: there is always one; its weight is the sigmoid of a product
    # with the token. ``dense``: it is a feed-forward as in a layer without experts. Then the inputs
    # of router and experts, and the outputs of experts and feed-forward, have their own norms.
    shared: str = "none"
    biases: bool = False  # whether router, gates, ups and downs have biases
    # How the router's products become weights. ``softmax``: over all experts. ``sigmoid``: of each
    # product. ``stated``: as ``expert_gating_func`` says, a softmax without it.
    gating: str = "softmax"
    # A bias of each expert, exp_probs_b, that is added for the choice, but not for the weights.
    # ``needed``: the file must have it. ``optional``: it may have it. Empty: there is none.
    choice_bias: str = ""
    # whether the first ``leading_dense_block_count`` layers have no experts
    dense_lead: bool = False
    # The file may state a factor of the weights, ``expert_weights_scale``, and whether their sum is
    # 1, ``expert_weights_norm``.
    weighted: bool = False
    # The file may state groups of experts. Then only experts of the best groups are chosen.
    grouped: bool = False


@dataclass(frozen=True)
class Windows:
    """Layers that attend to a window of the last tokens."""

    # Used if the file has no ``attention.sliding_window``. 0: then no layer has a window.
    size: int
    # The last of every ``step`` layers attends to all tokens, unless the file says otherwise.
    step: int
    # The base of the windows' RoPE if the file has no rope.freq_base_swa; that RoPE is not scaled.
    # 0: it is the RoPE of the other layers, but with the base that the file states.
    freq_base: float = 0.0
    scaled: bool = True  # False: the windows' RoPE is not scaled, but has the base of the file
    # False: the other layers are not rotated, and the RoPE of the windows is that of the model.
    rotates_full: bool = True
    n_layer: int = 0  # Only models with so many layers have windows; 0: all models.


@dataclass(frozen=True)
class Architecture:
    """The differences of one architecture from the shared decoder."""

    name: str
    # The file pairs the elements 2i and 2i + 1 of a head (llama.cpp's NORM); False: i and i +
    # n_rot/2 (NEOX).
    rope_interleaved: bool
    # The file must have attn_q_norm and attn_k_norm: an RMS norm of each head before the rotation.
    qk_norm: bool = False
    wide_qk_norm: bool = False  # ``qk_norm``, but the norm is over all heads of a row
    # The file must have attn_{q,k,v}.bias; False: it may have them.
    qkv_bias: bool = False
    o_bias: bool = False  # the file must have attn_output.bias; False: it must not have it
    # The file must have attn_sinks: for each head a score without a value in the softmax.
    sinks: bool = False
    ffn_norm: str = "ffn_norm.weight"  # the name of the norm's tensor before the feed-forward
    fused_gate_up: bool = False  # ffn_up has the rows of the gate, then those of up
    no_rope_step: int = 0  # the last of every so many layers is not rotated; 0: all are rotated
    scalars: tuple[str, ...] = ()  # further keys to read, of SCALARS in models/hparams.py
    needs_scalars: bool = False  # the file must have all of ``scalars``
    # softcaps of attention's scores and of the logits, if the file states none
    softcaps: tuple[float, float] = (0.0, 0.0)
    mixture: Mixture | None = None  # None: no experts
    windows: Windows | None = None  # None: no window layers
    # The outputs of attention and of the feed-forward have their own norms before they are added.
    post_norms: bool = False
    pre_norms: bool = True  # False: the inputs of attention and feed-forward have no norm
    # The gate's activation is one of ACTIVATIONS in cpu/layer/activation.py. With ``squared_relu``
    # there is no gate: up takes its place.
    activation: str = "silu"
    # Each block is attention, Mamba-2 or a feed-forward. A feed-forward belongs to the layer of the
    # block before it, and other layers have none.
    single_blocks: bool = False
    # Each block has attention and Mamba-2 with the same input. They become two layers.
    parallel: bool = False
    state_norm: bool = True  # whether the file must have the norm of Mamba-2; False: it may have it
    embeds_by_width: bool = False  # embeddings are multiplied by the square root of their length
    # In a model with so many layers the softmax scale depends on n_embd / n_head, not on the heads'
    # size. 0: there is no such model.
    wide_scale_layers: int = 0
    # Layers without attention have ``short_convolution``, ``delta_net`` or ``mamba2``; empty: all
    # layers have attention.
    recurrence: str = ""
    # Adjacent value heads of a delta net use one key head, and ssm_ba has beta and alpha of each.
    # False: value head h uses key head h % n_k, and beta and alpha are two tensors.
    grouped_heads: bool = False
    # attn_q holds each head's query rows, then its gate rows. The gate's sigmoid multiplies the
    # head's attention.
    output_gate: bool = False
    # Blocks after the layers that predict further tokens. ``skipped``: a file may have some, which
    # are not used. ``drafts``: the first of them makes drafts. Empty: no file has any.
    next_blocks: str = ""
    output_norm: str = "output_norm"  # the name of the norm's tensor after the last layer
    attention_scale: float = 0.0  # the softmax scale; 0: it depends on the heads' size
    # Values have an RMS norm without a weight. A layer without attn_v takes its keys, before their
    # norm, as values.
    value_norm: bool = False
    # Layers may have their own input next to the residual stream, and a factor of their output.
    # They may read the rows of another layer instead of their own.
    layer_inputs: bool = False
    # Attention is latent: a token has one row for all heads (models/layers/latent_params.py).
    latent: bool = False

    @property
    def gate_up(self) -> tuple[str, ...]:
        """The names of the matrices before a feed-forward's activation."""
        return ("up",) if self.activation == "squared_relu" else ("gate", "up")


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
