"""Gemma 4's layers in the tiny models: their sizes, keys and tensors, as llama.cpp has them.

Also what it computes of the layers' own inputs, by plain formulas; no code of the package is used.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from gguf import GGUFWriter

Matrix = Callable[..., None]  # (name, n_out, n_in, gain)
Vector = Callable[[str, int, float, float], None]  # (name, size, mean, std)


@dataclass(frozen=True)
class Gemma4Layers:
    """Every ``full``-th layer attends to all tokens, the others to a window.

    wide, narrow: sizes of the heads of both. n_shared: the last layers, which read the rows of the
    last two before them. n_input: of the layers' own inputs, 0: there are none. v_is_k: the first
    full layer has no attn_v.
    """

    full: int = 2
    wide: int = 512
    narrow: int = 256
    n_shared: int = 2
    n_input: int = 32
    v_is_k: bool = True

    def is_full(self, layer: int) -> bool:
        return (layer + 1) % self.full == 0

    def head_dim(self, layer: int) -> int:
        return self.wide if self.is_full(layer) else self.narrow

    def n_ff(self, layer: int, n_layer: int, n_ff: int) -> int:
        """Layers that read the rows of others have twice the feed-forward."""
        return n_ff * (1 if self.has_rows(layer, n_layer) else 2)

    def has_rows(self, layer: int, n_layer: int) -> bool:
        return layer < n_layer - self.n_shared

    def has_v(self, layer: int) -> bool:
        return not self.v_is_k or layer != self.full - 1

    def add_keys(self, writer: GGUFWriter, arch: str, n_layer: int, n_ff: int) -> None:
        layers = range(n_layer)
        writer.add_feed_forward_length([self.n_ff(i, n_layer, n_ff) for i in layers])
        writer.add_array(
            f"{arch}.attention.sliding_window_pattern", [not self.is_full(i) for i in layers]
        )
        for name, d in (("", self.wide), ("_swa", self.narrow)):
            writer.add_uint32(f"{arch}.attention.key_length{name}", d)
            writer.add_uint32(f"{arch}.attention.value_length{name}", d)
            writer.add_uint32(f"{arch}.rope.dimension_count{name}", d)
        writer.add_uint32(f"{arch}.attention.shared_kv_layers", self.n_shared)
        writer.add_uint32(f"{arch}.embedding_length_per_layer_input", self.n_input)

    def add_common(
        self, writer: GGUFWriter, sizes: tuple[int, int, int], matrix: Matrix, vector: Vector
    ) -> None:
        """Tensors that are no layer's; sizes: layers, vocabulary, embedding."""
        n_layer, n_vocab, n_embd = sizes
        pair = np.arange(self.wide // 2)
        factors = np.where(pair < len(pair) // 4, 1.0, 1e30).astype(np.float32)
        writer.add_tensor("rope_freqs.weight", factors)
        if self.n_input:
            matrix("per_layer_token_embd.weight", n_vocab, n_layer * self.n_input)
            matrix("per_layer_model_proj.weight", n_layer * self.n_input, n_embd)
            vector("per_layer_proj_norm.weight", self.n_input, 1.0, 0.3)

    def add_tensors(self, at: str, n_embd: int, matrix: Matrix, vector: Vector) -> None:
        if self.n_input:
            matrix(f"{at}inp_gate.weight", self.n_input, n_embd, 4.0)
            matrix(f"{at}proj.weight", n_embd, self.n_input)
            vector(f"{at}post_norm.weight", n_embd, 1.0, 0.3)
        vector(f"{at}layer_output_scale.weight", 1, 0.8, 0.05)


def layer_inputs(model: Any, ids: Sequence[int], hidden: np.ndarray) -> np.ndarray | None:
    """The inputs (T, layers, P) of all layers; hidden (T, E): the scaled embeddings."""
    if "per_layer_token_embd.weight" not in model.tensors:
        return None
    shape = len(ids), model.n_layer, -1
    projected = hidden @ model.tensor("per_layer_model_proj.weight").T
    projected = (projected / np.float32(math.sqrt(hidden.shape[1]))).reshape(shape)
    norm = model.tensor("per_layer_proj_norm.weight")
    projected = projected / np.sqrt((projected**2).mean(-1, keepdims=True) + model.epsilon) * norm
    table = model.tensor("per_layer_token_embd.weight")[np.asarray(ids)].reshape(shape)
    return ((projected + table * math.sqrt(table.shape[2])) / math.sqrt(2)).astype(np.float32)


def end_of_layer(
    model: Any, layer: int, hidden: np.ndarray, inputs: np.ndarray | None, gelu: Callable[..., Any]
) -> np.ndarray:
    """hidden (T, E) with what the layer does with its own input, scaled."""
    if inputs is not None:
        gated = gelu(model.project(layer, "inp_gate", hidden)) * inputs[:, layer]
        block = model.project(layer, "proj", gated)
        norm = model.tensor(f"blk.{layer}.post_norm.weight")
        block = block / np.sqrt((block**2).mean(-1, keepdims=True) + model.epsilon) * norm
        hidden = hidden + block
    name = f"blk.{layer}.layer_output_scale.weight"
    return hidden * model.tensor(name) if name in model.tensors else hidden


def add_norms(at: str, n_expert: int, n_embd: int, vector: Vector) -> None:
    """Norms and scales of experts; that of the router undoes its factor, the root of n_embd."""
    root = math.sqrt(n_embd)
    vector(f"{at}ffn_gate_inp.scale", n_embd, root, 0.3 * root)
    for name in ("pre_ffw_norm_2", "post_ffw_norm_1", "post_ffw_norm_2"):
        vector(f"{at}{name}.weight", n_embd, 1.0, 0.3)
    vector(f"{at}ffn_down_exps.scale", n_expert, 1.0, 0.3)


def experts_beside(
    model: Any, layer: int, hidden: np.ndarray, gelu: Callable[[np.ndarray], np.ndarray]
) -> np.ndarray:
    """The feed-forward of hidden (T, E) and the experts beside it: each by norms of its own."""

    def norm(x: np.ndarray, name: str) -> np.ndarray:
        mean_square = (x**2).mean(-1, keepdims=True)
        return x / np.sqrt(mean_square + np.float32(model.epsilon)) * model.tensor(at + name)

    at = f"blk.{layer}."
    x = norm(hidden, "ffn_norm.weight")
    gate, up, down = (model.tensor(f"{at}ffn_{name}.weight") for name in ("gate", "up", "down"))
    dense = norm((gelu(x @ gate.T) * (x @ up.T)) @ down.T, "post_ffw_norm_1.weight")
    routed = norm(hidden, "ffn_gate_inp.scale") / np.float32(math.sqrt(hidden.shape[1]))
    logits = routed @ model.tensor(f"{at}ffn_gate_inp.weight").T
    x, out = norm(hidden, "pre_ffw_norm_2.weight"), np.zeros_like(hidden)
    both, downs = (model.tensor(f"{at}ffn_{name}_exps.weight") for name in ("gate_up", "down"))
    scales = model.tensor(f"{at}ffn_down_exps.scale")
    for row, scores in enumerate(logits):
        chosen = np.argsort(-scores, kind="stable")[: model.key("expert_used_count", 0)]
        shares = np.exp(scores[chosen] - scores[chosen].max())
        for e, share in zip(chosen, shares / shares.sum(), strict=True):
            gated, given = np.split(both[e] @ x[row], 2)
            out[row] += share * scales[e] * (downs[e] @ (gelu(gated) * given))
    return dense + norm(out, "post_ffw_norm_2.weight")
