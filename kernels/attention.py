"""Decode attention over a KV cache on the GPU: all rows, or rows listed by index."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sparsekv_cli.kernels.checks import check


@triton.jit
def _append_rows_kernel(
    k_new_ptr, v_new_ptr, k_ptr, v_ptr, pos_ptr, n_kv_head, d, d_v,
    stride_kb, stride_kg, stride_kn, stride_vb, stride_vg, stride_vn,
    BLOCK: tl.constexpr,
):  # fmt: skip
    b, g = tl.program_id(0), tl.program_id(1)
    row = tl.load(pos_ptr + b).to(tl.int64)
    c = tl.arange(0, BLOCK)
    unit = b * n_kv_head + g
    k_new = tl.load(k_new_ptr + unit * d + c, mask=c < d)
    v_new = tl.load(v_new_ptr + unit * d_v + c, mask=c < d_v)
    k_at = k_ptr + b.to(tl.int64) * stride_kb + g.to(tl.int64) * stride_kg + row * stride_kn
    v_at = v_ptr + b.to(tl.int64) * stride_vb + g.to(tl.int64) * stride_vg + row * stride_vn
    tl.store(k_at + c, k_new.to(k_ptr.dtype.element_ty), mask=c < d)
    tl.store(v_at + c, v_new.to(v_ptr.dtype.element_ty), mask=c < d_v)


def append_rows(
    k_new: torch.Tensor,
    v_new: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    pos: torch.Tensor,
) -> None:
    """Writes one row a sequence, k_new f32 (B, G, d) and v_new (B, G, d_v), at row pos int32 (B,).

    k f16 (B, G, capacity, d), v f16 (B, G, capacity, d_v), any strides of rows.
    """
    n_batch, n_kv_head, d = k_new.shape
    d_v = v_new.shape[2]
    device = k_new.device
    check("k_new", k_new, torch.float32, (None, None, None), device)
    check("v_new", v_new, torch.float32, (n_batch, n_kv_head, d_v), device)
    check("k", k, torch.float16, (n_batch, n_kv_head, None, d), device, strided=True)
    check("v", v, torch.float16, (n_batch, n_kv_head, None, d_v), device, strided=True)
    check("pos", pos, torch.int32, (n_batch,), device)
    _append_rows_kernel[(n_batch, n_kv_head)](
        k_new, v_new, k, v, pos, n_kv_head, d, d_v, *k.stride()[:3], *v.stride()[:3],
        BLOCK=triton.next_power_of_2(max(d, d_v)), num_warps=1,
    )  # fmt: skip
