"""Recurrent layers of the tiny models: which layers, their keys and tensors, as llama.cpp has them.

Also their outputs by plain formulas, for reference_decoder.py; no code of the package is used.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from gguf import GGUFWriter

Matrix = Callable[..., None]  # (name, n_out, n_in, gain)
Vector = Callable[[str, int, float, float], None]  # (name, size, mean, std)


@dataclass(frozen=True)
class ShortConvolution:
    """LFM2's layers: every ``full``-th layer has attention instead, and head_count_kv above 0.

    attention: the layers that have it, where they are others.
    """

    length: int = 3
    full: int = 2
    attention: tuple[int, ...] = ()
    output_norm: str = "token_embd_norm"

    def is_recurrent(self, layer: int) -> bool:
        return layer not in self.attention if self.attention else (layer + 1) % self.full != 0

    def add_keys(self, writer: GGUFWriter, arch: str, n_layer: int, n_head_kv: int) -> None:
        counts = [0 if self.is_recurrent(i) else n_head_kv for i in range(n_layer)]
        writer.add_head_count_kv(counts)
        writer.add_uint32(f"{arch}.shortconv.l_cache", self.length)

    def add_tensors(
        self,
        writer: GGUFWriter,
        at: str,
        n_embd: int,
        matrix: Matrix,
        vector: Vector,
        rows: Any,
    ) -> None:
        matrix(f"{at}shortconv.in_proj.weight", 3 * n_embd, n_embd, 4.0)
        filters = rows(f"{at}shortconv.conv.weight", n_embd, self.length)
        writer.add_tensor(f"{at}shortconv.conv.weight", filters)
        matrix(f"{at}shortconv.out_proj.weight", n_embd, n_embd, 2.0)


@dataclass(frozen=True)
class DeltaNet:
    """Qwen3.5's layers: n_v value heads of d elements, as many keys heads or fewer, a gate."""

    length: int = 4
    full: int = 2
    n_k: int = 2
    n_v: int = 4
    d: int = 32
    output_norm: str = "output_norm"

    def is_recurrent(self, layer: int) -> bool:
        return (layer + 1) % self.full != 0

    def add_keys(self, writer: GGUFWriter, arch: str, n_layer: int, n_head_kv: int) -> None:
        writer.add_head_count_kv(n_head_kv)
        writer.add_uint32(f"{arch}.full_attention_interval", self.full)
        writer.add_ssm_conv_kernel(self.length)
        writer.add_ssm_inner_size(self.n_v * self.d)
        writer.add_ssm_state_size(self.d)
        writer.add_ssm_time_step_rank(self.n_v)
        writer.add_ssm_group_count(self.n_k)

    def add_tensors(
        self,
        writer: GGUFWriter,
        at: str,
        n_embd: int,
        matrix: Matrix,
        vector: Vector,
        rows: Any,
    ) -> None:
        n_out, n_qkv = self.n_v * self.d, (2 * self.n_k + self.n_v) * self.d
        matrix(f"{at}attn_qkv.weight", n_qkv, n_embd, 2.0)
        matrix(f"{at}attn_gate.weight", n_out, n_embd, 2.0)
        filters = rows(f"{at}ssm_conv1d.weight", n_qkv, self.length)
        writer.add_tensor(f"{at}ssm_conv1d.weight", filters)
        vector(f"{at}ssm_dt.bias", self.n_v, 0.0, 1.0)
        vector(f"{at}ssm_a", self.n_v, -0.3, 0.08)
        matrix(f"{at}ssm_beta.weight", self.n_v, n_embd, 2.0)
        matrix(f"{at}ssm_alpha.weight", self.n_v, n_embd, 2.0)
        vector(f"{at}ssm_norm.weight", self.d, 1.0, 0.1)
        matrix(f"{at}ssm_out.weight", n_embd, n_out, 2.0)


def convolved(x: np.ndarray, filters: np.ndarray) -> np.ndarray:
    """Causal convolution of x (T, n) with a filter (L,) a channel: filters (n, L)."""
    n_taps = filters.shape[1]
    rows = np.concatenate([np.zeros((n_taps - 1, x.shape[1]), x.dtype), x])
    return np.stack([np.einsum("jn,nj->n", rows[t : t + n_taps], filters) for t in range(len(x))])


def silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))


def short_convolution(model: Any, layer: int, x: np.ndarray) -> np.ndarray:
    """The block's output (T, E) of normed x (T, E); model: a ReferenceModel."""
    b, c, values = np.split(model.project(layer, "shortconv.in_proj", x), 3, axis=1)
    filters = model.tensor(f"blk.{layer}.shortconv.conv.weight")
    return model.project(layer, "shortconv.out_proj", c * convolved(b * values, filters))


def delta_net(model: Any, layer: int, x: np.ndarray) -> np.ndarray:
    """The block's output (T, E) of normed x (T, E), one token after another."""
    prefix, n_rows = f"blk.{layer}.", len(x)
    n_k, n_v = model.key("ssm.group_count", 0), model.key("ssm.time_step_rank", 0)
    d = model.key("ssm.state_size", 0)
    filters = model.tensor(f"{prefix}ssm_conv1d.weight")
    mixed = silu(convolved(model.project(layer, "attn_qkv", x), filters))
    parts = np.split(mixed, [n_k * d, 2 * n_k * d], axis=1)
    q, k, v = (part.reshape(n_rows, -1, d) for part in parts)
    q, k = (y / np.sqrt((y**2).sum(-1, keepdims=True) + model.epsilon) for y in (q, k))
    q, k = (np.tile(y, (1, n_v // n_k, 1)) for y in (q, k))
    beta = 1 / (1 + np.exp(-model.project(layer, "ssm_beta", x)))
    dt = model.project(layer, "ssm_alpha", x) + model.tensor(f"{prefix}ssm_dt.bias")
    decay = np.exp(model.tensor(f"{prefix}ssm_a") * np.log1p(np.exp(dt)))
    memory = np.zeros((n_v, d, d))  # (head, key, value)
    out = np.empty((n_rows, n_v, d))
    for t in range(n_rows):
        memory *= decay[t][:, None, None]
        error = v[t] - np.einsum("hkv,hk->hv", memory, k[t])
        memory += np.einsum("hk,hv->hkv", k[t], beta[t][:, None] * error)
        out[t] = np.einsum("hkv,hk->hv", memory, q[t]) / np.sqrt(d)
    out = out / np.sqrt((out**2).mean(-1, keepdims=True) + model.epsilon)
    out = out * model.tensor(f"{prefix}ssm_norm.weight")
    gate = silu(model.project(layer, "attn_gate", x)).reshape(out.shape)
    return model.project(layer, "ssm_out", (out * gate).reshape(n_rows, -1).astype(np.float32))
