"""The tensors of a decoder: views on the memory-mapped file, named, checked, still quantised."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sparsekv_cli.errors import SparseKVError
from sparsekv_cli.models.architectures import Architecture
from sparsekv_cli.models.gguf.file import GGUFFile
from sparsekv_cli.models.hparams import HParams


@dataclass(frozen=True)
class Linear:
    """y = W x + b. data: uint8 (rows, bytes a row) in ggml type ``code``; bias f32 (rows,).

    repacked: the data have the layout of cpu/weights/interleaved.py, which only its dot products
    read.
    """

    code: int
    data: np.ndarray
    n_columns: int
    bias: np.ndarray | None = None
    repacked: bool = False

    @property
    def n_rows(self) -> int:
        return self.data.shape[0]


@dataclass(frozen=True)
class LayerWeights:
    """One layer. q_norm, k_norm: f32 (head_dim,) where the architecture has them."""

    attn_norm: np.ndarray
    q: Linear
    k: Linear
    v: Linear
    q_norm: np.ndarray | None
    k_norm: np.ndarray | None
    o: Linear
    ffn_norm: np.ndarray
    gate: Linear
    up: Linear
    down: Linear

    def linears(self) -> tuple[Linear, ...]:
        return (self.q, self.k, self.v, self.o, self.gate, self.up, self.down)


@dataclass(frozen=True)
class Weights:
    """All tensors. output is token_embd where the file has none (tied embeddings)."""

    file: GGUFFile
    token_embd: Linear
    layers: tuple[LayerWeights, ...]
    output_norm: np.ndarray
    output: Linear
    rope_freqs: np.ndarray | None  # f32 (n_rot / 2,): divides the angles (Llama 3)

    @property
    def n_bytes(self) -> int:
        """Bytes that decoding one token reads: every layer and the output head."""
        layers = sum(linear.data.nbytes for layer in self.layers for linear in layer.linears())
        return layers + self.output.data.nbytes


class _Reader:
    def __init__(self, file: GGUFFile) -> None:
        self.file = file
        self.used: set[str] = set()

    def shape(self, name: str, expected: tuple[int, ...]) -> None:
        info = self.file.tensors.get(name)
        self.used.add(name)
        if info is None:
            raise SparseKVError(
                f"{self.file.path}: tensor {name} is missing; the file is incomplete or its "
                "architecture is another one"
            )
        if info.shape != expected:
            found, wanted = (" x ".join(map(str, shape)) for shape in (info.shape, expected))
            raise SparseKVError(
                f"{self.file.path}: tensor {name} is {found}, but the hyper-parameters say {wanted}"
            )

    def vector(self, name: str, length: int, required: bool = True) -> np.ndarray | None:
        """A small f32 tensor (a norm, a bias), copied so that it is aligned."""
        if not required and name not in self.file.tensors:
            return None
        self.shape(name, (length,))
        info = self.file.tensors[name]
        data = self.file.data(name).reshape(-1)
        if info.type.name == "F32":
            return data.view("<f4").astype(np.float32)
        if info.type.name == "F16":
            return data.view("<f2").astype(np.float32)
        if info.type.name == "BF16":
            return (data.view("<u2").astype(np.uint32) << 16).view(np.float32)
        raise SparseKVError(
            f"{self.file.path}: tensor {name} has type {info.type.name}; norms and biases must be "
            "F32, F16 or BF16"
        )

    def linear(self, name: str, n_rows: int, n_columns: int, *, bias: bool | None = None) -> Linear:
        """A matrix and its bias. bias: True: must be there, False: may be there, None: must not.

        With None a file that has one is refused, because that tensor would not be used.
        """
        self.shape(f"{name}.weight", (n_rows, n_columns))
        info = self.file.tensors[f"{name}.weight"]
        return Linear(
            code=int(info.type),
            data=self.file.data(info),
            n_columns=n_columns,
            bias=None if bias is None else self.vector(f"{name}.bias", n_rows, required=bias),
        )

    def qkv(self, prefix: str, rows: tuple[int, int, int], n_columns: int, bias: bool):
        """q, k and v, from three tensors or from the fused attn_qkv."""
        if f"{prefix}attn_qkv.weight" not in self.file.tensors:
            return tuple(
                self.linear(f"{prefix}attn_{letter}", n, n_columns, bias=bias)
                for letter, n in zip("qkv", rows, strict=True)
            )
        fused = self.linear(f"{prefix}attn_qkv", sum(rows), n_columns, bias=bias)
        parts, at = [], 0
        for n in rows:
            part_bias = None if fused.bias is None else fused.bias[at : at + n].copy()
            parts.append(Linear(fused.code, fused.data[at : at + n], n_columns, part_bias))
            at += n
        return tuple(parts)


def read_weights(file: GGUFFile, hparams: HParams, architecture: Architecture) -> Weights:
    """Views on all tensors of a decoder, shapes checked against the hyper-parameters.

    Raises SparseKVError naming the first tensor that is missing, misshapen or of a type that
    cannot be computed with.
    """
    file.check_types()
    reader = _Reader(file)
    n_embd, d, d_v = hparams.n_embd, hparams.head_dim, hparams.value_dim
    layers = []
    for i in range(hparams.n_layer):
        n_head, n_kv, n_ff = hparams.n_head[i], hparams.n_head_kv[i], hparams.n_ff[i]
        at = f"blk.{i}."
        q, k, v = reader.qkv(at, (n_head * d, n_kv * d, n_kv * d_v), n_embd, architecture.qkv_bias)
        layers.append(
            LayerWeights(
                attn_norm=_present(reader.vector(f"{at}attn_norm.weight", n_embd)),
                q=q,
                k=k,
                v=v,
                q_norm=reader.vector(f"{at}attn_q_norm.weight", d, architecture.qk_norm),
                k_norm=reader.vector(f"{at}attn_k_norm.weight", d, architecture.qk_norm),
                o=reader.linear(f"{at}attn_output", n_embd, n_head * d_v),
                ffn_norm=_present(reader.vector(f"{at}ffn_norm.weight", n_embd)),
                gate=reader.linear(f"{at}ffn_gate", n_ff, n_embd),
                up=reader.linear(f"{at}ffn_up", n_ff, n_embd),
                down=reader.linear(f"{at}ffn_down", n_embd, n_ff),
            )
        )
    rope_freqs = reader.vector("rope_freqs.weight", hparams.n_rot // 2, required=False)
    token_embd = reader.linear("token_embd", hparams.n_vocab, n_embd)
    tied = "output.weight" not in file.tensors
    if rope_freqs is not None and not (np.isfinite(rope_freqs).all() and (rope_freqs > 0).all()):
        raise SparseKVError(f"{file.path}: rope_freqs.weight holds values that are not above 0")
    weights = Weights(
        file=file,
        token_embd=token_embd,
        layers=tuple(layers),
        output_norm=_present(reader.vector("output_norm.weight", n_embd)),
        output=token_embd if tied else reader.linear("output", hparams.n_vocab, n_embd),
        rope_freqs=rope_freqs,
    )
    unused = [name for name in file.tensors if name not in reader.used]
    if unused:
        raise SparseKVError(
            f"{file.path}: tensor {unused[0]} is no part of architecture {architecture.name} as it "
            f"is implemented here ({len(unused)} such tensors); leaving it out would change answers"
        )
    return weights


def _present(vector: np.ndarray | None) -> np.ndarray:
    assert vector is not None
    return vector
