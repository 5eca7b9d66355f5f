"""Reads tensors of a file by name and checks their shapes."""

from collections.abc import Sequence

import numpy as np

from sparsekv_cli.cpu.weights import dot
from sparsekv_cli.errors import SparseKVError
from sparsekv_cli.models.gguf.file import GGUFFile, TensorInfo
from sparsekv_cli.models.gguf.linear import GatedWeights, Linear


class TensorReader:
    """Reads tensors of a file. ``used``: the names of the tensors that were read."""

    def __init__(self, file: GGUFFile) -> None:
        self.file = file
        self.used: set[str] = set()

    def info(self, name: str, expected: tuple[int, ...]) -> TensorInfo:
        """Returns a tensor's entry in the table.

        Raises SparseKVError if the tensor is missing or has another shape than ``expected``.
        """
        info = self.file.tensors.get(name)
        self.used.add(name)
        if info is None:
            raise SparseKVError(
                f"{self.file.path}: tensor {name} is missing; the file is incomplete or its "
                "architecture is another one"
            )
        # llama.cpp also ignores leading dimensions of 1
        if info.shape != (1,) * (len(info.shape) - len(expected)) + expected:
            found, wanted = (" x ".join(map(str, shape)) for shape in (info.shape, expected))
            raise SparseKVError(
                f"{self.file.path}: tensor {name} is {found}, but the hyper-parameters say {wanted}"
            )
        return info

    def vector(self, name: str, length: int, required: bool = True) -> np.ndarray | None:
        """Returns a copy of a vector (a norm, a bias) as f32, or None if it is not required."""
        if not required and name not in self.file.tensors:
            return None
        return self.floats(name, (length,))

    def floats(self, name: str, shape: tuple[int, ...]) -> np.ndarray:
        """Returns a copy of an F32, F16 or BF16 tensor as f32."""
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
        """Returns a matrix. bias: True: required, False: optional, None: not read.

        A bias that is not read makes the file unusable: ``read_weights`` refuses unused tensors.
        """
        info = self.info(f"{name}.weight", (n_rows, n_columns))
        return Linear(
            code=int(info.type),
            data=self.file.data(info),
            n_columns=n_columns,
            bias=None if bias is None else self.vector(f"{name}.bias", n_rows, required=bias),
        )

    def split(self, fused: Linear, rows: Sequence[int]) -> tuple[Linear, ...]:
        """Splits a matrix into matrices of ``rows`` rows each."""
        parts, at = [], 0
        for n in rows:
            bias = None if fused.bias is None else fused.bias[at : at + n].copy()
            parts.append(Linear(fused.code, fused.data[at : at + n], fused.n_columns, bias))
            at += n
        return tuple(parts)

    def stack(self, name: str, n_matrices: int, n_rows: int, n_columns: int) -> Linear:
        """Returns a tensor (n_matrices, n_rows, n_columns) as one Linear with several matrices."""
        info = self.info(f"{name}.weight", (n_matrices, n_rows, n_columns))
        return Linear(int(info.type), self.file.data(info), n_columns, n_matrices=n_matrices)

    def table(self, name: str, *shape: int) -> np.ndarray:
        """Returns a small tensor of any type as f32, such as the biases of experts."""
        info = self.info(name, shape)
        return dot.dequantize(int(info.type), self.file.data(info), shape[-1]).reshape(shape)

    def gated(
        self, prefix: str, names: Sequence[str], n_embd: int, n_ff: int, suffix: str = ""
    ) -> GatedWeights:
        """Returns the weights of a feed-forward network. names: ``gate`` and ``up``, or ``up``."""
        gate_up = tuple(self.linear(f"{prefix}ffn_{x}{suffix}", n_ff, n_embd) for x in names)
        return GatedWeights(gate_up, self.linear(f"{prefix}ffn_down{suffix}", n_embd, n_ff))
