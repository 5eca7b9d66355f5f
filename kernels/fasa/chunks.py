"""FASA's decode step on the GPU: scores of all keys by the dominant dims of their kv head.

Variant c keeps the keys whole, and beside them a copy of their dominant dims, f16 (B, G, C,
capacity): one dim of all tokens after the other, so that a scan reads 2 C bytes a token in whole
lines. At d/8 chunks the copy costs an eighth more memory than splitting the keys; in return no row
has to be put together, neither in a step's gather nor for a later prefill.

Variant m splits the keys, because the host keeps the other dims and the values, and bytes over PCIe
count. Rows that any head of a group chooses are put together on the device (fasa/row_cache.py);
``attend_rows`` (attention/decode.py) attends to them in the order of the split dims.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sparsekv_cli.kernels.attention.decode import QUERY_TYPES, TILE
from sparsekv_cli.kernels.checks import check, check_on_host

PROGRAMS = 1056  # aimed at in a scan: eight on each of 132 multiprocessors
TILE_BYTES = 16384  # of a scan: in each dim at least 256 bytes side by side


def build_chunks(
    k: torch.Tensor, first: int, stop: int, dims: torch.Tensor, dom: torch.Tensor
) -> None:
    """dom[..., first:stop] of these rows of k f16 (B, G, capacity, d): the dims int32 (G, C)."""
    n_batch, n_kv_head = k.shape[:2]
    wide = dims.long()[None, :, None].expand(n_batch, n_kv_head, stop - first, -1)
    dom[..., first:stop] = k[:, :, first:stop].gather(3, wide).transpose(2, 3)


@triton.jit
def _append_chunks_kernel(
    k_new_ptr, dims_ptr, dom_ptr, pos_ptr, n_kv_head, d, n_dim, stride_db, stride_dg, stride_dc,
    stride_dims, BLOCK: tl.constexpr,
):  # fmt: skip
    b, g = tl.program_id(0), tl.program_id(1)
    c = tl.arange(0, BLOCK)
    dim = tl.load(dims_ptr + g * stride_dims + c, mask=c < n_dim, other=0)
    k = tl.load(k_new_ptr + (b * n_kv_head + g) * d + dim, mask=c < n_dim)
    at = b.to(tl.int64) * stride_db + g.to(tl.int64) * stride_dg + c.to(tl.int64) * stride_dc
    tl.store(dom_ptr + at + tl.load(pos_ptr + b), k.to(tl.float16), mask=c < n_dim)


def append_chunks(
    k_new: torch.Tensor, dims: torch.Tensor, dom: torch.Tensor, pos: torch.Tensor
) -> None:
    """Adds the dims int32 (G, C) of k_new f32 (B, G, d) as token pos int32 (B,) of ``dom``.

    dom f16 (B, G, C, capacity), any strides but the last.
    """
    n_batch, n_kv_head, d = k_new.shape
    n_dim, device = dims.shape[1], k_new.device
    check("k_new", k_new, torch.float32, (None, None, None), device)
    check("dims", dims, torch.int32, (n_kv_head, None), device, strided=True)
    check("dom", dom, torch.float16, (n_batch, n_kv_head, n_dim, None), device, strided=True)
    check("pos", pos, torch.int32, (n_batch,), device)
    _append_chunks_kernel[(n_batch, n_kv_head)](
        k_new, dims, dom, pos, n_kv_head, d, n_dim, *dom.stride()[:3], dims.stride(0),
        BLOCK=triton.next_power_of_2(n_dim), num_warps=1,
    )  # fmt: skip


def score_chunks_ref(q: torch.Tensor, dims: torch.Tensor, dom: torch.Tensor) -> torch.Tensor:
    """q (B, H, d), dims (G, C), dom f16 (B, G, C, n) -> f64 (B, H, n), not scaled."""
    n_kv_head = dims.shape[0]
    grouped = q.double().unflatten(1, (n_kv_head, -1))  # (B, G, group, d)
    wide = dims.long()[None, :, None].expand(*grouped.shape[:3], -1)
    return (grouped.gather(3, wide) @ dom.double()).flatten(1, 2)


@triton.jit(do_not_specialize=["n_split"])
def _score_chunks_kernel(
    q_ptr, dims_ptr, dom_ptr, n_ptr, out_ptr, n_kv_head, n_split,
    stride_db, stride_dg, stride_dc, stride_dims, stride_ob, stride_oh,
    GROUP: tl.constexpr, TILE_H: tl.constexpr, D: tl.constexpr, C: tl.constexpr,
    BLOCK_C: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    split, unit = tl.program_id(0), tl.program_id(1)
    b, g = (unit // n_kv_head).to(tl.int64), (unit % n_kv_head).to(tl.int64)
    n = tl.load(n_ptr + b)
    chunk = tl.cdiv(tl.cdiv(n, n_split), BLOCK_N) * BLOCK_N
    last = tl.minimum((split + 1) * chunk, n)
    t, c = tl.arange(0, TILE_H), tl.arange(0, BLOCK_C)
    dim = tl.load(dims_ptr + g * stride_dims + c, mask=c < C, other=0)
    head = unit.to(tl.int64) * GROUP + t
    q = tl.load(
        q_ptr + head[:, None] * D + dim[None, :],
        mask=(t < GROUP)[:, None] & (c < C)[None, :], other=0.0,
    ).to(tl.float32)  # fmt: skip
    q_high = q.to(tl.float16)
    q_low = (q - q_high.to(tl.float32)).to(tl.float16)
    dom_at = dom_ptr + b * stride_db + g * stride_dg + c[:, None].to(tl.int64) * stride_dc
    out_at = out_ptr + b * stride_ob + (g * GROUP + t)[:, None] * stride_oh
    for start in range(split * chunk, last, BLOCK_N):
        j = start + tl.arange(0, BLOCK_N)
        # By eight tokens, that is 16 bytes: what is read behind the last one is not stored.
        is_token = (j // 8 * 8 < last)[None, :]
        keys = tl.load(dom_at + j[None, :], mask=is_token & (c < C)[:, None], other=0.0)
        scores = tl.dot(q_low, keys, acc=tl.dot(q_high, keys))
        tl.store(out_at + j[None, :], scores, mask=(t < GROUP)[:, None] & (j < last)[None, :])


def score_chunks(
    q: torch.Tensor,
    dims: torch.Tensor,
    dom: torch.Tensor,
    n: torch.Tensor,
    n_max: int,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """out[b, h, j] = q[b, h] . k[b, g, j] over the dominant dims, j < n[b]: f32 (B, H, >= n_max).

    q (B, H, d), dims int32 (G, C), dom f16 (B, G, C, capacity), capacity a multiple of 16; n int32
    (B,), n_max >= all of them. Not scaled. What lies from n[b] on is not written.
    """
    n_batch, n_head, d = q.shape
    n_kv_head, n_dim = dims.shape
    device = q.device
    check("q", q, QUERY_TYPES, (None, None, None), device)
    check("dims", dims, torch.int32, (None, None), device, strided=True)
    check("dom", dom, torch.float16, (n_batch, n_kv_head, n_dim, None), device, strided=True)
    check("n", n, torch.int32, (n_batch,), device)
    if n_head % n_kv_head:
        raise ValueError(f"q has {n_head} heads: expected a multiple of dims' {n_kv_head}")
    if dom.shape[3] < n_max or dom.shape[3] % 16:
        raise ValueError(
            f"dom has room for {dom.shape[3]} tokens: expected {n_max} or more, a multiple of 16"
        )
    if out is None:
        out = torch.empty(n_batch, n_head, n_max, dtype=torch.float32, device=device)
    check("out", out, torch.float32, (n_batch, n_head, None), device, strided=True)
    if out.shape[2] < n_max:
        raise ValueError(f"out has room for {out.shape[2]} scores: expected {n_max}")
    group = n_head // n_kv_head
    n_unit = n_batch * n_kv_head
    block_c = max(16, triton.next_power_of_2(n_dim))
    block_n = max(128, TILE_BYTES // (2 * block_c))
    n_split = max(1, min(triton.cdiv(n_max, block_n), triton.cdiv(PROGRAMS, n_unit)))
    _score_chunks_kernel[(n_split, n_unit)](
        q, dims, dom, n, out, n_kv_head, n_split, *dom.stride()[:3], dims.stride(0),
        *out.stride()[:2], GROUP=group, TILE_H=max(TILE, triton.next_power_of_2(group)), D=d,
        C=n_dim, BLOCK_C=block_c, BLOCK_N=block_n, num_warps=4,
        num_stages=3,
    )  # fmt: skip
    return out


# --- variant m: the other dims and the values lie on the host -------------------------------------


@triton.jit
def _append_rest_kernel(
    k_new_ptr, v_new_ptr, dims_ptr, rest_ptr, v_ptr, pos_ptr, n_kv_head, d, n_rest, d_v,
    stride_dims, stride_rb, stride_rg, stride_rn, stride_vb, stride_vg, stride_vn,
    BLOCK: tl.constexpr,
):  # fmt: skip
    b, g = tl.program_id(0), tl.program_id(1)
    row = tl.load(pos_ptr + b).to(tl.int64)
    c, unit = tl.arange(0, BLOCK), b * n_kv_head + g
    dim = tl.load(dims_ptr + g * stride_dims + c, mask=c < n_rest, other=0)
    rest = tl.load(k_new_ptr + unit * d + dim, mask=c < n_rest)
    v = tl.load(v_new_ptr + unit * d_v + c, mask=c < d_v)
    b, g = b.to(tl.int64), g.to(tl.int64)
    rest_at = rest_ptr + b * stride_rb + g * stride_rg + row * stride_rn
    v_at = v_ptr + b * stride_vb + g * stride_vg + row * stride_vn
    tl.store(rest_at + c, rest.to(tl.float16), mask=c < n_rest)
    tl.store(v_at + c, v.to(tl.float16), mask=c < d_v)


def append_rest(
    k_new: torch.Tensor,
    v_new: torch.Tensor,
    dims: torch.Tensor,
    rest: torch.Tensor,
    v: torch.Tensor,
    pos: torch.Tensor,
) -> None:
    """Writes the dims int32 (G, d_rest) of k_new f32 (B, G, d), and v_new, as row pos int32 (B,).

    rest f16 (B, G, capacity, d_rest), v f16 (B, G, capacity, d_v): pinned memory of the host.
    """
    n_batch, n_kv_head, d = k_new.shape
    n_rest, d_v, device = dims.shape[1], v_new.shape[2], k_new.device
    check("k_new", k_new, torch.float32, (None, None, None), device)
    check("v_new", v_new, torch.float32, (n_batch, n_kv_head, d_v), device)
    check("dims", dims, torch.int32, (n_kv_head, None), device, strided=True)
    check_on_host("rest", rest, (n_batch, n_kv_head, None, n_rest), device)
    check_on_host("v", v, (n_batch, n_kv_head, None, d_v), device)
    check("pos", pos, torch.int32, (n_batch,), device)
    _append_rest_kernel[(n_batch, n_kv_head)](
        k_new, v_new, dims, rest, v, pos, n_kv_head, d, n_rest, d_v, dims.stride(0),
        *rest.stride()[:3], *v.stride()[:3], BLOCK=triton.next_power_of_2(max(n_rest, d_v, 1)),
        num_warps=1,
    )  # fmt: skip
