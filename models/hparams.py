"""Hyper-parameters of a model, read once from GGUF metadata and checked before anything is built.

Source of names, defaults and meaning: llama.cpp's llama_model::load_hparams, gguf-py's constants.
"""

import math
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

from sparsekv_cli.cache.spec import FULL, STATE, WINDOW
from sparsekv_cli.errors import SparseKVError
from sparsekv_cli.models.architectures import ARCHITECTURES, Architecture, architecture_of
from sparsekv_cli.models.gguf.file import GGUFFile, StringArray
from sparsekv_cli.models.gguf.keys import MAX_TOKENS, ModelKeys, read_architecture
from sparsekv_cli.models.layers.expert_params import mixture_of, read_experts
from sparsekv_cli.models.layers.latent_params import with_latents
from sparsekv_cli.models.layers.layer_params import LayerParams
from sparsekv_cli.models.layers.state_params import WITHOUT_HEADS, read_states
from sparsekv_cli.models.layers.window_params import read_sources, read_windows
from sparsekv_cli.models.rope import (
    RopeParams,
    check_sections,
    latent_scale,
    read_rope,
    read_window_rope,
)
from sparsekv_cli.settings.changes import ModelChanges

N_ANSWER = 1024  # tokens that a stretched context has for an answer
MAX_LAYERS = 512  # LLAMA_MAX_LAYERS
MAX_HEADS = 1 << 12
MAX_WIDTH = 1 << 24  # limit of the elements of an embedding, a feed-forward or a head

# Keys that llama.cpp reads for some architectures only (Architecture.scalars).
SCALARS = (
    "attention.scale",  # of the softmax; 0: 1/sqrt(d)
    "attention.temperature_scale",
    "attn_logit_softcapping",
    "embedding_scale",  # 0: none, also in the next lines
    "final_logit_softcapping",
    "logit_scale",  # divisor of the logits; required
    "residual_scale",
    "rope.scaling.finetuned",  # false: no layer is rotated
    "rope.scaling.yarn_log_multiplier",
)


@dataclass(frozen=True)
class HParams:
    """Sizes of a decoder."""

    architecture: str
    n_ctx_train: int  # tokens of the training, or of the context that the user stretches
    n_embd: int
    layers: tuple[LayerParams, ...]
    norm_eps: float
    rope: RopeParams
    n_vocab: int  # tokens of the vocabulary; token_embd.weight must be (n_vocab, n_embd)
    embedding_scale: float = 1.0  # factor of the embeddings
    residual_scale: float = 1.0  # factor of the outputs of attention and feed-forward
    logit_scale: float = 1.0  # divisor of the logits
    # t of the queries' factor 1 + t ln(1 + floor(position / n_ctx_original))
    temperature_scale: float = 0.0
    logit_softcap: float = 0.0  # c of logits c tanh(logit / c); 0: none
    window_rope: RopeParams | None = None  # RoPE of the window layers; None: ``rope``
    n_layer_input: int = 0  # length of the per-layer input; 0: none
    n_skipped: int = 0  # blocks after the layers that predict further tokens (MTP)
    # the first of these blocks, which only makes drafts (models/next_token/)
    next_block: LayerParams | None = None

    @property
    def n_layer(self) -> int:
        return len(self.layers)

    @property
    def n_block(self) -> int:
        """The number of the file's blocks that the layers use."""
        return 1 + max(max(layer.block, layer.ffn_block) for layer in self.layers)

    def kv_bytes(self, n: int) -> int:
        """Returns the bytes of K and V of n tokens in f16, states included."""
        return sum(layer.kv_bytes(n) for layer in self.layers)

    @cached_property
    def sources(self) -> frozenset[int]:
        """The layers whose K and V other layers read."""
        return frozenset(layer.source for layer in self.layers) - {-1}

    @property
    def n_rot(self) -> int:
        """The rotated dims of the other layers, or else of the window layers; 0: none."""
        others = (each.n_rot for each in self.layers if each.kind != WINDOW)
        return max(others, default=0) or self.window_n_rot

    @property
    def window_n_rot(self) -> int:
        """The rotated dims of the window layers."""
        return max((each.n_rot for each in self.layers if each.kind == WINDOW), default=0)

    @property
    def head_dim(self) -> int:
        """The first odd head size, else the first one: kernels may not support odd sizes."""
        sizes = [layer.head_dim for layer in self.layers if layer.n_head]
        return next((size for size in sizes if size % 2), sizes[0] if sizes else 2)

    @property
    def has_experts(self) -> bool:
        return any(layer.experts is not None for layer in self.layers)

    @property
    def host_only(self) -> str:
        """The names of the model's parts that run on the CPU only, or an empty string."""
        parts = {
            "recurrent layers": any(layer.kind == STATE for layer in self.layers),
            "inputs of its layers": self.n_layer_input > 0,
            "layers without own rows": len(self.sources) > 0,
            "latent attention": any(layer.latent is not None for layer in self.layers),
        }
        return " and ".join(name for name, has in parts.items() if has)

    @property
    def other_layers(self) -> str:
        """The kinds of layers that are not full, such as ``window layers``, or an empty string."""
        kinds = sorted({layer.kind for layer in self.layers} - {FULL})
        return f"{' and '.join(kinds)} layers" if kinds else ""

    @property
    def n_ctx_fit(self) -> int:
        """The context length after training, or after RoPE scaling if that is longer (tokens)."""
        scale = self.rope.freq_scale
        stretched = int(self.rope.n_ctx_native / scale) if scale < 1.0 else 0
        return max(self.n_ctx_train, min(stretched, MAX_TOKENS))


def read_hparams(file: GGUFFile) -> HParams:
    """Returns the hyper-parameters of any architecture that uses llama.cpp's common keys.

    An unknown architecture is read as a plain decoder. Raises SparseKVError with key and value for
    a missing, mistyped or impossible value. Raises UnsupportedModelError for bidirectional
    attention and for unsupported kinds of RoPE scaling, experts and routing.
    """
    name = read_architecture(file)
    plain = Architecture(name, rope_interleaved=False)
    architecture = architecture_of(name) if name in ARCHITECTURES else plain
    keys = ModelKeys(file, name)
    if not keys.flag("attention.causal", True):
        raise keys.unsupported("attention.causal", "is false: an embedding model cannot be run")
    n_blocks, n_skipped = keys.integer("block_count", 1, MAX_LAYERS), 0
    if architecture.next_blocks:
        n_skipped = keys.integer("nextn_predict_layers", 0, n_blocks - 1, default=0)
    n_layer, n_ctx_train = n_blocks - n_skipped, keys.integer("context_length", 1, MAX_TOKENS)
    n_embd = keys.integer("embedding_length", 1, MAX_WIDTH)
    scalars = _read_scalars(keys, architecture, n_embd)
    check_sections(keys, architecture)
    stated = scalars["rope.scaling.yarn_log_multiplier"]
    # With latent attention, scores have a magnitude instead of rotated dims: ``latent_scale``.
    multiplier = float(stated > 0) if architecture.latent else stated
    of_file, rope = (
        read_rope(keys, n_ctx_train, multiplier, changes)
        for changes in (ModelChanges(), file.changes)
    )
    if rope.freq_scale != of_file.freq_scale:
        n_ctx_train = min(MAX_TOKENS, max(1, int(rope.n_ctx_native / rope.freq_scale)))
    has_drafts = n_skipped > 0 and architecture.next_blocks == "drafts"
    layers = _read_layers(
        keys, architecture, n_blocks, n_layer, n_layer + has_drafts, n_embd, scalars
    )
    next_block = layers.pop() if has_drafts else None
    if architecture.latent:
        layers = list(with_latents(keys, layers, partial(latent_scale, rope, stated)))
    window_rope = read_window_rope(keys, architecture, rope, of_file)
    hparams = HParams(
        architecture=name,
        n_ctx_train=n_ctx_train,
        n_embd=n_embd,
        layers=tuple(layers),
        norm_eps=keys.number("attention.layer_norm_rms_epsilon", low=0.0, high=1.0),
        rope=rope,
        n_vocab=_read_n_vocab(keys),
        embedding_scale=scalars["embedding_scale"] or 1.0,
        residual_scale=scalars["residual_scale"] or 1.0,
        logit_scale=scalars["logit_scale"] or 1.0,
        temperature_scale=scalars["attention.temperature_scale"],
        logit_softcap=scalars["final_logit_softcapping"],
        window_rope=window_rope,
        n_layer_input=keys.integer("embedding_length_per_layer_input", 0, MAX_WIDTH, default=0)
        if architecture.layer_inputs
        else 0,
        n_skipped=n_skipped,
        next_block=next_block,
    )
    keys.check_changes()
    if rope != of_file and not hparams.n_rot:
        raise SparseKVError(
            f"{file.path}: options of RoPE have no effect, because no layer is rotated"
        )
    return hparams


def _read_scalars(keys: ModelKeys, architecture: Architecture, n_embd: int) -> dict[str, float]:
    """Returns all SCALARS. A missing number is 0, and a missing flag is 1."""
    values = dict.fromkeys(SCALARS, 0.0) | {"rope.scaling.finetuned": 1.0}
    names = ("attn_logit_softcapping", "final_logit_softcapping")
    caps = zip(names, architecture.softcaps, strict=True)
    defaults = {"logit_scale": None, **dict(caps)}
    otherwise = None if architecture.needs_scalars else 0.0
    for name in architecture.scalars:
        if name == "rope.scaling.finetuned":
            values[name] = float(keys.flag(name, True))
        else:
            values[name] = keys.number(name, low=0.0, default=defaults.get(name, otherwise))
    if "logit_scale" in architecture.scalars and not values["logit_scale"]:
        raise keys.fail("logit_scale", "is 0; it must be above 0, for logits are divided by it")
    if architecture.embeds_by_width:
        values["embedding_scale"] = math.sqrt(n_embd)
    return values


def _read_layers(
    keys: ModelKeys,
    architecture: Architecture,
    n_layer: int,
    n_own: int,
    n_read: int,
    n_embd: int,
    scalars: dict[str, float],
) -> list[LayerParams]:
    """Returns the layers of the first n_read of n_layer blocks.

    Blocks from ``n_own`` on have attention. A layer may have two blocks, or a block two layers (see
    Architecture).
    """
    is_single, is_parallel = architecture.single_blocks, architecture.parallel
    n_head = keys.per_layer("attention.head_count", n_layer, MAX_HEADS)
    n_head_kv, least = n_head, int(architecture.recurrence not in WITHOUT_HEADS)
    if "attention.head_count_kv" in keys:
        n_head_kv = keys.per_layer("attention.head_count_kv", n_layer, MAX_HEADS, least)
    mixture, n_ff = mixture_of(keys, architecture), (0,) * n_layer
    if mixture is None or not mixture.own_length or is_single or "feed_forward_length" in keys:
        n_ff = keys.per_layer("feed_forward_length", n_layer, MAX_WIDTH, int(not is_single))
    others = zip(n_head_kv, n_ff, strict=True)
    has_others = [bool(kv_heads or (is_single and length)) for kv_heads, length in others]
    states = read_states(keys, architecture, n_own, n_embd, has_others[:n_own])
    states += [None] * (n_layer - n_own)
    for layer, (heads, kv_heads) in enumerate(zip(n_head, n_head_kv, strict=True)):
        if kv_heads and heads % kv_heads:
            raise keys.fail(
                "attention.head_count",
                f"is {heads} in layer {layer}, not a multiple of head_count_kv = {kv_heads}",
            )
    sizes = _head_sizes(keys, n_embd, n_head)
    window_sizes = _head_sizes(keys, n_embd, n_head, "_swa", sizes)
    step, n_dense = architecture.no_rope_step, 0
    if mixture is not None and mixture.dense_lead:
        n_dense = keys.integer("leading_dense_block_count", 0, n_layer, default=0)
    windows = read_windows(keys, architecture.windows, n_layer)
    scale = scalars["attention.scale"] or architecture.attention_scale
    sources = read_sources(keys, architecture, windows)
    if n_layer == architecture.wide_scale_layers:
        scale = (n_embd // n_head[0]) ** -0.5
    layers: list[LayerParams] = []
    for i in range(n_read):
        is_rotated = scalars["rope.scaling.finetuned"] and not (step and (i + 1) % step == 0)
        if any(windows) and architecture.windows and not architecture.windows.rotates_full:
            is_rotated = windows[i]
        experts = None
        if mixture is not None and i >= n_dense and (n_ff[i] or not is_single):
            experts = read_experts(keys, mixture, i, n_layer, n_ff[i])
        head_dim, value_dim, n_rot = window_sizes if windows[i] else sizes
        n_ff_dense = 0 if experts is not None else n_ff[i]
        ffn: dict[str, Any] = {"n_ff": n_ff_dense, "experts": experts, "ffn_block": i}
        if is_single and n_ff[i]:
            if not layers or layers[-1].has_ffn:
                raise keys.unsupported(
                    "feed_forward_length",
                    f"makes block {i} a feed-forward after no attention and no Mamba-2",
                )
            layers[-1] = replace(layers[-1], **ffn)
            continue
        if states[i] is not None:
            of_layer = {"n_ff": 0} if is_parallel else ffn
            layers.append(
                LayerParams(0, 0, 0, 0, 0, kind=STATE, state=states[i], block=i, **of_layer)
            )
        if states[i] is not None and not is_parallel:
            continue
        layers.append(
            LayerParams(
                n_head=n_head[i],
                n_head_kv=n_head_kv[i],
                head_dim=head_dim,
                value_dim=value_dim,
                n_rot=n_rot if is_rotated else 0,
                attention_scale=scale,
                kind=WINDOW if windows[i] else FULL,
                window=windows[i],
                softcap=scalars["attn_logit_softcapping"],
                has_sinks=architecture.sinks,
                output_gate=architecture.output_gate,
                source=sources[i],
                block=i,
                shares_input=is_parallel,
                **ffn,
            )
        )
    return layers


def _head_sizes(
    keys: ModelKeys,
    n_embd: int,
    n_head: tuple[int, ...],
    suffix: str = "",
    default: tuple[int, int, int] | None = None,
) -> tuple[int, int, int]:
    """Returns the size of a key head, the size of a value head and the rotated dims.

    suffix: ends the names of the keys. default: the values of missing keys.
    """
    head_dim, value_dim = (
        default[i]
        if default and f"{name}{suffix}" not in keys
        else _head_size(keys, f"{name}{suffix}", n_embd, n_head)
        for i, name in enumerate(("attention.key_length", "attention.value_length"))
    )
    name = f"rope.dimension_count{suffix}"
    n_rot = keys.integer(name, 1, MAX_WIDTH, default=default[2] if default else head_dim)
    if n_rot % 2 or n_rot > head_dim:
        raise keys.fail(name, f"is {n_rot}; it must be even and at most {head_dim}")
    return head_dim, value_dim, n_rot


def _head_size(keys: ModelKeys, name: str, n_embd: int, n_head: tuple[int, ...]) -> int:
    """Returns the size of a key or value head: the key's value, else n_embd / n_head."""
    if name in keys:
        return keys.integer(name, 1, MAX_WIDTH)
    if n_embd % n_head[0] or len(set(n_head)) > 1:
        raise keys.fail(
            "embedding_length",
            f"is {n_embd}, not a multiple of head_count = {n_head[0]} in all layers, "
            f"and there is no {name}",
        )
    return n_embd // n_head[0]


def _read_n_vocab(keys: ModelKeys) -> int:
    """Returns the number of tokens: the list's, else ``vocab_size``, else the embedding's."""
    tokens = keys.file.metadata.get("tokenizer.ggml.tokens")
    if isinstance(tokens, StringArray) and len(tokens):
        return len(tokens)
    if "vocab_size" in keys:
        return keys.integer("vocab_size", 1, MAX_TOKENS)
    embedding = keys.file.tensors.get("token_embd.weight")
    if embedding is None:
        raise keys.fail("vocab_size", "is missing, and there are neither tokens nor an embedding")
    return embedding.shape[0]


def room_for(hparams: HParams, n: int) -> str:
    """Returns what to do for a context of n tokens: a larger one, or a stretched one."""
    fit = hparams.n_ctx_fit
    if n <= fit:
        return f"raise --ctx-size (the model was trained for {fit})"
    return (
        f"take a model for longer texts (this one was trained for {fit} tokens, so a larger "
        f"--ctx-size gives text without sense)"
        f"{stretching(hparams, n + N_ANSWER, f', or stretch it: -c {n + N_ANSWER} ')}"
    )


def stretching(hparams: HParams, n: int, before: str = "") -> str:
    """Returns the options that stretch the context to n tokens, after the text ``before``.

    It is empty for models that cannot be stretched so: LongRoPE has factors for one length.
    """
    if not hparams.n_rot or hparams.rope.scaling == "longrope":
        return ""
    scale = -(-n // hparams.rope.n_ctx_native)
    return f"{before}--rope-scaling yarn --rope-scale {scale}"
