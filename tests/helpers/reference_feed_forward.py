"""Feed-forward blocks of the reference decoder (reference_decoder.py): gated ones and experts."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from tiny_gemma4 import experts_beside

NAMES = ("gate", "up", "down")


def feed_forward(
    model: Any, layer: int, hidden: np.ndarray, gelu: Callable[[np.ndarray], np.ndarray]
) -> np.ndarray:
    """The feed-forward block's output (T, E) for hidden (T, E)."""
    if f"blk.{layer}.ffn_gate_inp.scale" in model.tensors:
        return experts_beside(model, layer, hidden, gelu)
    has_other_name = model.arch in ("gpt-oss", "qwen35", "qwen35moe")
    name = "post_attention_norm" if has_other_name else "ffn_norm"
    x = rms_norm(hidden, model.tensor(f"blk.{layer}.{name}.weight"), model.epsilon)
    prefix = f"blk.{layer}.ffn_"
    if f"{prefix}gate_inp.weight" in model.tensors:
        return mixture(model, prefix, x)
    down, up = model.tensor(f"{prefix}down.weight"), model.tensor(f"{prefix}up.weight")
    if f"{prefix}gate.weight" in model.tensors:
        gate = model.tensor(f"{prefix}gate.weight")
        if model.arch.startswith("gemma"):
            return (gelu(x @ gate.T) * (x @ up.T)) @ down.T
        return swiglu(x, gate, up, down)
    gate, up = np.split(up, 2)
    return swiglu(x, gate, up, down)


def swiglu(x: np.ndarray, gate: np.ndarray, up: np.ndarray, down: np.ndarray) -> np.ndarray:
    """down(silu(gate(x)) * up(x)), (T, E) -> (T, E)."""
    gated = x @ gate.T
    return (gated / (1 + np.exp(-gated)) * (x @ up.T)) @ down.T


def exact_gelu(x: np.ndarray) -> np.ndarray:
    """GELU's tanh form."""
    return x / 2 * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def ggml_gelu(x: np.ndarray) -> np.ndarray:
    """The same as ggml looks it up, by f16 numbers."""
    out = exact_gelu(x.astype(np.float16).astype(np.float32))
    return out.astype(np.float16).astype(np.float32)


def mixture(model: Any, prefix: str, x: np.ndarray) -> np.ndarray:
    """Each row through the experts of the highest probability; qwen2moe leaves their sum as it is.

    A shared expert, if there is one, adds to that, in qwen2moe times the sigmoid of a product.
    """
    gates, ups, downs = (model.tensor(f"{prefix}{name}_exps.weight") for name in NAMES)
    if model.arch == "gpt-oss":
        return clamped_mixture(model, prefix, x, gates, ups, downs)
    products = x @ model.tensor(f"{prefix}gate_inp.weight").T
    probabilities, bias = np.exp(log_softmax(products)), np.float32(0)
    if model.key("expert_gating_func", 0) == 2:
        probabilities = 1 / (1 + np.exp(-products))
        bias = model.tensor(f"{prefix.removesuffix('ffn_')}exp_probs_b.bias")
    out = np.zeros_like(x)
    for row, shares in enumerate(probabilities):
        chosen = np.argsort(-(shares + bias), kind="stable")[: model.key("expert_used_count", 0)]
        total = 1.0 if model.arch == "qwen2moe" else shares[chosen].sum()
        for e in chosen:
            one = swiglu(x[row], gates[e], ups[e], downs[e])
            out[row] += shares[e] / np.float32(total) * one
    if f"{prefix}gate_shexp.weight" in model.tensors:
        gate, up, down = (model.tensor(f"{prefix}{name}_shexp.weight") for name in NAMES)
        shared = swiglu(x, gate, up, down)
        if f"{prefix}gate_inp_shexp.weight" in model.tensors:
            product = x @ model.tensor(f"{prefix}gate_inp_shexp.weight")
            shared = shared / (1 + np.exp(-product))[:, None]
        out += shared
    return out


def clamped_mixture(
    model: Any,
    prefix: str,
    x: np.ndarray,
    gates: np.ndarray,
    ups: np.ndarray,
    downs: np.ndarray,
) -> np.ndarray:
    """gpt-oss's experts: biases everywhere, a softmax of the chosen ones, a clamped SwiGLU."""
    biases = [model.tensor(f"{prefix}{name}_exps.bias") for name in NAMES]
    scores = x @ model.tensor(f"{prefix}gate_inp.weight").T + model.tensor(f"{prefix}gate_inp.bias")
    out = np.zeros_like(x)
    for row, logits in enumerate(scores):
        chosen = np.argsort(-logits, kind="stable")[: model.key("expert_used_count", 0)]
        for e, share in zip(chosen, np.exp(log_softmax(logits[chosen])), strict=True):
            gate = np.minimum(gates[e] @ x[row] + biases[0][e], np.float32(7))
            up = np.clip(ups[e] @ x[row] + biases[1][e], -7, 7)
            hidden = gate / (1 + np.exp(-1.702 * gate)) * (up + 1)
            out[row] += share * (downs[e] @ hidden.astype(np.float32) + biases[2][e])
    return out


def rms_norm(x: np.ndarray, weight: np.ndarray, epsilon: float) -> np.ndarray:
    """x / rms(x) * weight over the last axis."""
    mean_square = np.mean(np.square(x), axis=-1, keepdims=True)
    return x / np.sqrt(mean_square + np.float32(epsilon)) * weight


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """Log-probabilities over the last axis, in the precision given."""
    shifted = logits - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.sum(np.exp(shifted), axis=-1, keepdims=True))
