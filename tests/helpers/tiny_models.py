"""Small GGUF models with random weights, written in a moment, for tests of every shape and type.

Quantised tensors are random valid blocks (random bits for the quants and the packed scales, chosen
f16 scales), so no quantiser is needed and every bit pattern occurs. Each tensor draws from its own
generator, seeded by the model's seed and the tensor's name: an option that adds a tensor leaves the
others alone. ``RandomState`` is used because numpy freezes its streams across versions.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import gguf_formats  # noqa: F401
import numpy as np
from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter, LlamaFileType
from gguf.constants import GGML_QUANT_SIZES
from quantized_rows import set_iq1_m_scale
from tiny_architectures import (
    TRAITS,
    Experts,
    add_expert_keys,
    add_value,
    llama3_factors,
    long_factors,
    rotated_dims,
)
from tiny_gemma4 import Gemma4Layers, add_norms
from tiny_recurrent import DeltaNet, ShortConvolution
from tiny_tokenizer import add_tokenizer

ARCHITECTURES = tuple(TRAITS)
WEIGHT_STD = 0.05


class BlockLayout(NamedTuple):
    """Where a block keeps its f16 scales, and what it holds when they are 1.

    d_offset, m_offset: byte offsets of the scale and of the minimum; -1 where there is none.
    unit_std: standard deviation of the values of random blocks with d = 1 and m = m_ratio.
    m_ratio: minimum over scale that centres the values on zero.
    """

    d_offset: int
    m_offset: int
    unit_std: float
    m_ratio: float


BLOCK_LAYOUTS = {
    "Q4_0": BlockLayout(0, -1, 4.64, 0.0),
    "Q4_1": BlockLayout(0, 2, 4.61, -7.5),
    "Q5_0": BlockLayout(0, -1, 9.25, 0.0),
    "Q5_1": BlockLayout(0, 2, 9.23, -15.5),
    "Q8_0": BlockLayout(0, -1, 73.9, 0.0),
    "Q2_K": BlockLayout(80, 82, 13.9, 1.5),
    "Q3_K": BlockLayout(108, -1, 43.3, 0.0),
    "Q4_K": BlockLayout(0, 2, 254.0, 7.5),
    "Q5_K": BlockLayout(0, 2, 522.0, 15.5),
    "Q6_K": BlockLayout(208, -1, 1366.0, 0.0),
    "IQ4_NL": BlockLayout(0, -1, 69.0, 0.0),
    "IQ4_XS": BlockLayout(0, -1, 1275.0, 0.0),
    "IQ1_S": BlockLayout(0, -1, 7.21, 0.0),
    "IQ1_M": BlockLayout(-1, -1, 7.2, 0.0),  # its scale is four bits of each of four words
    "IQ2_XXS": BlockLayout(0, -1, 53.2, 0.0),
    "IQ2_XS": BlockLayout(0, -1, 55.9, 0.0),
    "IQ2_S": BlockLayout(0, -1, 56.5, 0.0),
    "IQ3_XXS": BlockLayout(0, -1, 142.0, 0.0),
    "IQ3_S": BlockLayout(0, -1, 140.0, 0.0),
    "TQ1_0": BlockLayout(52, -1, 0.817, 0.0),
    "TQ2_0": BlockLayout(64, -1, 1.22, 0.0),
    "Q1_0": BlockLayout(0, -1, 1.0, 0.0),
    "Q2_0": BlockLayout(0, -1, 1.22, 0.0),
}
MXFP4_EXPONENTS = (118, 123)  # half-open; 2**(e - 128) times quants of std 5.85 is about 0.05
NVFP4_SCALES = (0, 16)  # half-open; bytes of unsigned E4M3; values of std 0.053
WEIGHT_TYPES = ("F32", "F16", "BF16", *BLOCK_LAYOUTS, "MXFP4", "NVFP4")
FILE_TYPES = {
    "F32": "ALL_F32",
    "Q3_K": "MOSTLY_Q3_K_M",
    "Q4_K": "MOSTLY_Q4_K_M",
    "Q5_K": "MOSTLY_Q5_K_M",
    "MXFP4": "MOSTLY_MXFP4_MOE",
    "Q2_0": "GUESSED",  # gguf has no number for it
}


def make_model(
    path: str | Path,
    *,
    arch: str = "llama",
    wtype: str = "F32",
    seed: int = 0,
    n_layer: int = 2,
    n_embd: int = 256,
    n_head: int = 4,
    n_head_kv: int = 2,
    head_dim: int | None = None,
    value_dim: int | None = None,
    n_ff: int = 512,
    n_vocab: int = 512,
    n_ctx: int = 2048,
    tied: bool = True,
    biases: bool | None = None,
    rope_freqs: bool = False,
    rope_scaling: tuple[str, float] | tuple[str, float, int] | None = None,
    freq_base: float = 10000.0,
    attention_gain: float = 2.0,
    wtypes: Mapping[str, str] | None = None,
    chat_template: str | None = None,
    metadata: Mapping[str, Any] | None = None,
    omit: Collection[str] = (),
    experts: Experts | None = None,
    recurrent: ShortConvolution | DeltaNet | None = None,
    layers: Gemma4Layers | None = None,
    repeat: bool = False,
) -> Path:
    """Write a deterministic GGUF that llama.cpp loads; returns its path.

    wtype: type of every matrix, token_embd (and output, when not tied) included; norms and biases
        stay F32. wtypes overrides it for single tensors by full name (``blk.0.attn_q.weight``).
    head_dim: width of a head; None is n_embd // n_head, and writes a key_length only where heads
        have a norm.
    value_dim: width of a value; None is that of a head; otherwise head_dim is given too.
    biases: q/k/v biases; None writes them where the architecture has them.
    experts: instead of the feed-forward layer; recurrent, layers: see Traits; None: those of the
        architecture.
    rope_freqs: write Llama 3's rope_freqs.weight (llama only).
    rope_scaling: ("linear", factor) or ("yarn", factor, original context length).
    attention_gain: how many times WEIGHT_STD the q and k weights are; 2 makes attention uneven, so
        that RoPE matters; less damps rounding errors.
    metadata: further keys, str, bool, int (int32), float or a list of int; they come last.
    omit: names of tensors to leave out, for tests of broken files.
    repeat: matrices of one type, shape and gain are the same, the first one; a model of any number
        of layers then takes the memory of a few.
    """
    if arch not in ARCHITECTURES:
        raise ValueError(f"arch = {arch!r}: must be one of {', '.join(ARCHITECTURES)}")
    width = n_embd // n_head if head_dim is None else head_dim
    value_width = width if value_dim is None else value_dim
    wtypes, traits = wtypes or {}, TRAITS[arch]
    biases = traits.biases if biases is None else biases
    experts = experts or traits.experts

    writer = GGUFWriter(path, arch)
    name = arch.replace("phi3", "phi 3")  # llama.cpp expects tokens of a vocabulary named phi3
    writer.add_name(f"tiny {name} {wtype}")
    writer.add_file_type(LlamaFileType[FILE_TYPES.get(wtype, f"MOSTLY_{wtype}")])
    writer.add_block_count(n_layer)
    writer.add_context_length(n_ctx)
    writer.add_embedding_length(n_embd)
    if experts is not None:
        add_expert_keys(writer, arch, experts)
        n_ff = n_ff if experts.own_length else experts.n_ff
    layers = layers or traits.layers
    if layers is None:
        writer.add_feed_forward_length(n_ff)
    else:
        layers.add_keys(writer, arch, n_layer, n_ff)
    writer.add_head_count(n_head)
    recurrent = recurrent or traits.recurrent
    if recurrent is None:
        writer.add_head_count_kv(n_head_kv)
    else:
        recurrent.add_keys(writer, arch, n_layer, n_head_kv)
    writer.add_layer_norm_rms_eps(1e-5 if arch == "llama" else 1e-6)
    if "rope.freq_base" not in traits.keys:
        writer.add_rope_freq_base(freq_base)
    writer.add_vocab_size(n_vocab)
    if layers is None and (head_dim is not None or traits.qk_norm):
        writer.add_key_length(width)
        writer.add_value_length(value_width)
    if (head_dim is not None and arch == "llama") or traits.rotated < 1:
        writer.add_rope_dimension_count(rotated_dims(arch, width))
    if rope_scaling is not None:
        writer.add_string(f"{arch}.rope.scaling.type", rope_scaling[0])
        writer.add_rope_scaling_factor(rope_scaling[1])
        if len(rope_scaling) == 3:
            writer.add_rope_scaling_orig_ctx_len(rope_scaling[2])
    add_tokenizer(writer, n_vocab, chat_template)
    for key, value in traits.keys.items():
        if f"{arch}.{key}" not in (metadata or {}):
            add_value(writer, f"{arch}.{key}", np.uint32(value) if type(value) is int else value)
    for key, value in (metadata or {}).items():
        add_value(writer, key, value)

    written: dict[tuple[str, int, int, float], np.ndarray] = {}

    def matrix(name: str, n_out: int, n_in: int, gain: float = 1.0, n: int = 0) -> None:
        """A weight matrix (n_out, n_in), or n of them, of standard deviation gain * WEIGHT_STD."""
        if name in omit:
            return
        kind = wtypes.get(name, wtype)
        n_rows = max(1, n) * n_out
        data = written.get((kind, n_rows, n_in, gain))
        if data is None:
            data = random_rows(tensor_rng(seed, name), kind, n_rows, n_in, gain * WEIGHT_STD)
        if repeat:
            written[kind, n_rows, n_in, gain] = data
        shaped = data.reshape(n, n_out, -1) if n else data
        writer.add_tensor(name, shaped, raw_dtype=GGMLQuantizationType[kind])

    def router(name: str, n_out: int) -> None:
        """An F32 matrix (n_out, n_embd) of a mixture of experts, whose choices are clear."""
        if name not in omit:
            rows = random_rows(tensor_rng(seed, name), "F32", n_out, n_embd, 2 * WEIGHT_STD)
            writer.add_tensor(name, rows)

    def vector(name: str, size: int, mean: float, std: float) -> None:
        """One F32 vector: a norm's weight (mean 1) or a bias (mean 0)."""
        if name not in omit:
            values = mean + std * bell(tensor_rng(seed, name), (size,))
            writer.add_tensor(name, values.astype(np.float32))

    def table(name: str, n_out: int, size: int, std: float) -> None:
        writer.add_tensor(name, random_rows(tensor_rng(seed, name), "F32", n_out, size, std))

    def rows(name: str, n_rows: int, n_columns: int) -> np.ndarray:
        return random_rows(tensor_rng(seed, name), "F32", n_rows, n_columns, 0.4)

    matrix("token_embd.weight", n_vocab, n_embd)
    output_norm = "output_norm" if recurrent is None else recurrent.output_norm
    vector(f"{output_norm}.weight", n_embd, 1.0, 0.1)
    if not tied:
        matrix("output.weight", n_vocab, n_embd)
    if rope_freqs and "rope_freqs.weight" not in omit:
        writer.add_tensor("rope_freqs.weight", llama3_factors(width, freq_base))
    if traits.factors:
        for name, factors in long_factors(rotated_dims(arch, width)).items():
            writer.add_tensor(name, factors)
    if layers is not None:
        layers.add_common(writer, (n_layer, n_vocab, n_embd), matrix, vector)
    for layer in range(n_layer):
        prefix = f"blk.{layer}."
        has_rows, has_v, length = True, True, n_ff
        if layers is not None:
            width = value_width = layers.head_dim(layer)
            has_rows, has_v = layers.has_rows(layer, n_layer), layers.has_v(layer)
            length = layers.n_ff(layer, n_layer, n_ff)
        vector(prefix + "attn_norm.weight", n_embd, 1.0, 0.1)
        if recurrent is not None and recurrent.is_recurrent(layer):
            recurrent.add_tensors(writer, prefix, n_embd, matrix, vector, rows)
        elif traits.fused:
            n_rows = (n_head + n_head_kv) * width + n_head_kv * value_width
            matrix(prefix + "attn_qkv.weight", n_rows, n_embd, attention_gain)
        else:
            n_rows = (1 + traits.gated) * n_head * width
            matrix(prefix + "attn_q.weight", n_rows, n_embd, attention_gain)
            if has_rows:
                matrix(prefix + "attn_k.weight", n_head_kv * width, n_embd, attention_gain)
            if has_rows and has_v:
                matrix(prefix + "attn_v.weight", n_head_kv * value_width, n_embd)
        is_attention = recurrent is None or not recurrent.is_recurrent(layer)
        if biases and is_attention:
            vector(prefix + "attn_q.bias", n_head * width, 0.0, 0.5)
            vector(prefix + "attn_k.bias", n_head_kv * width, 0.0, 2.0)
            vector(prefix + "attn_v.bias", n_head_kv * value_width, 0.0, 0.2)
        if traits.qk_norm and is_attention:
            vector(prefix + "attn_q_norm.weight", width, *traits.norm_of_heads)
            if has_rows:
                vector(prefix + "attn_k_norm.weight", width, *traits.norm_of_heads)
        if is_attention:
            matrix(prefix + "attn_output.weight", n_embd, n_head * value_width)
        if traits.sinks:
            vector(prefix + "attn_output.bias", n_embd, 0.0, 0.2)
            vector(prefix + "attn_sinks.weight", n_head, 3.0, 1.0)
        vector(f"{prefix}{traits.ffn_norm}.weight", n_embd, 1.0, 0.1)
        if traits.post_norms:
            vector(prefix + "post_attention_norm.weight", n_embd, 1.0, 0.3)
            vector(prefix + "post_ffw_norm.weight", n_embd, 1.0, 0.3)
        if layers is not None:
            layers.add_tensors(prefix, n_embd, matrix, vector)
        if experts is not None and layer >= experts.n_dense:
            router(prefix + "ffn_gate_inp.weight", experts.n)
            if experts.gating:
                vector(prefix + "exp_probs_b.bias", experts.n, 0.0, 0.3)
            if experts.beside:
                add_norms(prefix, experts.n, n_embd, vector)
                matrix(prefix + "ffn_gate_up_exps.weight", 2 * experts.n_ff, n_embd, n=experts.n)
            else:
                matrix(prefix + "ffn_gate_exps.weight", experts.n_ff, n_embd, n=experts.n)
                matrix(prefix + "ffn_up_exps.weight", experts.n_ff, n_embd, n=experts.n)
            matrix(prefix + "ffn_down_exps.weight", n_embd, experts.n_ff, n=experts.n)
            if experts.biases:
                vector(prefix + "ffn_gate_inp.bias", experts.n, 0.0, 0.5)
                table(prefix + "ffn_gate_exps.bias", experts.n, experts.n_ff, 4.0)
                table(prefix + "ffn_up_exps.bias", experts.n, experts.n_ff, 4.0)
                table(prefix + "ffn_down_exps.bias", experts.n, n_embd, 0.2)
            if experts.gate:
                vector(prefix + "ffn_gate_inp_shexp.weight", n_embd, 0.0, 0.1)
            if experts.n_shared:
                matrix(prefix + "ffn_gate_shexp.weight", experts.n_shared, n_embd)
                matrix(prefix + "ffn_up_shexp.weight", experts.n_shared, n_embd)
                matrix(prefix + "ffn_down_shexp.weight", n_embd, experts.n_shared)
        if experts is not None and layer >= experts.n_dense and not experts.beside:
            continue
        if not traits.fused:
            matrix(prefix + "ffn_gate.weight", length, n_embd)
        matrix(prefix + "ffn_up.weight", (1 + traits.fused) * length, n_embd)
        matrix(prefix + "ffn_down.weight", n_embd, length)

    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return Path(path)


def fingerprint(path: str | Path) -> str:
    """sha256 over names, types, shapes and bytes of all tensors: what decides a model's logits."""
    digest = hashlib.sha256()
    for tensor in sorted(GGUFReader(path).tensors, key=lambda tensor: tensor.name):
        shape = tuple(int(size) for size in tensor.shape)
        digest.update(f"{tensor.name} {tensor.tensor_type.name} {shape}\n".encode())
        digest.update(np.ascontiguousarray(tensor.data).tobytes())
    return digest.hexdigest()


def tensor_rng(seed: int, name: str) -> np.random.RandomState:
    """The generator of one tensor."""
    return np.random.RandomState([seed, zlib.crc32(name.encode())])


def bell(rng: np.random.RandomState, shape: tuple[int, ...]) -> np.ndarray:
    """Nearly normal values of mean 0 and standard deviation 1, equal to the last bit everywhere:
    sums of three uniform ones (a normal generator calls the platform's logarithm)."""
    return (
        2.0 * (rng.random_sample(shape) + rng.random_sample(shape) + rng.random_sample(shape)) - 3
    )


def random_rows(
    rng: np.random.RandomState, wtype: str, n_rows: int, n_columns: int, std: float
) -> np.ndarray:
    """Rows of a weight type with values of standard deviation std: bytes, or f32/f16 values."""
    if wtype in ("F32", "F16", "BF16"):
        values = (std * bell(rng, (n_rows, n_columns))).astype(np.float32)
        if wtype == "BF16":
            bits = values.view(np.uint32) >> np.uint32(16)  # truncation: any bf16 will do
            return bits.astype(np.uint16).view(np.uint8)
        return values.astype(np.float16) if wtype == "F16" else values
    size, _ = GGML_QUANT_SIZES[GGMLQuantizationType[wtype]]
    if n_columns % size:
        raise ValueError(f"{wtype}: a row of {n_columns} is not a multiple of {size}")
    return random_blocks(rng, wtype, n_rows * n_columns // size, std).reshape(n_rows, -1)


def random_blocks(rng: np.random.RandomState, wtype: str, n_blocks: int, std: float) -> np.ndarray:
    """(n_blocks, block bytes) u8: random bits everywhere, but for scales of a sensible size."""
    _, n_bytes = GGML_QUANT_SIZES[GGMLQuantizationType[wtype]]
    blocks = rng.randint(0, 256, (n_blocks, n_bytes), dtype=np.uint8)
    if wtype == "MXFP4":
        shift = round(float(np.log2(std / WEIGHT_STD)))
        low, high = MXFP4_EXPONENTS
        blocks[:, 0] = rng.randint(low + shift, high + shift, n_blocks)
        return blocks
    if wtype == "NVFP4":
        shift = 8 * round(float(np.log2(std / WEIGHT_STD)))
        low, high = NVFP4_SCALES
        blocks[:, :4] = rng.randint(low + shift, high + shift, (n_blocks, 4))
        return blocks
    layout = BLOCK_LAYOUTS[wtype]
    scale = rng.uniform(0.6, 1.4, n_blocks) * std / layout.unit_std
    if layout.m_offset < 0:
        scale *= rng.choice([-1.0, 1.0], n_blocks)  # symmetric types may carry a negative scale
    else:
        minimum = scale * layout.m_ratio * rng.uniform(0.8, 1.2, n_blocks)
        blocks[:, layout.m_offset : layout.m_offset + 2] = half_bytes(minimum)
    if wtype == "IQ1_M":
        set_iq1_m_scale(blocks, scale.astype(np.float16))
    else:
        blocks[:, layout.d_offset : layout.d_offset + 2] = half_bytes(scale)
    return blocks


def half_bytes(values: np.ndarray) -> np.ndarray:
    """(n,) float -> (n, 2) u8: little-endian f16."""
    return values.astype("<f2").view(np.uint8).reshape(-1, 2)
