"""A plain float32 decoder to compare with: dense causal attention on dequantised weights.

It shares no code with the package: the file is read by gguf.GGUFReader, the weights are dequantised
by gguf.quants, and RoPE is written in each architecture's own pairing (nothing is permuted), so an
error of the package's loader or rotary code cannot hide here. Letters: T rows, H query heads,
G kv heads, d head dim, E embedding, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType, GGUFReader
from gguf.quants import dequantize
from reference_feed_forward import (
    exact_gelu,
    feed_forward,
    ggml_gelu,
    log_softmax,
    rms_norm,
)
from tiny_gemma4 import end_of_layer, layer_inputs
from tiny_recurrent import delta_net, short_convolution

PAIRING = {
    **dict.fromkeys(("granite", "granitemoe", "llama", "mistral3", "smollm3"), "norm"),
    **dict.fromkeys(("qwen2", "qwen2moe", "qwen2vl", "qwen3", "qwen3moe"), "neox"),
    **dict.fromkeys(
        ("gemma2", "gemma3", "gemma4", "gpt-oss", "phi3", "qwen3vl", "qwen3vlmoe"), "neox"
    ),
    **dict.fromkeys(("lfm2", "lfm2moe", "qwen35", "qwen35moe"), "neox"),
}


LFM2_NORM = "token_embd_norm.weight"  # of the last layer's output


def reference_logits(
    path: str | Path, ids: Sequence[int], *, kv_f16: bool = False, n_ctx: int = 0, n_last: int = 0
) -> np.ndarray:
    """Logits (T, V) f32 of the tokens at positions 0..T-1.

    kv_f16: round what the package rounds: keys (after RoPE) and values to f16, as an f16 KV cache
    does; otherwise what llama.cpp does with a cache of f32: GELU. n_ctx: length of the
    context, 0: that of the model. n_last: of the last tokens only; 0: of all.
    """
    model = ReferenceModel.open(path, n_ctx)
    return model_logits(model, ids, kv_f16=kv_f16, n_last=n_last)


def model_logits(
    model: ReferenceModel, ids: Sequence[int], *, kv_f16: bool = False, n_last: int = 0
) -> np.ndarray:
    """``reference_logits`` of a model that is open; n_last: of the last tokens only."""
    hidden = model.embed(ids)  # (T, E)
    is_gemma = model.arch.startswith("gemma")
    scale = math.sqrt(hidden.shape[1]) if is_gemma else model.key("embedding_scale", 1.0)
    hidden = hidden * np.float32(scale)
    turns = model.rotation(len(ids)), model.rotation(len(ids), of_windows=True)  # (T, d/2) each
    residual = np.float32(model.key("residual_scale", 1.0))
    inputs, gelu = layer_inputs(model, ids, hidden), exact_gelu if kv_f16 else ggml_gelu

    def normed(block: np.ndarray, layer: int, name: str) -> np.ndarray:
        name = f"blk.{layer}.{name}.weight"
        return rms_norm(block, model.tensor(name), model.epsilon) if is_gemma else block

    for layer in range(model.n_layer):
        cos, sin = turns[model.window(layer) > 0]
        block = attention(model, layer, hidden, cos, sin, kv_f16)
        hidden = hidden + residual * normed(block, layer, "post_attention_norm")
        block = feed_forward(model, layer, hidden, gelu)
        hidden = hidden + residual * normed(block, layer, "post_ffw_norm")
        hidden = end_of_layer(model, layer, hidden, inputs, gelu)
    norm = "output_norm.weight" if "output_norm.weight" in model.tensors else LFM2_NORM
    hidden = rms_norm(hidden[-n_last:], model.tensor(norm), model.epsilon)
    head = "output.weight" if "output.weight" in model.tensors else "token_embd.weight"
    logits = hidden @ model.tensor(head).T / np.float32(model.key("logit_scale", 1.0))  # (T, V)
    return capped(logits, model.key("final_logit_softcapping", 0.0))


def capped(x: np.ndarray, cap: float) -> np.ndarray:
    """cap tanh(x / cap); x without a cap."""
    return np.float32(cap) * np.tanh(x / np.float32(cap)) if cap else x


def attention(
    model: ReferenceModel,
    layer: int,
    hidden: np.ndarray,
    cos: np.ndarray,
    sin: np.ndarray,
    kv_f16: bool,
) -> np.ndarray:
    """The attention block's output (T, E) for hidden (T, E)."""
    n_rows = len(hidden)
    x = rms_norm(hidden, model.tensor(f"blk.{layer}.attn_norm.weight"), model.epsilon)
    for tensor, mixer in (("shortconv.conv", short_convolution), ("ssm_conv1d", delta_net)):
        if f"blk.{layer}.{tensor}.weight" in model.tensors:
            return mixer(model, layer, x)
    counts = (model.n_head, model.n_head_kv, model.n_head_kv)
    q, *kv = (
        rows.reshape(n_rows, heads, -1)
        for rows, heads in zip(model.qkv(layer, x), counts, strict=False)
    )
    gates = np.zeros(0, np.float32)
    if q.shape[2] == 2 * model.head_dim:
        q, gates = q[:, :, : model.head_dim], q[:, :, model.head_dim :]
    if f"blk.{layer}.attn_q_norm.weight" in model.tensors:
        q = rms_norm(q, model.tensor(f"blk.{layer}.attn_q_norm.weight"), model.epsilon)
    if f"blk.{layer}.attn_k_norm.weight" in model.tensors:
        kv[0] = rms_norm(kv[0], model.tensor(f"blk.{layer}.attn_k_norm.weight"), model.epsilon)
    if kv and model.arch == "gemma4":
        kv[1] = rms_norm(kv[1], np.float32(1), model.epsilon)
    is_rotated = model.key("rope.scaling.finetuned", True)  # granite's switch
    if is_rotated and not (model.arch == "smollm3" and layer % 4 == 3):
        q, *kv[:1] = (rotate(rows, cos, sin, PAIRING[model.arch]) for rows in (q, *kv[:1]))
    temperature = model.key("attention.temperature_scale", 0.0)
    if temperature:
        turns = np.arange(n_rows) // model.key("rope.scaling.original_context_length", 0)
        q = q * (1 + temperature * np.log(1.0 + turns)).astype(np.float32)[:, None, None]
    if kv and kv_f16:
        kv = [rows.astype(np.float16).astype(np.float32) for rows in kv]
    if kv:
        model.rows[layer] = kv
    k, v = model.rows[layer if kv else model.source(layer)]
    future = np.triu(np.ones((n_rows, n_rows), bool), 1)
    window = model.window(layer)
    hidden_rows = future | np.tril(np.ones((n_rows, n_rows), bool), -window if window else -n_rows)
    group = model.n_head // model.n_head_kv
    scale = model.key("attention.scale", 1.0 if model.arch == "gemma4" else 0.0)
    divisor = np.float32(1 / scale if scale else math.sqrt(model.head_dim))
    heads = []
    for head in range(model.n_head):
        scores = q[:, head] @ k[:, head // group].T / divisor
        scores = capped(scores, model.key("attn_logit_softcapping", 0.0))
        scores[hidden_rows] = -np.inf
        sink = -np.inf
        if f"blk.{layer}.attn_sinks.weight" in model.tensors:
            sink = model.tensor(f"blk.{layer}.attn_sinks.weight")[head]
        peak = np.maximum(scores.max(axis=-1, keepdims=True), sink)
        weights = np.exp(scores - peak)
        weights /= weights.sum(axis=-1, keepdims=True) + np.exp(sink - peak)
        heads.append(weights @ v[:, head // group])  # (T, d)
    attended = np.concatenate(heads, axis=-1)
    if len(gates):
        attended = attended / (1 + np.exp(-gates.reshape(n_rows, -1)))
    return model.project(layer, "attn_output", attended)


def rotate(x: np.ndarray, cos: np.ndarray, sin: np.ndarray, pairing: str) -> np.ndarray:
    """RoPE on the first 2 * n_pairs values of each head; x (T, heads, d), cos and sin (T, n_pairs).

    norm pairs (2i, 2i+1); neox pairs (i, i + n_pairs).
    """
    n_pairs = cos.shape[-1]
    if pairing == "norm":
        first, second = slice(0, 2 * n_pairs, 2), slice(1, 2 * n_pairs, 2)
    else:
        first, second = slice(0, n_pairs), slice(n_pairs, 2 * n_pairs)
    cos, sin = cos[:, None, :], sin[:, None, :]
    out = x.copy()
    out[..., first] = x[..., first] * cos - x[..., second] * sin
    out[..., second] = x[..., first] * sin + x[..., second] * cos
    return out


@dataclass(frozen=True)
class ReferenceModel:
    """What the decoder needs of a file; tensors stay quantised until they are asked for.

    kept: dequantised tensors by name, of a model that is asked for many texts. rows: K and V of the
    layers so far.
    """

    reader: GGUFReader
    tensors: dict
    arch: str
    n_layer: int
    n_head: int
    n_head_kv: int
    head_dim: int
    n_rot: int
    epsilon: float
    n_ctx: int
    kept: dict[str, np.ndarray] = field(default_factory=dict)
    rows: dict[int, list[np.ndarray]] = field(default_factory=dict)

    @classmethod
    def open(cls, path: str | Path, n_ctx: int = 0) -> ReferenceModel:
        """Read the hyper-parameters that shape the computation; n_ctx: see reference_logits."""
        reader = GGUFReader(path)
        arch = reader.fields["general.architecture"].contents()
        if arch not in PAIRING:
            raise ValueError(f"{path}: architecture {arch!r} is not one of {sorted(PAIRING)}")

        def value(name: str, default=None):
            field = reader.fields.get(f"{arch}.{name}")
            return default if field is None else field.contents()

        n_head = value("attention.head_count")
        head_dim = value("attention.key_length", value("embedding_length") // n_head)
        return cls(
            reader=reader,
            tensors={tensor.name: tensor for tensor in reader.tensors},
            arch=arch,
            n_layer=value("block_count"),
            n_head=n_head,
            n_head_kv=int(np.max(value("attention.head_count_kv", n_head))),
            head_dim=head_dim,
            n_rot=value("rope.dimension_count", head_dim),
            epsilon=value("attention.layer_norm_rms_epsilon"),
            n_ctx=n_ctx or value("context_length"),
        )

    def keep(self) -> ReferenceModel:
        """The model itself, with all tensors dequantised."""
        self.kept.update({name: self.tensor(name) for name in self.tensors})
        return self

    def tensor(self, name: str) -> np.ndarray:
        """A tensor by name as f32, (n_out, n_in) or (n,)."""
        if name in self.kept:
            return self.kept[name]
        tensor = self.tensors[name]
        if tensor.tensor_type == GGMLQuantizationType.F32:
            return np.asarray(tensor.data, np.float32)
        return dequantize(tensor.data, tensor.tensor_type)

    def embed(self, ids: Sequence[int]) -> np.ndarray:
        """Token embeddings (T, E)."""
        return self.tensor("token_embd.weight")[np.asarray(ids)]

    def project(self, layer: int, name: str, x: np.ndarray) -> np.ndarray:
        """x (T, n_in) through blk.<layer>.<name>, its bias added when there is one: (T, n_out)."""
        out = x @ self.tensor(f"blk.{layer}.{name}.weight").T
        bias = f"blk.{layer}.{name}.bias"
        return out + self.tensor(bias) if bias in self.tensors else out

    def qkv(self, layer: int, x: np.ndarray) -> list[np.ndarray]:
        """Queries, keys and values (T, n_out) of x (T, n_in), from one tensor or from three.

        Queries alone in a layer that reads the rows of ``source``.
        """
        if f"blk.{layer}.attn_qkv.weight" not in self.tensors:
            names = {f"blk.{layer}.attn_{letter}.weight": letter for letter in "qkv"}
            letters = [letter for name, letter in names.items() if name in self.tensors]
            letters += ["k"] * (len(letters) == 2)  # Gemma 4: values are keys
            return [self.project(layer, f"attn_{letter}", x) for letter in letters]
        n_q = self.n_head * self.head_dim
        both = self.project(layer, "attn_qkv", x)
        return np.split(both, [n_q, n_q + self.n_head_kv * self.head_dim], axis=1)

    def window(self, layer: int) -> int:
        """Tokens that a layer attends to; 0: all. Every sixth layer of Gemma 3 attends to all."""
        if self.arch == "gemma4":
            has_window = self.key("attention.sliding_window_pattern", [])[layer]
            return self.key("attention.sliding_window", 0) if has_window else 0
        step = {"gemma2": 2, "gemma3": 6, "gpt-oss": 2}.get(self.arch, 0)
        size = self.key("attention.sliding_window", 0)
        return size if step and layer % step != step - 1 else 0

    def source(self, layer: int) -> int:
        """The last layer of the same kind that has rows."""
        kind = self.window(layer) > 0
        return max(i for i in self.rows if (self.window(i) > 0) == kind)

    def rotation(self, n_rows: int, *, of_windows: bool = False) -> tuple[np.ndarray, np.ndarray]:
        """cos and sin (T, n_rot/2) f32 with the scaling of ggml's rope (rope_yarn in ggml-cpu).

        of_windows: of the layers with a window, which in Gemma 3 and 4 have RoPE of their own.
        """
        has_own = of_windows and self.arch in ("gemma3", "gemma4")
        base = self.key("rope.freq_base", 10000.0)
        base = self.key("rope.freq_base_swa", 10000.0 if has_own else base) if of_windows else base
        context = self.key("rope.scaling.original_context_length", self.key("context_length", 0))
        kind = "none" if has_own else self.key("rope.scaling.type", "none")
        factor = self.key("rope.scaling.factor", 1.0) if kind != "none" else 1.0
        n_rot = self.key("rope.dimension_count_swa", self.n_rot) if of_windows else self.n_rot
        i = np.arange(n_rot // 2, dtype=np.float64)
        frequency = base ** (-2.0 * i / n_rot)
        if "rope_freqs.weight" in self.tensors and not has_own:
            frequency = frequency / self.tensor("rope_freqs.weight")
        length = "long" if self.n_ctx > context else "short"
        if f"rope_factors_{length}.weight" in self.tensors:
            frequency = frequency / self.tensor(f"rope_factors_{length}.weight")
        scale = 1.0
        if kind == "linear":
            frequency = frequency / factor
        elif kind == "yarn":
            low, high = self.yarn_bounds(base, context)
            keep = 1.0 - np.clip((i - low) / max(0.001, high - low), 0.0, 1.0)
            frequency = frequency / factor * (1.0 - keep) + frequency * keep
            stretch = 0.1 * math.log(factor)
            scale = (1 + stretch) / (
                1 + self.key("rope.scaling.yarn_log_multiplier", 0.0) * stretch
            )
        elif kind not in ("none", "longrope"):
            raise ValueError(f"rope.scaling.type = {kind!r}: must be none, linear or yarn")
        scale *= self.key("rope.scaling.attn_factor", 1.0)
        angle = np.arange(n_rows)[:, None] * frequency
        return (np.cos(angle) * scale).astype(np.float32), (np.sin(angle) * scale).astype(
            np.float32
        )

    def yarn_bounds(self, base: float, context: int) -> tuple[float, float]:
        """Pair indices between which YaRN blends from kept to interpolated frequencies."""

        def pair(turns: float) -> float:
            return self.n_rot * math.log(context / (turns * 2 * math.pi)) / (2 * math.log(base))

        fast = self.key("rope.scaling.yarn_beta_fast", 32.0)
        slow = self.key("rope.scaling.yarn_beta_slow", 1.0)
        return max(0, math.floor(pair(fast))), min(self.n_rot - 1, math.ceil(pair(slow)))

    def key(self, name: str, default):
        """One of the architecture's metadata values."""
        field = self.reader.fields.get(f"{self.arch}.{name}")
        return default if field is None else field.contents()


def kl_divergences(expected: np.ndarray, actual: np.ndarray) -> Iterator[float]:
    """KL(expected || actual) of each row of two arrays of logits (T, V), in nats and float64."""
    for one, other in zip(expected, actual, strict=True):
        p, q = log_softmax(one.astype(np.float64)), log_softmax(other.astype(np.float64))
        yield float(np.sum(np.exp(p) * (p - q)))


def nmse(expected: np.ndarray, actual: np.ndarray) -> float:
    """Mean squared error over the mean square of the expected values."""
    expected, actual = expected.astype(np.float64), actual.astype(np.float64)
    return float(np.mean((expected - actual) ** 2) / np.mean(expected**2))
