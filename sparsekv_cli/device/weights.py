"""A model's weights in device memory: quantised as in the file, or as bf16.

A decode step reads every weight once, so quantised weights are faster there. The matrix products of
a prefill need bf16, so one layer at a time is dequantised for them.
"""

from dataclasses import dataclass, fields, replace
from itertools import groupby
from typing import Any

import numpy as np
import torch

from sparsekv_cli.cpu.weights import dot as host_matvec
from sparsekv_cli.cpu.weights.formats import FORMAT_OF_CODE
from sparsekv_cli.device.layers.experts import DeviceExperts, ExpertStack
from sparsekv_cli.device.layers.stack import GatedStacks, Stack
from sparsekv_cli.kernels.experts.routing import Routing
from sparsekv_cli.kernels.weights.packed import PACKABLE, PackedMatrix, merge_alike, repack
from sparsekv_cli.models.layers.expert_weights import ExpertNorms
from sparsekv_cli.models.weights import (
    AttentionWeights,
    ExpertWeights,
    GatedWeights,
    LayerWeights,
    Linear,
    Weights,
)

# Norms of an AttentionWeights.
VECTORS = (
    "attn_norm", "attn_post_norm", "ffn_norm", "ffn_post_norm", "q_norm", "k_norm", "v_norm",
)  # fmt: skip


@dataclass(frozen=True)
class DeviceLayer:
    """One layer. vectors: norms and biases as tensors. The matrices in it are the host's."""

    vectors: LayerWeights
    qkv: Stack
    o: Stack
    ffn: GatedStacks | DeviceExperts

    @property
    def nbytes(self) -> int:
        return self.qkv.nbytes + self.o.nbytes + self.ffn.nbytes

    def dense(self, dtype: torch.dtype) -> dict[str, Any]:
        """Returns the products of a prefill, see ``Forward.products``."""
        return {"qkv": self.qkv.product(dtype), "o": self.o.product(dtype), **self.ffn.dense(dtype)}


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
        return sum(layer.nbytes for layer in self.layers) + self.output.nbytes

    def _layer(self, layer: LayerWeights) -> DeviceLayer:
        # device/engine.py refuses the others
        assert isinstance(layer, AttentionWeights) and layer.ffn is not None
        vectors: dict[str, Any] = {name: self._vector(getattr(layer, name)) for name in VECTORS}
        biased = (*layer.inputs(), layer.o)
        q, *kv, o = (replace(each, bias=self._vector(each.bias)) for each in biased)
        vectors |= {"q": q, "kv": tuple(kv), "o": o}
        return DeviceLayer(
            vectors=replace(layer, **vectors),
            qkv=self._stack(*layer.inputs()),
            o=self._stack(layer.o),
            ffn=self._experts(layer.ffn)
            if isinstance(layer.ffn, ExpertWeights)
            else self._gated(layer.ffn),
        )

    def _gated(self, ffn: GatedWeights) -> GatedStacks:
        return GatedStacks(self._stack(*ffn.gate_up), self._stack(ffn.down))

    def _experts(self, ffn: ExpertWeights) -> DeviceExperts:
        params, linear = ffn.params, ffn.router
        router = [host_matvec.dequantize(linear.code, linear.data, linear.n_columns)]
        if ffn.shared_gate is not None:
            router.append(ffn.shared_gate[None])
        routing = Routing(
            params.n_expert_used,
            is_sigmoid=params.gating == "sigmoid",
            is_normalised=params.normalised,
            bias=self._vector(linear.bias),
            choice_bias=self._vector(ffn.choice_bias),
            scales=self._vector(ffn.scales),
            n_group=params.n_group,
            n_group_used=params.n_group_used,
        )
        return DeviceExperts(
            router=self._vector(np.concatenate(router)),
            routing=routing,
            gate_up=self._expert_stack(*ffn.experts.gate_up),
            down=self._expert_stack(ffn.experts.down),
            biases=None if ffn.biases is None else tuple(map(self._vector, ffn.biases)),
            shared=None if ffn.shared is None else self._gated(ffn.shared),
            norms=None if ffn.norms is None else self._norms(ffn.norms),
        )

    def _norms(self, norms: ExpertNorms) -> ExpertNorms:
        vectors: dict[str, Any] = {
            each.name: self._vector(getattr(norms, each.name)) for each in fields(norms)
        }
        return ExpertNorms(**vectors)

    def _expert_stack(self, *linears: Linear) -> ExpertStack:
        """Returns the matrices of all experts. In one format they lie expert by expert."""
        n_expert = linears[0].n_matrices
        parts: list[PackedMatrix] = []
        for _, group in groupby(linears, lambda linear: linear.code):
            alike = list(group)
            first = alike[0]
            rows = [each.data.reshape(n_expert, -1, each.data.shape[1]) for each in alike]
            data = first.data
            if len(alike) > 1:
                data = np.concatenate(rows, axis=1).reshape(-1, first.data.shape[1])
            parts.extend(self._stack(replace(first, data=data)).parts)
        return ExpertStack(parts, n_expert)

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
