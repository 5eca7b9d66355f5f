"""Hyper-parameters of a model, read once from GGUF metadata and checked before anything is built.

Source of names, defaults and meaning: llama.cpp's llama_model::load_hparams, the constructor of
llama_context (YaRN) and gguf-py's constants.  ``{a}`` stands for ``general.architecture``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from sparsekv_cli.errors import SparseKVError, UnsupportedModelError
from sparsekv_cli.models.gguf.file import GGUFFile, StringArray

MAX_LAYERS = 512  # LLAMA_MAX_LAYERS
MAX_HEADS = 1 << 12
MAX_WIDTH = 1 << 24  # of an embedding, a feed-forward layer or a head
MAX_TOKENS = 1 << 31  # of a context or a vocabulary; llama.cpp counts both in i32


@dataclass(frozen=True)
class RopeParams:
    """Rotary embedding as the file states it; the decoder turns this into angles.

    freq_base: theta of pair i is freq_base ** (-2 i / n_rot) before scaling.
    scaling: ``none``, ``linear`` or ``yarn``.  A model with Llama 3's scaling says nothing here: it
        brings a tensor ``rope_freqs.weight`` by whose values the angles are divided.
    factor: by how much the context was stretched; angles are multiplied by ``freq_scale``.
    n_ctx_original: context length before stretching; YaRN's ramp depends on it.
    ext_factor: YaRN's blend of stretched and original angles (1 for yarn, 0 otherwise by default).
    attn_factor: ``rope.scaling.attn_factor``; yarn_attn_factor: ``rope.scaling.yarn_attn_factor``.
    beta_fast, beta_slow: turns within n_ctx_original where YaRN's ramp ends and begins.
    """

    freq_base: float = 10000.0
    scaling: str = "linear"
    factor: float = 1.0
    n_ctx_original: int = 0
    ext_factor: float = 0.0
    attn_factor: float = 1.0
    yarn_attn_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0

    @property
    def freq_scale(self) -> float:
        """What multiplies every (interpolated) angle: 1 / factor, or 1 without scaling."""
        return 1.0 if self.scaling == "none" else 1.0 / self.factor

    @property
    def magnitude(self) -> float:
        """What multiplies cos and sin.

        With ext_factor = 0 it is yarn_attn_factor * attn_factor.  Otherwise llama.cpp replaces
        yarn_attn_factor by mscale / (1 + 0.1 ln f), and its rope kernel multiplies by
        (1 + 0.1 ln f) again, which leaves mscale * attn_factor, mscale = 1 + 0.1 ln f for f > 1.
        """
        if self.ext_factor == 0.0:
            return self.yarn_attn_factor * self.attn_factor
        factor = 1.0 / self.freq_scale
        return (1.0 + 0.1 * math.log(factor) if factor > 1.0 else 1.0) * self.attn_factor


@dataclass(frozen=True)
class HParams:
    """Sizes of a decoder.  Letters: L layers; per-layer tuples have length L.

    head_dim, value_dim: of one key and one value head, the same in all layers.
    n_rot: leading dimensions of a head that are rotated (even, at most head_dim).
    n_vocab: tokens of the vocabulary; token_embd.weight must be (n_vocab, n_embd).
    """

    architecture: str
    n_layer: int
    n_ctx_train: int
    n_embd: int
    n_head: tuple[int, ...]  # (L,)
    n_head_kv: tuple[int, ...]  # (L,)
    n_ff: tuple[int, ...]  # (L,)
    head_dim: int
    value_dim: int
    n_rot: int
    norm_eps: float
    rope: RopeParams
    n_vocab: int

    @property
    def n_ctx_fit(self) -> int:
        """Tokens that the model was made for: trained on, or what its scaling stretches them to."""
        scale = self.rope.freq_scale
        stretched = int(self.rope.n_ctx_original / scale) if scale < 1.0 else 0
        return max(self.n_ctx_train, stretched)

    @property
    def uniform(self) -> bool:
        """Whether all layers have the same sizes."""
        return all(len(set(sizes)) == 1 for sizes in (self.n_head, self.n_head_kv, self.n_ff))


def read_architecture(file: GGUFFile) -> str:
    """``general.architecture``; SparseKVError if missing, empty or no string."""
    key = "general.architecture"
    name = file.metadata.get(key)
    if name is None:
        raise SparseKVError(f"{file.path}: has no {key}, so what it holds cannot be told")
    if not isinstance(name, str):
        raise SparseKVError(f"{file.path}: {key} is of type {file.value_types[key]}, not string")
    if not name:
        raise SparseKVError(f"{file.path}: {key} is empty")
    return name


def read_hparams(file: GGUFFile) -> HParams:
    """Hyper-parameters of a decoder of any architecture that uses llama.cpp's common keys.

    Raises SparseKVError for a missing, mistyped or impossible value, naming key and value;
    UnsupportedModelError for experts, bidirectional attention and other kinds of rotary scaling.
    """
    architecture = read_architecture(file)
    keys = _Keys(file, architecture)
    _refuse_what_is_no_plain_decoder(keys)
    n_layer = keys.integer("block_count", 1, MAX_LAYERS)
    n_ctx_train = keys.integer("context_length", 1, MAX_TOKENS)
    n_embd = keys.integer("embedding_length", 1, MAX_WIDTH)
    n_head = keys.per_layer("attention.head_count", n_layer, MAX_HEADS)
    n_head_kv = n_head
    if "attention.head_count_kv" in keys:
        n_head_kv = keys.per_layer("attention.head_count_kv", n_layer, MAX_HEADS)
    for layer, (heads, kv_heads) in enumerate(zip(n_head, n_head_kv, strict=True)):
        if heads % kv_heads:
            raise keys.fail(
                "attention.head_count",
                f"is {heads} in layer {layer}, not a multiple of head_count_kv = {kv_heads}",
            )
    head_dim = _head_size(keys, "attention.key_length", n_embd, n_head)
    value_dim = _head_size(keys, "attention.value_length", n_embd, n_head)
    n_rot = keys.integer("rope.dimension_count", 1, MAX_WIDTH, default=head_dim)
    if n_rot % 2 or n_rot > head_dim:
        raise keys.fail(
            "rope.dimension_count", f"is {n_rot}; it must be even and at most {head_dim}"
        )
    return HParams(
        architecture=architecture,
        n_layer=n_layer,
        n_ctx_train=n_ctx_train,
        n_embd=n_embd,
        n_head=n_head,
        n_head_kv=n_head_kv,
        n_ff=keys.per_layer("feed_forward_length", n_layer, MAX_WIDTH),
        head_dim=head_dim,
        value_dim=value_dim,
        n_rot=n_rot,
        norm_eps=keys.number("attention.layer_norm_rms_epsilon", low=0.0, high=1.0),
        rope=_read_rope(keys, n_ctx_train),
        n_vocab=_read_n_vocab(keys),
    )


class _Keys:
    """Typed, bounded access to the keys ``{architecture}.*`` of one file."""

    def __init__(self, file: GGUFFile, architecture: str) -> None:
        self.file = file
        self.architecture = architecture

    def __contains__(self, name: str) -> bool:
        return f"{self.architecture}.{name}" in self.file.metadata

    def fail(self, name: str, message: str) -> SparseKVError:
        return SparseKVError(f"{self.file.path}: {self.architecture}.{name} {message}")

    def unsupported(self, name: str, message: str) -> UnsupportedModelError:
        return UnsupportedModelError(str(self.fail(name, message)))

    def get(self, name: str) -> Any:
        key = f"{self.architecture}.{name}"
        if key not in self.file.metadata:
            raise self.fail(name, "is missing, and the model cannot be run without it")
        return self.file.metadata[key]

    def mistyped(self, name: str, wanted: str) -> SparseKVError:
        found = self.file.value_types[f"{self.architecture}.{name}"]
        return self.fail(name, f"is of type {found}; it must be {wanted}")

    def _bounded(self, name: str, value: int, low: int, high: int, where: str = "") -> int:
        if not low <= value <= high:
            raise self.fail(name, f"is {value}{where}; it must be {low} to {high}")
        return value

    def integer(self, name: str, low: int, high: int, default: int | None = None) -> int:
        if default is not None and name not in self:
            return default
        value = self.get(name)
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.mistyped(name, "an integer")
        return self._bounded(name, value, low, high)

    def per_layer(self, name: str, n_layer: int, high: int) -> tuple[int, ...]:
        """A scalar, repeated for every layer, or an array with one integer a layer."""
        value = self.get(name)
        if isinstance(value, np.ndarray) and value.dtype.kind in "iu":
            if len(value) != n_layer:
                raise self.fail(name, f"has {len(value)} values for {n_layer} layers")
            return tuple(
                self._bounded(name, one, 1, high, f" in layer {layer}")
                for layer, one in enumerate(value.tolist())
            )
        if isinstance(value, np.ndarray | StringArray | str | float | bool):
            raise self.mistyped(name, "an integer or an array of integers")
        return (self._bounded(name, value, 1, high),) * n_layer

    def number(
        self, name: str, *, low: float, high: float = math.inf, default: float | None = None
    ) -> float:
        """A finite float with low <= value <= high."""
        if default is not None and name not in self:
            return default
        value = self.get(name)
        if not isinstance(value, float):
            raise self.mistyped(name, "float32")
        if not math.isfinite(value) or not low <= value <= high:
            limits = f"at least {low:g}" if high == math.inf else f"{low:g} to {high:g}"
            raise self.fail(name, f"is {value:g}; it must be {limits} and finite")
        return value


def _refuse_what_is_no_plain_decoder(keys: _Keys) -> None:
    experts = keys.integer("expert_count", 0, MAX_TOKENS, default=0)
    if experts:
        raise keys.unsupported("expert_count", f"is {experts}: no mixture of experts can be run")
    causal = keys.get("attention.causal") if "attention.causal" in keys else True
    if not isinstance(causal, bool):
        raise keys.mistyped("attention.causal", "bool")
    if not causal:
        raise keys.unsupported("attention.causal", "is false: an embedding model cannot be run")


def _head_size(keys: _Keys, name: str, n_embd: int, n_head: tuple[int, ...]) -> int:
    """Size of a key or value head: as stated, or n_embd / n_head."""
    if name in keys:
        return keys.integer(name, 1, MAX_WIDTH)
    if n_embd % n_head[0] or len(set(n_head)) > 1:
        raise keys.fail(
            "embedding_length",
            f"is {n_embd}, not a multiple of head_count = {n_head[0]} in all layers, "
            f"and there is no {name}",
        )
    return n_embd // n_head[0]


def _read_rope(keys: _Keys, n_ctx_train: int) -> RopeParams:
    name = "rope.scaling.type"
    scaling = keys.get(name) if name in keys else "linear"
    if not isinstance(scaling, str):
        raise keys.mistyped(name, "string")
    if scaling not in ("none", "linear", "yarn"):
        raise keys.unsupported(name, f"is {scaling[:40]!r}; supported are none, linear and yarn")
    old_key = "rope.scale_linear"
    name = "rope.scaling.factor" if "rope.scaling.factor" in keys else old_key
    factor = keys.number(name, low=0.0, default=0.0)
    tiny = float(np.finfo(np.float32).tiny)
    if 0.0 < factor < tiny:
        raise keys.fail(name, f"is {factor:g}; it must be at least {tiny:g}")
    ext_factor = 1.0 if scaling == "yarn" else 0.0
    if "rope.scaling.yarn_ext_factor" in keys:
        stated = keys.number("rope.scaling.yarn_ext_factor", low=-math.inf)
        ext_factor = stated if stated >= 0.0 else ext_factor  # negative: not set
    rope = RopeParams(
        freq_base=keys.number("rope.freq_base", low=1.0, default=10000.0),
        scaling=scaling,
        factor=factor or 1.0,  # llama.cpp: 0 means not set
        n_ctx_original=keys.integer(
            "rope.scaling.original_context_length", 1, MAX_TOKENS, default=n_ctx_train
        ),
        ext_factor=ext_factor,
        attn_factor=keys.number("rope.scaling.attn_factor", low=0.0, default=1.0),
        yarn_attn_factor=keys.number("rope.scaling.yarn_attn_factor", low=0.0, default=1.0),
        beta_fast=keys.number("rope.scaling.yarn_beta_fast", low=0.0, default=32.0),
        beta_slow=keys.number("rope.scaling.yarn_beta_slow", low=0.0, default=1.0),
    )
    if rope.ext_factor and not (rope.freq_base > 1 and rope.beta_fast > 0 and rope.beta_slow > 0):
        raise keys.fail(
            "rope.freq_base",
            f"is {rope.freq_base:g} with yarn betas {rope.beta_fast:g} and {rope.beta_slow:g}; "
            "YaRN needs a base above 1 and betas above 0",
        )
    return rope


def _read_n_vocab(keys: _Keys) -> int:
    """Length of the vocabulary in the file, else ``vocab_size``, else rows of the embedding."""
    tokens = keys.file.metadata.get("tokenizer.ggml.tokens")
    if isinstance(tokens, StringArray) and len(tokens):
        return len(tokens)
    if "vocab_size" in keys:
        return keys.integer("vocab_size", 1, MAX_TOKENS)
    embedding = keys.file.tensors.get("token_embd.weight")
    if embedding is None:
        raise keys.fail("vocab_size", "is missing, and there are neither tokens nor an embedding")
    return embedding.shape[0]
