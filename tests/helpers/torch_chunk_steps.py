"""The steps between matrix products in torch, as in the formulas: a reference of fused ones."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch.nn.functional import silu

from sparsekv_cli.cache.spec import AttnInput
from sparsekv_cli.models.hparams import HParams
from sparsekv_cli.models.layers.layer_params import LayerParams
from sparsekv_cli.models.weights import AttentionWeights, Linear


def rms_norm(x: torch.Tensor, weight: Any, eps: float) -> torch.Tensor:
    """Returns x / sqrt(mean(x^2) + eps) * weight; weight f32 (width,), an array or a tensor."""
    return torch.nn.functional.rms_norm(x, (x.shape[-1],), torch.as_tensor(weight), eps)


def rotate(heads: torch.Tensor, rope: Any, n_rot: int, pos: int) -> torch.Tensor:
    """Rotates f32 (heads, T, d) in half-split order; the first row is at ``pos``."""
    half, rows = n_rot // 2, slice(pos, pos + heads.shape[1])
    cos, sin = (torch.as_tensor(table[rows, :half]) for table in (rope.cos, rope.sin))  # (T, half)
    a, b = heads[..., :half], heads[..., half:n_rot]
    return torch.cat([a * cos - b * sin, a * sin + b * cos, heads[..., n_rot:]], dim=-1)


class TorchChunkSteps:
    """``ChunkSteps`` of models/chunk_steps.py on tensors, step by step as in the formulas.

    Weights and the tables of ``rope`` are arrays.
    """

    def __init__(self, hparams: HParams, rope: Any, interleaved: bool, dtype: torch.dtype) -> None:
        self._hparams, self._rope = hparams, rope
        self._interleaved, self._dtype = interleaved, dtype

    def stream(self, x: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(x)

    def join(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        return torch.cat(list(parts))

    def norm(self, x: torch.Tensor, weight: Any) -> torch.Tensor:
        return rms_norm(x, weight, self._hparams.norm_eps).to(self._dtype)

    def last_norm(self, x: torch.Tensor, weight: np.ndarray) -> torch.Tensor:
        return rms_norm(x, weight, self._hparams.norm_eps)

    def rounded(self, x: torch.Tensor) -> torch.Tensor:
        return x.to(self._dtype)

    def heads(
        self, raw: torch.Tensor, layer: AttentionWeights, sizes: LayerParams, pos: int
    ) -> AttnInput:
        n_head, n_kv, d, d_v = sizes.n_head, sizes.n_head_kv, sizes.head_dim, sizes.value_dim
        n_q = n_head * d * (1 + sizes.output_gate)
        q, k, v = raw.split([n_q, n_kv * d, n_kv * d_v], dim=1)
        if sizes.output_gate:
            q = q.unflatten(1, (n_head, 2, d))[:, :, 0].flatten(1)
        q_scale = torch.as_tensor(self._rope.q_scale[pos : pos + len(raw)])
        q_nope = self._ordered(q, layer.q, layer.q_norm, n_head, sizes) * q_scale[:, None]
        k_nope = self._ordered(k, layer.k, layer.k_norm, n_kv, sizes)
        q, k = (rotate(x, self._rope, sizes.n_rot, pos) for x in (q_nope, k_nope))
        v = _add_bias(v, layer.v).reshape(-1, n_kv, d_v).transpose(0, 1)
        return AttnInput._make((*(t.to(self._dtype) for t in (q, k, v, q_nope, k_nope)), pos))

    def _ordered(
        self,
        rows: torch.Tensor,
        projection: Linear,
        norm: np.ndarray | None,
        n_head: int,
        sizes: LayerParams,
    ) -> torch.Tensor:
        """Returns (T, heads d) as f32 (heads, T, d) with bias and norm, in half-split order."""
        n_rot = sizes.n_rot
        heads = _add_bias(rows.float(), projection).reshape(-1, n_head, sizes.head_dim)
        if norm is not None:
            heads = rms_norm(heads, norm, self._hparams.norm_eps)
        if self._interleaved:
            pairs = heads[..., :n_rot].unflatten(-1, (n_rot // 2, 2)).transpose(-1, -2).flatten(-2)
            heads = torch.cat([pairs, heads[..., n_rot:]], dim=-1)
        return heads.transpose(0, 1)

    def gate_heads(
        self, attended: torch.Tensor, raw: torch.Tensor, sizes: LayerParams
    ) -> torch.Tensor:
        n_head, d = sizes.n_head, sizes.head_dim
        gates = raw[:, : 2 * n_head * d].unflatten(1, (n_head, 2, d))[:, :, 1].flatten(1)
        return (attended.float() * gates.float().sigmoid()).to(self._dtype)

    def gate(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=1)
        return silu(gate).mul_(up)

    def add(self, x: torch.Tensor, y: torch.Tensor, norm: None = None, bias: None = None) -> None:
        assert norm is None and bias is None  # the tiny models have none
        x.add_(y, alpha=self._hparams.residual_scale)


def _add_bias(rows: torch.Tensor, projection: Linear) -> torch.Tensor:
    if projection.bias is None:
        return rows
    return rows + torch.as_tensor(projection.bias)
