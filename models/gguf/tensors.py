"""Reads tensors of a file by name, and checks their shapes."""

from collections.abc import Sequence

import numpy as np

from sparsekv_cli.cpu.weights import dot
from sparsekv_cli.errors import SparseKVError
from sparsekv_cli.models.gguf.file import GGUFFile, TensorInfo
from sparsekv_cli.models.gguf.linear import GatedWeights, Linear


class TensorReader:
    """Tensors of a file; ``used`` has the names of those that were read."""

    def __init__(self, file: GGUFFile) -> None:
        self.file = file
        self.used: set[str] = set()

    def info(self, name: str, expected: tuple[int, ...]) -> TensorInfo:
        """Returns a tensor. Raises SparseKVError if it is missing or of another shape."""
        info = self.file.tensors.get(name)
        self.used.add(name)
        if info is None:
            raise SparseKVError(
                f"{self.file.path}: tensor {name} is missing; the file is incomplete or its "
                "architecture is another one"
            )
        # leading dimensions of 1 do not count, as in llama.cpp
        if info.shape != (1,) * (len(info.shape) - len(expected)) + expected:
            found, wanted = (" x ".join(map(str, shape)) for shape in (info.shape, expected))
            raise SparseKVError(
                f"{self.file.path}: tensor {name} is {found}, but the hyper-parameters say {wanted}"
            )
        return info

    def vector(self, name: str, length: int, required: bool = True) -> np.ndarray | None:
        """Returns a small f32 tensor (a norm, a bias), copied so that it is aligned."""
        if not required and name not in self.file.tensors:
            return None
        return self.floats(name, (length,))

    def floats(self, name: str, shape: tuple[int, ...]) -> np.ndarray:
        """Returns a small f32 tensor of any shape, copied."""
        info = self.info(name, shape)
        data = self.file.data(name).reshape(-1)
        if info.type.name == "F32":
            return data.view("<f4").astype(np.float32).reshape(shape)
        if info.type.name == "F16":
            return data.view("<f2").astype(np.float32).reshape(shape)
        if info.type.name == "BF16":
            return (data.view("<u2").astype(np.uint32) << 16).view(np.float32).reshape(shape)
        raise SparseKVError(
            f"{self.file.path}: tensor {name} has type {info.type.name}; norms and biases must be "
            "F32, F16 or BF16"
        )

    def linear(self, name: str, n_rows: int, n_columns: int, *, bias: bool | None = None) -> Linear:
        """Returns a matrix. Its bias must (True), may (False) or must not (None) be there.

        With None a file that has one is refused, because that tensor would not be used.
        """
        info = self.info(f"{name}.weight", (n_rows, n_columns))
        return Linear(
            code=int(info.type),
            data=self.file.data(info),
            n_columns=n_columns,
            bias=None if bias is None else self.vector(f"{name}.bias", n_rows, required=bias),
        )

    def split(self, fused: Linear, rows: Sequence[int]) -> tuple[Linear, ...]:
        """Returns a matrix as several, of so many rows each."""
        parts, at = [], 0
        for n in rows:
            bias = None if fused.bias is None else fused.bias[at : at + n].copy()
            parts.append(Linear(fused.code, fused.data[at : at + n], fused.n_columns, bias))
            at += n
        return tuple(parts)

    def stack(self, name: str, n_matrices: int, n_rows: int, n_columns: int) -> Linear:
        """Matrices of one shape from a tensor of three dimensions."""
        info = self.info(f"{name}.weight", (n_matrices, n_rows, n_columns))
        return Linear(int(info.type), self.file.data(info), n_columns, n_matrices=n_matrices)

    def table(self, name: str, *shape: int) -> np.ndarray:
        """Returns a small tensor of any type, such as the biases of experts, as f32."""
        info = self.info(name, shape)
        return dot.dequantize(int(info.type), self.file.data(info), shape[-1]).reshape(shape)

    def gated(self, prefix: str, n_embd: int, n_ff: int, suffix: str = "") -> GatedWeights:
        """Returns a gated feed-forward from three tensors."""
        return GatedWeights(
            self.linear(f"{prefix}ffn_gate{suffix}", n_ff, n_embd),
            self.linear(f"{prefix}ffn_up{suffix}", n_ff, n_embd),
            self.linear(f"{prefix}ffn_down{suffix}", n_embd, n_ff),
        )
