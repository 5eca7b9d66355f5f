"""Scores all rows of the KV cache on the GPU, for an exact selection."""

import torch
import triton
import triton.language as tl

from sparsekv_cli.kernels.attention.decode import QUERY_TYPES, TILE, _tiling, _width
from sparsekv_cli.kernels.attention.rows import (
    NewRow,
    check_new,
    check_rows,
    load_rows,
    row_elements,
    store_row,
)
from sparsekv_cli.kernels.attention.select import GroupTops, parts_of_tops
from sparsekv_cli.kernels.attention.threshold import LEAST, order_keys, write_tops
from sparsekv_cli.kernels.checks import check


@triton.jit(do_not_specialize=["n_split"])
def _score_rows_kernel(
    q_ptr, k_ptr, v_ptr, n_ptr, k_new_ptr, v_new_ptr, out_ptr, tops_ptr, scale, n_kv_head, n_split,
    n_group, stride_kb, stride_kg, stride_kn, stride_vb, stride_vg, stride_vn, stride_ob,
    stride_oh,
    GROUP: tl.constexpr, TILE_H: tl.constexpr, D: tl.constexpr, D_V: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_N: tl.constexpr, HALVES: tl.constexpr,
    HAS_NEW: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """HAS_NEW: the step gives the last row. The first split scores it and stores it.

    SIZE: neighbours of a group of ``GroupTops``; 0: there are no groups.
    """
    split, unit = tl.program_id(0), tl.program_id(1)
    b, g = (unit // n_kv_head).to(tl.int64), (unit % n_kv_head).to(tl.int64)
    n = tl.load(n_ptr + b) - HAS_NEW
    chunk = tl.cdiv(tl.cdiv(n, n_split), BLOCK_N) * BLOCK_N
    last = tl.minimum((split + 1) * chunk, n)
    t, c = tl.arange(0, TILE_H), tl.arange(0, BLOCK_D)
    head = unit.to(tl.int64) * GROUP + t
    q = tl.load(
        q_ptr + head[:, None] * D + c[None, :],
        mask=(t < GROUP)[:, None] & (c < D)[None, :], other=0.0,
    )  # fmt: skip
    q_high = q.to(tl.float16)
    q_low = (q.to(tl.float32) - q_high.to(tl.float32)).to(tl.float16)
    k_at = k_ptr + b * stride_kb + g * stride_kg
    out_at = out_ptr + b * stride_ob + (g * GROUP + t)[:, None] * stride_oh
    if HAS_NEW:  # noqa: SIM102 - decided when the kernel is compiled
        if split == 0:
            row, c_v = n.to(tl.int64), tl.arange(0, BLOCK_V)
            k_row = store_row(k_new_ptr + unit * D, k_at + row * stride_kn, c, D)
            v_at = v_ptr + b * stride_vb + g * stride_vg
            store_row(v_new_ptr + unit * D_V, v_at + row * stride_vn, c_v, D_V)
            scores = tl.sum(q.to(tl.float32) * k_row.to(tl.float32)[None, :], 1)
            tl.store(out_at + row, (scores * scale)[:, None], mask=(t < GROUP)[:, None])
    for start in range(split * chunk, last, BLOCK_N):
        j = start + tl.arange(0, BLOCK_N)
        k = load_rows(k_at + j.to(tl.int64) * stride_kn, j < last, D, BLOCK_D)
        scores = tl.dot(q_high, tl.trans(k))
        if HALVES:
            scores = tl.dot(q_low, tl.trans(k), acc=scores)
        scores *= scale
        tl.store(out_at + j[None, :], scores, mask=(t < GROUP)[:, None] & (j < last)[None, :])
        if SIZE > 0:
            keys = tl.where((j < last)[None, :], order_keys(scores), LEAST)
            write_tops(keys, tops_ptr + head * n_group, t < GROUP, start, n_group, SIZE)


def score_rows(
    q: torch.Tensor,
    k: torch.Tensor,
    n: torch.Tensor,
    n_max: int,
    scale: float,
    out: torch.Tensor | None = None,
    new: NewRow | None = None,
    v: torch.Tensor | None = None,
    tops: GroupTops | None = None,
) -> torch.Tensor:
    """out[b, h, j] = scale q[b, h] . k[b, g, j] for j < n[b], f32 (B, H, >= n_max).

    q (B, H, d); k: rows of d elements (rows.py), (B, G, capacity) of any strides; n int32 (B,),
    n_max >= all of them. Scores from n[b] on are not written. new: the last row of each sequence,
    which is written to k and to the rows v. tops: memory for what ``select_largest`` needs of long
    rows.
    """
    n_batch, n_head, d = q.shape
    n_kv_head = k.shape[1]
    if new is None:
        v = k
    else:
        assert v is not None
        check_new(new, k, v, d)
    check("q", q, QUERY_TYPES, (None, None, None), q.device)
    check_rows("k", k, (n_batch, n_kv_head, None), d, q.device)
    check("n", n, torch.int32, (n_batch,), q.device)
    if n_head % n_kv_head:
        raise ValueError(f"q has {n_head} heads: expected a multiple of k's {n_kv_head}")
    if out is None:
        out = torch.empty(n_batch, n_head, n_max, dtype=torch.float32, device=q.device)
    check("out", out, torch.float32, (n_batch, n_head, None), q.device, strided=True)
    if out.shape[2] < n_max:
        raise ValueError(f"out has room for {out.shape[2]} scores: expected {n_max}")
    top_keys, n_group, size = parts_of_tops(tops, n_batch, n_head, n_max, q.device)
    group, d_v = n_head // n_kv_head, row_elements(v)
    block, n_split = _tiling(n_batch * n_kv_head, n_max, _width(d, d))
    _score_rows_kernel[(n_split, n_batch * n_kv_head)](
        q, k, v, n, *(new or (None, None)), out, top_keys, scale, n_kv_head, n_split, n_group,
        *k.stride()[:3], *v.stride()[:3], *out.stride()[:2],
        GROUP=group, TILE_H=max(TILE, triton.next_power_of_2(group)), D=d, D_V=d_v,
        BLOCK_D=_width(d, d), BLOCK_V=_width(d_v, d_v), BLOCK_N=block,
        HALVES=q.dtype != torch.float16, HAS_NEW=new is not None, SIZE=size, num_warps=4,
        num_stages=4,
    )  # fmt: skip
    return out
