"""Reads and checks the tensors of a decoder: quantised views on the memory-mapped file."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from sparsekv_cli.errors import SparseKVError
from sparsekv_cli.models.architectures import Architecture
from sparsekv_cli.models.gguf.file import GGUFFile
from sparsekv_cli.models.gguf.linear import GatedWeights, Linear
from sparsekv_cli.models.gguf.tensors import TensorReader
from sparsekv_cli.models.hparams import HParams
from sparsekv_cli.models.layers.expert_weights import ExpertWeights, read_mixture
from sparsekv_cli.models.layers.latent_weights import LatentHeads, read_latent_attention
from sparsekv_cli.models.layers.layer_input import (
    InputEmbedding,
    LayerInput,
    read_embedding,
    read_layer_input,
)
from sparsekv_cli.models.layers.state_weights import read_mixer


@dataclass(frozen=True, kw_only=True)
class LayerWeights(ABC):
    """The weights that all layers have."""

    attn_norm: np.ndarray | None  # None: the input has no norm
    o: Linear  # the output projection of attention or of a recurrence
    ffn_norm: np.ndarray | None
    ffn: GatedWeights | ExpertWeights | None  # None: the layer has no feed-forward
    attn_post_norm: np.ndarray | None = None  # f32 (n_embd,), norm of the attention's output
    ffn_post_norm: np.ndarray | None = None  # f32 (n_embd,), norm of the feed-forward's output
    input: LayerInput | None = None  # the weights for the per-layer input; None: no such input
    scale: float = 1.0  # factor of the residual stream after the layer

    @abstractmethod
    def inputs(self) -> tuple[Linear, ...]:
        """Returns the matrices that are multiplied by the layer's normed input rows."""

    @abstractmethod
    def with_inputs(self, inputs: tuple[Linear, ...]) -> LayerWeights:
        """Returns a copy of the layer with other matrices for ``inputs``."""

    def attention(self) -> tuple[Linear, ...]:
        return (*self.inputs(), self.o)

    def linears(self) -> tuple[Linear, ...]:
        """Returns the layer's matrices in the order of use: of the attention, then of the FFN.

        An expert layer's router and the matrices of the field ``input`` are left out.
        """
        return self.stages()

    def stages(self) -> tuple[Linear, ...]:
        """Returns the matrices of the two stages of a decode step, in the order of LayerState."""
        return (*self.attention(), *(() if self.ffn is None else self.ffn.linears()))

    def mapped(self, change: Callable[[Linear], Linear]) -> LayerWeights:
        """Returns a copy of the layer with ``change`` applied to each matrix of ``linears``."""
        layer = self.with_inputs(tuple(change(linear) for linear in self.inputs()))
        ffn = None if self.ffn is None else self.ffn.mapped(change)
        return replace(layer, o=change(self.o), ffn=ffn)


@dataclass(frozen=True, kw_only=True)
class AttentionWeights(LayerWeights):
    """The weights of a layer with attention. Norms and sinks are None if the model has none."""

    q: Linear
    # projections of keys and values; empty in a layer that reads another layer's K and V
    kv: tuple[Linear, ...]
    q_norm: np.ndarray | None  # f32 (head_dim,), or (n_head head_dim,) for a norm over all heads
    k_norm: np.ndarray | None  # f32 (head_dim,), or (n_head_kv head_dim,)
    v_norm: np.ndarray | None = None  # ones f32 (value_dim,)
    # f32 (n_head,): each head's sink, a score without a value in the softmax
    sinks: np.ndarray | None = None

    @property
    def k(self) -> Linear:
        return self.kv[0]

    @property
    def v(self) -> Linear:
        return self.kv[1]

    @property
    def biases(self) -> tuple[np.ndarray | None, ...]:
        """The biases of q, k and v."""
        return tuple(linear.bias for linear in self.inputs()) + (None,) * (2 - len(self.kv))

    def inputs(self) -> tuple[Linear, ...]:
        return (self.q, *self.kv)

    def with_inputs(self, inputs: tuple[Linear, ...]) -> AttentionWeights:
        return replace(self, q=inputs[0], kv=inputs[1:])


@dataclass(frozen=True, kw_only=True)
class StateWeights(LayerWeights):
    """The weights of a recurrent layer: StateInput's matrices and a Recurrence (cache/state.py)."""

    wide: tuple[Linear, ...]
    gates: tuple[Linear, ...]
    recurrence: Any

    def inputs(self) -> tuple[Linear, ...]:
        return self.wide + self.gates

    def with_inputs(self, inputs: tuple[Linear, ...]) -> StateWeights:
        n = len(self.wide)
        return replace(self, wide=inputs[:n], gates=inputs[n:])


@dataclass(frozen=True, kw_only=True)
class LatentWeights(LayerWeights):
    """The weights of a layer with latent attention."""

    q: Linear  # makes the queries, or the vector from which ``heads`` projects them
    row: Linear  # (L + R, n_embd): makes a token's latent vector and its rotated dims
    heads: LatentHeads

    def inputs(self) -> tuple[Linear, ...]:
        return (self.q, self.row)

    def with_inputs(self, inputs: tuple[Linear, ...]) -> LatentWeights:
        return replace(self, q=inputs[0], row=inputs[1])

    def linears(self) -> tuple[Linear, ...]:
        return (*super().linears(), *self.heads.linears())

    def mapped(self, change: Callable[[Linear], Linear]) -> LayerWeights:
        layer = super().mapped(change)
        assert isinstance(layer, LatentWeights)
        return replace(layer, heads=self.heads.mapped(change))


@dataclass(frozen=True)
class Weights:
    """All tensors of a decoder."""

    file: GGUFFile
    token_embd: Linear
    layers: tuple[LayerWeights, ...]
    output_norm: np.ndarray  # divided by the architecture's logit_scale
    output: Linear  # token_embd if the file has no output tensor (tied embeddings)
    rope_freqs: np.ndarray | None  # f32 (n_rot / 2,), divides the angles (Llama 3, LongRoPE)
    inputs: InputEmbedding | None = None  # makes the per-layer inputs; None: no such inputs

    def bytes_a_step(self, n_rows: int) -> int:
        """Returns the expected bytes that a decode step of n_rows reads (chosen experts only)."""
        total = self.output.data.nbytes
        for layer in self.layers:
            of_input = () if layer.input is None else layer.input.linears()
            of_heads = layer.heads.linears() if isinstance(layer, LatentWeights) else ()
            read = (*layer.attention(), *of_heads, *of_input)
            total += sum(linear.data.nbytes for linear in read)
            if isinstance(layer.ffn, ExpertWeights):
                total += layer.ffn.bytes_a_step(n_rows)
            elif layer.ffn is not None:
                total += layer.ffn.n_bytes
        return total

    @property
    def n_bytes_held(self) -> int:
        """The bytes of all weights that decoding may read, all experts included."""
        layers = sum(w.data.nbytes for layer in self.layers for w in layer.linears())
        return layers + self.output.data.nbytes


class WeightsReader(TensorReader):
    """Reads the parts of a decoder from a file."""

    def qkv(self, prefix: str, rows: Sequence[int], n_columns: int, bias: bool, v_is_k: bool):
        """Returns q, k and v. v_is_k: attn_k replaces a missing attn_v."""
        if f"{prefix}attn_qkv.weight" in self.file.tensors:
            fused = self.linear(f"{prefix}attn_qkv", sum(rows), n_columns, bias=bias)
            return self.split(fused, rows)
        letters = "qkv" if f"{prefix}attn_v.weight" in self.file.tensors or not v_is_k else "qkk"
        return tuple(
            self.linear(f"{prefix}attn_{letter}", n, n_columns, bias=bias)
            for letter, n in zip(letters, rows, strict=True)
        )

    def attention(self, at: str, i: int, hparams: HParams, architecture: Architecture) -> Any:
        """Returns the fields of AttentionWeights that other layers lack, and ``o``."""
        n_embd, layer, bias = hparams.n_embd, hparams.layers[i], architecture.qkv_bias
        d, d_v, is_wide = layer.head_dim, layer.value_dim, architecture.wide_qk_norm
        n_norm, has_norm = (layer.n_head * d if is_wide else d), is_wide or architecture.qk_norm
        n_q = layer.n_head * d * (1 + layer.output_gate)
        fields: dict[str, Any] = {
            "q_norm": self.vector(f"{at}attn_q_norm.weight", n_norm, has_norm),
            "sinks": self.vector(f"{at}attn_sinks.weight", layer.n_head)
            if layer.has_sinks
            else None,
            "o": self.linear(
                f"{at}attn_output", n_embd, layer.n_attended, bias=architecture.o_bias or None
            ),
        }
        if layer.source >= 0:
            self.used.update(f"{at}attn_{name}.weight" for name in ("k", "v", "k_norm"))
            q = self.linear(f"{at}attn_q", n_q, n_embd, bias=bias)
            return fields | {"q": q, "kv": (), "k_norm": None}
        rows = (n_q, layer.n_head_kv * d, layer.n_head_kv * d_v)
        q, *kv = self.qkv(at, rows, n_embd, bias, architecture.value_norm)
        n_norm = layer.n_head_kv * d if is_wide else d
        return fields | {
            "q": q,
            "kv": tuple(kv),
            "k_norm": self.vector(f"{at}attn_k_norm.weight", n_norm, has_norm),
            "v_norm": np.ones(d_v, np.float32) if architecture.value_norm else None,
        }

    def fused_gated(self, prefix: str, n_embd: int, n_ff: int) -> GatedWeights:
        """Returns the weights of a gated feed-forward network with gate and up in one tensor."""
        both = self.linear(f"{prefix}ffn_up", 2 * n_ff, n_embd)
        gate_up = tuple(self.split(both, (n_ff, n_ff)))
        return GatedWeights(gate_up, self.linear(f"{prefix}ffn_down", n_embd, n_ff))

    def layer(
        self, i: int, hparams: HParams, architecture: Architecture, inputs: InputEmbedding | None
    ) -> LayerWeights:
        n_embd, layer = hparams.n_embd, hparams.layers[i]
        at, ffn_at = f"blk.{layer.block}.", f"blk.{layer.ffn_block}."
        ffn: GatedWeights | ExpertWeights | None = None
        if layer.experts is not None:
            ffn = read_mixture(self, ffn_at, n_embd, layer.experts, architecture)
        elif layer.n_ff and architecture.fused_gate_up:
            ffn = self.fused_gated(ffn_at, n_embd, layer.n_ff)
        elif layer.n_ff:
            ffn = self.gated(ffn_at, architecture.gate_up, n_embd, layer.n_ff)
        attn_norm, ffn_norm = (
            self.vector(name, n_embd) if architecture.pre_norms and is_there else None
            for name, is_there in (
                (f"{at}attn_norm.weight", True),
                (f"{ffn_at}{architecture.ffn_norm}", layer.has_ffn),
            )
        )
        if layer.state is not None:
            mixer = read_mixer(self, at, n_embd, layer.state, hparams.norm_eps)
            return StateWeights(attn_norm=attn_norm, ffn_norm=ffn_norm, ffn=ffn, **mixer)
        if layer.latent is not None:
            of = read_latent_attention(self, at, n_embd, layer.n_head, layer.n_rot, layer.latent)
            return LatentWeights(attn_norm=attn_norm, ffn_norm=ffn_norm, ffn=ffn, **of)

        def post_norm(name: str) -> np.ndarray | None:
            return self.vector(f"{at}{name}.weight", n_embd)

        scale = f"{at}layer_output_scale.weight"
        has_scale = architecture.layer_inputs and scale in self.file.tensors
        return AttentionWeights(
            **self.attention(at, i, hparams, architecture),
            attn_norm=attn_norm,
            ffn_norm=ffn_norm,
            ffn=ffn,
            attn_post_norm=post_norm("post_attention_norm") if architecture.post_norms else None,
            ffn_post_norm=post_norm("post_ffw_norm") if architecture.post_norms else None,
            input=None if inputs is None else read_layer_input(self, i, inputs),
            scale=float(self.floats(scale, (1,))[0]) if has_scale else 1.0,
        )

    def rope_freqs(self, hparams: HParams, n_ctx: int) -> np.ndarray | None:
        """Returns the divisors of RoPE's angles: rope_freqs, else LongRoPE's factors for n_ctx."""
        half, chosen = hparams.n_rot // 2, None
        is_long = n_ctx > hparams.rope.n_ctx_original
        names = ("rope_freqs", "rope_factors_short", "rope_factors_long")
        for name, is_used in zip(names, (True, not is_long, is_long), strict=True):
            factors = self.vector(f"{name}.weight", half, required=False)
            if factors is None:
                continue
            if not (np.isfinite(factors).all() and (factors > 0).all()):
                raise SparseKVError(
                    f"{self.file.path}: {name}.weight holds values that are not above 0"
                )
            chosen = factors if is_used and chosen is None else chosen
        return chosen


def read_weights(
    file: GGUFFile, hparams: HParams, architecture: Architecture, n_ctx: int | None = None
) -> Weights:
    """Returns views on all tensors of a decoder. Checks their shapes by the hyper-parameters.

    n_ctx: length of the context, for LongRoPE's factors; None: the trained length. Raises
    SparseKVError with the name of a tensor that is missing, unused, misshapen or of an unsupported
    type.
    """
    file.check_types()
    reader = WeightsReader(file)
    n_embd = hparams.n_embd
    inputs, n_layer = None, hparams.n_layer
    if hparams.n_layer_input:
        inputs = read_embedding(reader, hparams.n_vocab, n_layer, hparams.n_layer_input, n_embd)
    layers = tuple(reader.layer(i, hparams, architecture, inputs) for i in range(n_layer))
    rope_freqs = reader.rope_freqs(hparams, n_ctx or hparams.n_ctx_train)
    token_embd = reader.linear("token_embd", hparams.n_vocab, n_embd)
    output_norm = _present(reader.vector(f"{architecture.output_norm}.weight", n_embd))
    tied = "output.weight" not in file.tensors
    weights = Weights(
        file=file,
        token_embd=token_embd,
        layers=layers,
        output_norm=output_norm / np.float32(hparams.logit_scale),
        output=token_embd if tied else reader.linear("output", hparams.n_vocab, n_embd),
        rope_freqs=rope_freqs,
        inputs=inputs,
    )
    skipped = tuple(f"blk.{hparams.n_block + i}." for i in range(hparams.n_skipped))
    unused = [
        name for name in file.tensors if name not in reader.used and not name.startswith(skipped)
    ]
    if unused:
        raise SparseKVError(
            f"{file.path}: tensor {unused[0]} is no part of architecture {architecture.name} as it "
            f"is implemented here ({len(unused)} such tensors); leaving it out would change answers"
        )
    return weights


def _present(vector: np.ndarray | None) -> np.ndarray:
    assert vector is not None
    return vector
