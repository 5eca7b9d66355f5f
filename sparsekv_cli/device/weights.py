"""A model's weights in device memory: quantised as in the file, or as bf16.

A decode step reads every weight once, so quantised weights are faster there. The matrix products of
a prefill need bf16, so one layer at a time is dequantised for them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from sparsekv_cli.cpu.weights import dot as host_matvec
from sparsekv_cli.cpu.weights.formats import FORMAT_OF_CODE
from sparsekv_cli.kernels.weights import dequantize, dot
from sparsekv_cli.kernels.weights.packed import PACKABLE, PackedMatrix, merge_alike, repack
from sparsekv_cli.models.weights import (
    AttentionWeights,
    GatedWeights,
    LayerWeights,
    Linear,
    Weights,
)


class Stack:
    """Matrices that share an input, stacked by rows: y = W x.

    parts: one bf16 matrix, or the quantised ones.
    """

    def __init__(self, parts: Sequence[PackedMatrix]) -> None:
        self.parts = tuple(parts)
        self.n_rows = sum(part.n_rows for part in parts)
        self.n_columns = parts[0].n_columns
        self._launches = _in_pairs(self.parts)

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)

    def apply(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Returns W x, f32 (B, rows), of x f32 (B, columns). It is written to ``out``, if given."""
        if out is None:
            out = torch.empty(len(x), self.n_rows, dtype=torch.float32, device=x.device)
        at = 0
        for parts in self._launches:
            end = at + sum(part.n_rows for part in parts)
            for start in range(0, len(x), dot.MAX_BATCH):
                some = slice(start, start + dot.MAX_BATCH)
                if len(parts) == 1:
                    dot.multiply(parts[0], x[some], out[some, at:end])
                else:
                    dot.multiply_pair(parts[0], parts[1], x[some], out[some, at:end])
            at = end
        return out

    def dense(self, dtype: torch.dtype) -> torch.Tensor:
        """Returns W (rows, columns) in ``dtype``, without a copy if it is stored in that type."""
        if len(self.parts) == 1 and self.parts[0].low.dtype == dtype:
            return self.parts[0].low
        device = self.parts[0].low.device
        out = torch.empty(self.n_rows, self.n_columns, dtype=dtype, device=device)
        at = 0
        for part in self.parts:
            dequantize.dequantize(part, dtype, out[at : at + part.n_rows])
            at += part.n_rows
        return out


def _in_pairs(parts: Sequence[PackedMatrix]) -> list[Sequence[PackedMatrix]]:
    """Returns the parts in their order, two neighbours together if one launch can take both."""
    found: list[Sequence[PackedMatrix]] = []
    for part in parts:
        if found and len(found[-1]) == 1 and dot.can_pair(found[-1][0], part):
            found[-1] = [*found[-1], part]
        else:
            found.append([part])
    return found


@dataclass(frozen=True)
class DeviceLayer:
    """One layer. vectors: norms and biases as tensors. The matrices in it are the host's."""

    vectors: LayerWeights
    qkv: Stack
    o: Stack
    gate_up: Stack
    down: Stack

    def dense(self, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        """Returns the matrices in the prefill's type."""
        names = ("qkv", "o", "gate_up", "down")
        return {name: getattr(self, name).dense(dtype) for name in names}


class DeviceWeights:
    """All weights on a device. mode: ``bf16`` or ``quantized``.

    Formats without a kernel are bf16 in either mode. dtype: of the prefill: bf16, or f32 in tests.
    """

    def __init__(
        self, weights: Weights, device: torch.device, mode: str, dtype: torch.dtype = torch.bfloat16
    ) -> None:
        self.device, self.dtype = device, dtype
        self.mode = mode
        self.layers = tuple(self._layer(layer) for layer in weights.layers)
        self.output = self._stack(weights.output)
        self.output_norm = self._vector(weights.output_norm)

    @property
    def nbytes(self) -> int:
        stacks = [s for each in self.layers for s in (each.qkv, each.o, each.gate_up, each.down)]
        return sum(stack.nbytes for stack in [*stacks, self.output])

    def _layer(self, layer: LayerWeights) -> DeviceLayer:
        # device/engine.py refuses the others
        assert isinstance(layer, AttentionWeights) and isinstance(layer.ffn, GatedWeights)
        vectors: dict[str, Any] = {
            name: self._vector(getattr(layer, name))
            for name in ("attn_norm", "q_norm", "k_norm", "ffn_norm")
        }
        q, *kv = (replace(each, bias=self._vector(each.bias)) for each in layer.inputs())
        vectors |= {"q": q, "kv": tuple(kv)}
        return DeviceLayer(
            vectors=replace(layer, **vectors),
            qkv=self._stack(layer.q, layer.k, layer.v),
            o=self._stack(layer.o),
            gate_up=self._stack(*layer.ffn.gate_up),
            down=self._stack(layer.ffn.down),
        )

    def _vector(self, array: np.ndarray | None) -> Any:
        return None if array is None else torch.from_numpy(array).to(self.device)

    def _stack(self, *linears: Linear) -> Stack:
        if self.mode == "quantized":
            return Stack(merge_alike([self._packed(linear) for linear in linears]))
        whole = torch.cat([self._bf16(linear) for linear in linears])
        return Stack([PackedMatrix("BF16", len(whole), whole.shape[1], whole)])

    def _packed(self, linear: Linear) -> PackedMatrix:
        name = FORMAT_OF_CODE[linear.code].name
        if name not in PACKABLE:
            return PackedMatrix("BF16", linear.n_rows, linear.n_columns, self._bf16(linear))
        data = torch.from_numpy(linear.data.copy()).to(self.device)
        return repack(name, data, linear.n_columns)

    def _bf16(self, linear: Linear) -> torch.Tensor:
        """Returns a matrix that the host dequantises, bf16 (rows, columns) on the device."""
        out = torch.empty(linear.n_rows, linear.n_columns, dtype=torch.bfloat16)
        host_matvec.dequantize_into(
            linear.code, linear.data, linear.n_columns, out.data_ptr(), 2 * linear.n_columns,
            host_matvec.TO_BF16,
        )  # fmt: skip
        return out.to(self.device)


def resident_bytes(weights: Weights, mode: str) -> int:
    """Returns about the bytes that ``DeviceWeights`` will take."""
    linears = [linear for layer in weights.layers for linear in layer.linears()]
    total = 0
    for linear in [*linears, weights.output]:
        packed = mode == "quantized" and FORMAT_OF_CODE[linear.code].name in PACKABLE
        # Unpacked scales make some formats up to 3% larger (kernels/weights/packed.py).
        total += linear.data.nbytes * 103 // 100 if packed else 2 * linear.n_rows * linear.n_columns
    return total
