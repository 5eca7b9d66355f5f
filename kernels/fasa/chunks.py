"""FASA's decode step on the GPU: scores of all keys by the dominant dims of their kv head.

Variant c keeps whole keys and a copy of their dominant dims, f16 (B, G, C, capacity). In the copy
one dim of all tokens is contiguous. So a scan reads 2 C bytes a token, in whole lines. At d/8
chunks the copy takes an eighth more memory than split keys. But no row has to be joined, neither in
a step's gather nor for a later prefill.

Variant m splits the keys, because the host keeps the other dims and the values, and PCIe is slow.
Rows that any head of a group chooses are joined on the device (fasa/row_cache.py). ``attend_rows``
(attention/decode.py) attends to them in the order of the split dims.
"""

import torch
import triton
import triton.language as tl

from sparsekv_cli.kernels.attention.decode import QUERY_TYPES, TILE
from sparsekv_cli.kernels.attention.rows import NewRow, check_new, store_row
from sparsekv_cli.kernels.attention.select import GroupTops, parts_of_tops
from sparsekv_cli.kernels.attention.threshold import LEAST, order_keys, write_tops
from sparsekv_cli.kernels.checks import check, check_on_host

PROGRAMS = 1056  # target of a scan: eight on each of 132 multiprocessors
TILE_BYTES = 16384  # bytes of a tile of a scan: at least 256 contiguous bytes in each dim


def build_chunks(
    k: torch.Tensor, first: int, stop: int, dims: torch.Tensor, dom: torch.Tensor
) -> None:
    """Copies dims int32 (G, C) of rows first..stop - 1 of k f16 (B, G, capacity, d) to dom."""
    n_batch, n_kv_head = k.shape[:2]
    wide = dims.long()[None, :, None].expand(n_batch, n_kv_head, stop - first, -1)
    dom[..., first:stop] = k[:, :, first:stop].gather(3, wide).transpose(2, 3)


def score_chunks_ref(q: torch.Tensor, dims: torch.Tensor, dom: torch.Tensor) -> torch.Tensor:
    """torch reference: q (B, H, d), dims (G, C), dom f16 (B, G, C, n) -> f64 (B, H, n)."""
    n_kv_head = dims.shape[0]
    grouped = q.double().unflatten(1, (n_kv_head, -1))  # (B, G, group, d)
    wide = dims.long()[None, :, None].expand(*grouped.shape[:3], -1)
    return (grouped.gather(3, wide) @ dom.double()).flatten(1, 2)


@triton.jit(do_not_specialize=["n_split"])
def _score_chunks_kernel(
    q_ptr, dims_ptr, dom_ptr, n_ptr, k_new_ptr, v_new_ptr, k_ptr, v_ptr, k_dims_ptr, out_ptr,
    tops_ptr, n_kv_head, n_split, n_group, stride_db, stride_dg, stride_dc, stride_dims, stride_kb,
    stride_kg, stride_kn, stride_vb, stride_vg, stride_vn, stride_k_dims, stride_ob, stride_oh,
    GROUP: tl.constexpr, TILE_H: tl.constexpr, D: tl.constexpr, D_K: tl.constexpr,
    D_V: tl.constexpr, C: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr, BLOCK_N: tl.constexpr, HAS_NEW: tl.constexpr, HAS_DIMS: tl.constexpr,
    SIZE: tl.constexpr,
):  # fmt: skip
    """HAS_NEW: the step gives the last row. The first split scores it and stores it.

    HAS_DIMS: k has only the dims ``k_dims`` of a key. SIZE: see attention/scores.py.
    """
    split, unit = tl.program_id(0), tl.program_id(1)
    b, g = (unit // n_kv_head).to(tl.int64), (unit % n_kv_head).to(tl.int64)
    n = tl.load(n_ptr + b) - HAS_NEW
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
    if HAS_NEW:  # noqa: SIM102 - decided when the kernel is compiled
        if split == 0:
            row = n.to(tl.int64)
            key = tl.load(k_new_ptr + unit * D + dim, mask=c < C, other=0.0).to(tl.float16)
            dom_row = b * stride_db + g * stride_dg + c.to(tl.int64) * stride_dc + row
            tl.store(dom_ptr + dom_row, key, mask=c < C)
            scores = tl.sum(q * key.to(tl.float32)[None, :], 1)
            tl.store(out_at + row, scores[:, None], mask=(t < GROUP)[:, None])
            c_k, c_v = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_V)
            source = c_k
            if HAS_DIMS:
                source = tl.load(k_dims_ptr + g * stride_k_dims + c_k, mask=c_k < D_K, other=0)
            k_row = tl.load(k_new_ptr + unit * D + source, mask=c_k < D_K, other=0.0)
            k_at = k_ptr + b * stride_kb + g * stride_kg + row * stride_kn
            tl.store(k_at + c_k, k_row.to(tl.float16), mask=c_k < D_K)
            v_at = v_ptr + b * stride_vb + g * stride_vg + row * stride_vn
            store_row(v_new_ptr + unit * D_V, v_at, c_v, D_V)
    for start in range(split * chunk, last, BLOCK_N):
        j = start + tl.arange(0, BLOCK_N)
        # Loads take eight tokens, 16 bytes. Tokens after the last one are not stored.
        is_token = (j // 8 * 8 < last)[None, :]
        keys = tl.load(dom_at + j[None, :], mask=is_token & (c < C)[:, None], other=0.0)
        scores = tl.dot(q_low, keys, acc=tl.dot(q_high, keys))
        tl.store(out_at + j[None, :], scores, mask=(t < GROUP)[:, None] & (j < last)[None, :])
        if SIZE > 0:
            keys = tl.where((j < last)[None, :], order_keys(scores), LEAST)
            write_tops(keys, tops_ptr + head * n_group, t < GROUP, start, n_group, SIZE)


def score_chunks(
    q: torch.Tensor,
    dims: torch.Tensor,
    dom: torch.Tensor,
    n: torch.Tensor,
    n_max: int,
    out: torch.Tensor | None = None,
    new: NewRow | None = None,
    into: tuple[torch.Tensor, torch.Tensor] | None = None,
    k_dims: torch.Tensor | None = None,
    tops: GroupTops | None = None,
) -> torch.Tensor:
    """out[b, h, j] = q[b, h] . k[b, g, j] over the dominant dims, j < n[b]: f32 (B, H, >= n_max).

    q (B, H, d), dims int32 (G, C), dom f16 (B, G, C, capacity), capacity a multiple of 16; n int32
    (B,), n_max >= all of them. Scores are not scaled. Scores from n[b] on are not written. new: the
    last row of each sequence. It is written to ``dom`` and to ``into``: k f16 (B, G, capacity, d)
    and v (B, G, capacity, d_v). k_dims int32 (G, d_k): k has only these dims of keys, f16 (B, G,
    capacity, d_k), and k and v lie in pinned memory of the host. tops: see ``score_rows``.
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
    if new is not None:
        assert into is not None
        if k_dims is None:
            check_new(new, *into, d)
        else:
            check_new(new, *into, d, torch.device("cpu"))
            check(
                "k_dims", k_dims, torch.int32, (n_kv_head, into[0].shape[3]), device, strided=True
            )
            for name, x in zip(("k", "v"), into, strict=True):
                check_on_host(name, x, tuple(x.shape), device)
    top_keys, n_group, size = parts_of_tops(tops, n_batch, n_head, n_max, device)
    k, v = into or (dom, dom)
    d_k, d_v = (k.shape[3], v.shape[3]) if into else (1, 1)
    group = n_head // n_kv_head
    n_unit = n_batch * n_kv_head
    block_c = max(16, triton.next_power_of_2(n_dim))
    block_n = max(128, TILE_BYTES // (2 * block_c))
    n_split = max(1, min(triton.cdiv(n_max, block_n), triton.cdiv(PROGRAMS, n_unit)))
    _score_chunks_kernel[(n_split, n_unit)](
        q, dims, dom, n, *(new or (None, None)), k, v, k_dims, out, top_keys, n_kv_head, n_split,
        n_group,         *dom.stride()[:3], dims.stride(0), *k.stride()[:3], *v.stride()[:3],
        0 if k_dims is None else k_dims.stride(0), *out.stride()[:2], GROUP=group,
        TILE_H=max(TILE, triton.next_power_of_2(group)), D=d, D_K=d_k, D_V=d_v,
        C=n_dim, BLOCK_C=block_c, BLOCK_K=triton.next_power_of_2(max(1, d_k)),
        BLOCK_V=triton.next_power_of_2(d_v), BLOCK_N=block_n,
        HAS_NEW=new is not None, HAS_DIMS=k_dims is not None, SIZE=size,
        num_warps=4, num_stages=3,
    )  # fmt: skip
    return out
