"""FASA's decode step on the GPU: scores of all keys by the dominant dims of their kv head.

Beside the keys lies a copy of their dominant dims, f16 (B, G, C, capacity): one dim of all tokens
after the other, so that a scan reads 2 C bytes a token in whole lines. The keys themselves stay
whole: at d/8 chunks of d/2 that costs an eighth more than splitting them would, and saves putting
rows together, in the gather of each step and before every later prefill. Where the host keeps the
other dims and the values (variant m), the bytes that cross PCIe count, so K is split there: rows
that any head of a group has chosen are fetched once, put together on the device, and attended to
by ``attend_rows`` (attention.py) in the order of the split dims.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from sparsekv_cli.kernels.attention import QUERY_TYPES, TILE
from sparsekv_cli.kernels.checks import check

PROGRAMS = 1056  # aimed at in a scan: eight on each of 132 multiprocessors
TILE_BYTES = 16384  # of a scan: in each dim at least 256 bytes side by side
GATHERED = 32  # rows that a program fetches from the host


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


class Union(NamedTuple):
    """Rows that any query head of a kv head has chosen, once each; m rows a head."""

    rows: torch.Tensor  # int32 (B, G, group m)
    counts: torch.Tensor  # int32 (B, G)
    places: torch.Tensor  # int32 (B, H, m): where in ``rows`` each row of a head's list is


def empty_union(n_batch: int, n_head: int, n_kv_head: int, m: int, device: torch.device) -> Union:
    """Room for the output of ``unite_rows``."""
    shapes = (n_batch, n_kv_head, n_head // n_kv_head * m), (n_batch, n_kv_head)
    return Union._make(
        torch.empty(*shape, dtype=torch.int32, device=device)
        for shape in (*shapes, (n_batch, n_head, m))
    )


def unite_rows_ref(idx: torch.Tensor, counts: torch.Tensor, n_kv_head: int) -> list[list[int]]:
    """Plain Python: the distinct rows of each kv head (B G lists), by first appearance."""
    lists = idx.flatten(0, 1).tolist()
    sizes = counts.flatten().tolist()
    group = idx.shape[1] // n_kv_head
    united = []
    for start in range(0, len(lists), group):
        rows = [lists[i][: sizes[i]] for i in range(start, start + group)]
        united.append(list(dict.fromkeys(row for part in rows for row in part)))
    return united


@triton.jit
def _unite_rows_kernel(
    idx_ptr, counts_ptr, seen_ptr, rows_ptr, union_counts_ptr, places_ptr, m, stride_sb, stride_sg,
    n_kv_head, stride_ib, stride_iu, GROUP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program a kv head takes its lists one after another; a row that it has seen has its place
    in ``seen``, all others -1 there, before and after."""
    unit = tl.program_id(0).to(tl.int64)
    b, g = unit // n_kv_head, unit % n_kv_head
    seen_at = seen_ptr + b * stride_sb + g * stride_sg
    lane = tl.arange(0, BLOCK)
    total = 0
    for t in range(GROUP):
        count = tl.load(counts_ptr + unit * GROUP + t)
        idx_at = idx_ptr + b * stride_ib + (g * GROUP + t) * stride_iu
        for start in range(0, count, BLOCK):
            j = start + lane
            row = tl.load(idx_at + j, mask=j < count, other=0)
            place = tl.load(seen_at + row, mask=j < count, other=0)
            is_new = ((j < count) & (place < 0)).to(tl.int32)
            place = tl.where(is_new > 0, total + tl.cumsum(is_new, 0) - 1, place)
            tl.store(seen_at + row, place, mask=is_new > 0)
            tl.store(rows_ptr + unit * (GROUP * m) + place, row, mask=is_new > 0)
            tl.store(places_ptr + (unit * GROUP + t) * m + j, place, mask=j < count)
            total += tl.sum(is_new, 0)
            tl.debug_barrier()  # the next list must find these rows
    tl.store(union_counts_ptr + unit, total)
    for start in range(0, total, BLOCK):
        j = start + lane
        row = tl.load(rows_ptr + unit * (GROUP * m) + j, mask=j < total, other=0)
        tl.store(seen_at + row, tl.full([BLOCK], -1, tl.int32), mask=j < total)


def unite_rows(
    idx: torch.Tensor, counts: torch.Tensor, seen: torch.Tensor, out: Union | None = None
) -> Union:
    """The rows that the heads of each kv head have chosen, once each, by first appearance.

    idx int32 (B, H, >= m), no row twice in a list, counts int32 (B, H). seen int32
    (B, G, capacity): scratch, -1 everywhere before and after.
    """
    n_batch, n_head, m = idx.shape
    device, n_kv_head = idx.device, seen.shape[1]
    check("idx", idx, torch.int32, (None, None, None), device, strided=True)
    check("counts", counts, torch.int32, (n_batch, n_head), device)
    check("seen", seen, torch.int32, (n_batch, None, None), device, strided=True)
    group = n_head // n_kv_head
    if out is None:
        out = empty_union(n_batch, n_head, n_kv_head, m, device)
    check("out.rows", out.rows, torch.int32, (n_batch, n_kv_head, group * m), device)
    check("out.counts", out.counts, torch.int32, (n_batch, n_kv_head), device)
    check("out.places", out.places, torch.int32, (n_batch, n_head, m), device)
    _unite_rows_kernel[(n_batch * n_kv_head,)](
        idx, counts, seen, out.rows, out.counts, out.places, m, *seen.stride()[:2], n_kv_head,
        *idx.stride()[:2], GROUP=group, BLOCK=min(1024, max(32, triton.next_power_of_2(m))),
        num_warps=4,
    )  # fmt: skip
    return out


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
    check_on_host("rest", rest, (n_batch, n_kv_head, None, n_rest))
    check_on_host("v", v, (n_batch, n_kv_head, None, d_v))
    check("pos", pos, torch.int32, (n_batch,), device)
    _append_rest_kernel[(n_batch, n_kv_head)](
        k_new, v_new, dims, rest, v, pos, n_kv_head, d, n_rest, d_v, dims.stride(0),
        *rest.stride()[:3], *v.stride()[:3], BLOCK=triton.next_power_of_2(max(n_rest, d_v, 1)),
        num_warps=1,
    )  # fmt: skip


def check_on_host(name: str, x: torch.Tensor, shape: tuple[int | None, ...]) -> None:
    """ValueError unless ``x`` is f16 host memory that a device reaches, if there is a device."""
    check(name, x, torch.float16, shape, torch.device("cpu"), strided=True)
    if torch.cuda.is_available() and not x.is_pinned():
        raise ValueError(f"{name} is pageable: expected pinned memory")


@triton.jit
def _gather_split_kernel(
    rows_ptr, counts_ptr, dom_ptr, rest_ptr, v_ptr, k_out_ptr, v_out_ptr, n_kv_head, room,
    stride_db, stride_dg, stride_dc, stride_rb, stride_rg, stride_rn, stride_vb, stride_vg,
    stride_vn, C: tl.constexpr, N_REST: tl.constexpr, D_V: tl.constexpr, BLOCK_C: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    unit = tl.program_id(1).to(tl.int64)
    b, g = unit // n_kv_head, unit % n_kv_head
    count = tl.load(counts_ptr + unit)
    j = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_row = (j < count)[:, None]
    row = tl.load(rows_ptr + unit * room + j, mask=j < count, other=0).to(tl.int64)[:, None]
    c_r, c_v = tl.arange(0, BLOCK_R)[None, :], tl.arange(0, BLOCK_V)[None, :]
    rest_at = rest_ptr + b * stride_rb + g * stride_rg
    v_at = v_ptr + b * stride_vb + g * stride_vg
    # From the host, asked for first: what comes from there takes longest.
    rest = tl.load(rest_at + row * stride_rn + c_r, mask=is_row & (c_r < N_REST), other=0.0)
    v = tl.load(v_at + row * stride_vn + c_v, mask=is_row & (c_v < D_V), other=0.0)
    c = tl.arange(0, BLOCK_C)[None, :]
    dom_at = dom_ptr + b * stride_db + g * stride_dg + c.to(tl.int64) * stride_dc
    dom = tl.load(dom_at + row, mask=is_row & (c < C), other=0.0)
    k_out = k_out_ptr + (unit * room + j)[:, None] * (C + N_REST)
    tl.store(k_out + c, dom, mask=is_row & (c < C))
    tl.store(k_out + C + c_r, rest, mask=is_row & (c_r < N_REST))
    tl.store(v_out_ptr + (unit * room + j)[:, None] * D_V + c_v, v, mask=is_row & (c_v < D_V))


def gather_split_rows(
    union: Union,
    dom: torch.Tensor,
    rest: torch.Tensor,
    v: torch.Tensor,
    k_out: torch.Tensor,
    v_out: torch.Tensor,
) -> None:
    """K (dominant dims first) and V of the united rows, row by row, on the device.

    dom f16 (B, G, C, capacity) on the device; rest f16 (B, G, capacity, d_rest) and v f16
    (B, G, capacity, d_v) in pinned memory of the host; k_out f16 (B, G, group m, C + d_rest),
    v_out f16 (B, G, group m, d_v).
    """
    n_batch, n_kv_head, room = union.rows.shape
    n_dim, n_rest, d_v, device = dom.shape[2], rest.shape[3], v.shape[3], dom.device
    check("dom", dom, torch.float16, (n_batch, n_kv_head, n_dim, None), device, strided=True)
    check_on_host("rest", rest, (n_batch, n_kv_head, None, n_rest))
    check_on_host("v", v, (n_batch, n_kv_head, None, d_v))
    check("k_out", k_out, torch.float16, (n_batch, n_kv_head, room, n_dim + n_rest), device)
    check("v_out", v_out, torch.float16, (n_batch, n_kv_head, room, d_v), device)
    _gather_split_kernel[(triton.cdiv(room, GATHERED), n_batch * n_kv_head)](
        union.rows, union.counts, dom, rest, v, k_out, v_out, n_kv_head, room, *dom.stride()[:3],
        *rest.stride()[:3], *v.stride()[:3], C=n_dim, N_REST=n_rest, D_V=d_v,
        BLOCK_C=triton.next_power_of_2(n_dim), BLOCK_R=triton.next_power_of_2(max(1, n_rest)),
        BLOCK_V=triton.next_power_of_2(d_v), BLOCK=GATHERED, num_warps=4,
    )  # fmt: skip
