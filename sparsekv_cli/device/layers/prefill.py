"""The attention of a prefill on a device."""

from typing import Any

import torch
from torch.nn.functional import pad, scaled_dot_product_attention

from sparsekv_cli.cache.spec import LayerSpec
from sparsekv_cli.kernels.attention import prefill as kernels
from sparsekv_cli.kernels.attention.softmax import ScoreSoftmax


def softmax_on(spec: LayerSpec, device: torch.device) -> ScoreSoftmax:
    """Returns the softmax of a layer, with its sinks on the device."""
    sinks = torch.from_numpy(spec.sinks).to(device) if len(spec.sinks) else None
    return ScoreSoftmax(float(spec.scale), float(spec.softcap), sinks)


def attend_causal(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, spec: LayerSpec
) -> torch.Tensor:
    """Returns (H, T, d_v) of q (H, T, d), the last T of n rows; k (G, n, d), v (G, n, d_v) f16.

    It computes in f16, the rows' type, which has more digits than bf16; in f32 if q is f32. With a
    window the n rows are those that the first query attends to, and the rows after them.
    """
    if spec.window or spec.softcap or len(spec.sinks):
        softmax = softmax_on(spec, q.device)
        return kernels.attend_causal(q, k, v, softmax, spec.window)
    kind = torch.float32 if q.dtype == torch.float32 else torch.float16
    width = max(spec.head_dim, spec.value_dim)  # the fused kernels need one head size
    wide_q, wide_k, wide_v = (_widened(t.to(kind), width)[None] for t in (q, k, v))
    out = scaled_dot_product_attention(
        wide_q,
        wide_k,
        wide_v,
        attn_mask=_causal_mask(q, k),
        scale=float(spec.scale),
        enable_gqa=spec.group > 1,
    )
    return out[0, :, :, : spec.value_dim].to(q.dtype)


def _causal_mask(q: torch.Tensor, k: torch.Tensor) -> Any:
    """Returns the mask: each of the last T rows attends to itself and the rows before it."""
    n_new, n = q.shape[1], k.shape[1]
    if not q.is_cuda:
        return torch.ones((n_new, n), dtype=torch.bool).tril(n - n_new)
    # Imported here, because the import takes seconds. A GPU's kernels need no mask in memory.
    from torch.nn.attention.bias import causal_lower_right

    return causal_lower_right(n_new, n)


def _widened(rows: torch.Tensor, width: int) -> torch.Tensor:
    """Returns rows with zeros up to ``width``. Rows of that width are returned without a copy."""
    return rows if rows.shape[-1] == width else pad(rows, (0, width - rows.shape[-1]))
