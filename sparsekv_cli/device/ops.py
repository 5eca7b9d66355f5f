"""The device's backend: what LayerCache asks of one by name, on torch tensors of one device."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import pad, scaled_dot_product_attention

from sparsekv_cli.cache.spec import AttnInput, LayerSpec


class DeviceOps:
    """One device. Decode is the business of the caches themselves, with kernels/."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def dense_prefill(self, store: Any, x: AttnInput, spec: LayerSpec) -> torch.Tensor:
        """Causal attention of a chunk whose K and V are the last T rows of ``store``.

        x.q (H, T, d) -> (H, T, d_v) in q's type.
        """
        return attend_causal(x.q, store.keys(), store.values(), spec)


def attend_causal(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, spec: LayerSpec
) -> torch.Tensor:
    """q (H, T, d), the last T of n rows; k (G, n, d), v (G, n, d_v) f16 -> (H, T, d_v) as q.

    In f16, the type of the rows, which keeps more digits than bf16; in f32 for an f32 q.
    """
    kind = torch.float32 if q.dtype == torch.float32 else torch.float16
    width = max(spec.head_dim, spec.value_dim)  # the fused kernels want one head size
    wide_q, wide_k, wide_v = (_widened(t.to(kind), width)[None] for t in (q, k, v))
    mask: Any = causal_lower_right(q.shape[1], k.shape[1])
    out = scaled_dot_product_attention(
        wide_q, wide_k, wide_v, attn_mask=mask, scale=float(spec.scale), enable_gqa=spec.group > 1
    )
    return out[0, :, :, : spec.value_dim].to(q.dtype)


def _widened(rows: torch.Tensor, width: int) -> torch.Tensor:
    """Rows with zeros up to ``width``; themselves if they are as wide (``pad`` would copy them)."""
    return rows if rows.shape[-1] == width else pad(rows, (0, width - rows.shape[-1]))
