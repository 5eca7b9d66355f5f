"""Decode attention over a KV cache on the GPU: all rows, or rows listed by index.

The keys of a sequence are split between programs, because a few sequences do not fill a GPU. The
pieces are merged by their log-sum-exp. A program takes all query heads that share its rows, padded
to the 16 rows of a tensor-core tile. So a row is read once. Queries are f32 and enter the dot
product as two f16 halves. One half alone would lose three digits of the scores.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from sparsekv_cli.kernels.attention.arrivals import arrive_last, check_arrived
from sparsekv_cli.kernels.attention.merge import merge, merge_row
from sparsekv_cli.kernels.attention.rows import (
    NewRow,
    check_new,
    check_rows,
    load_rows,
    row_elements,
    store_row,
)
from sparsekv_cli.kernels.attention.softmax import RingWindow, ScoreSoftmax, scaled, softmax_of
from sparsekv_cli.kernels.checks import check

QUERY_TYPES = (torch.float32, torch.float16, torch.bfloat16)
PROGRAMS = 792  # target: six on each of 132 multiprocessors, so that none idles at the end
TILE = 16  # fewest rows of a tile for tensor cores
MERGED = 128  # most pieces of the heads of a list that its last program merges


class Attended(NamedTuple):
    """Attention over some rows. ``out`` is undefined where ``lse`` is -inf."""

    out: torch.Tensor  # f32 (B, H, d_v)
    lse: torch.Tensor  # f32 (B, H)


class AttendScratch(NamedTuple):
    """The pieces of a call's S splits."""

    out: torch.Tensor  # f32 (S, B, H, d_v)
    lse: torch.Tensor  # f32 (S, B, H)


def _tiling(n_list: int, n_max: int, width: int) -> tuple[int, int]:
    """Returns the rows of a tile, and the splits of a list of at most n_max rows.

    n_list: lists of all sequences. width: padded head size. Short lists get smaller tiles, not
    fewer programs.
    """
    largest = 64 if width <= 128 else 32
    block = largest if n_list * triton.cdiv(n_max, largest) >= PROGRAMS // 3 else 32
    return block, max(1, min(triton.cdiv(n_max, block), triton.cdiv(PROGRAMS, n_list)))


def _width(d: int, d_v: int) -> int:
    return max(triton.next_power_of_2(max(d, d_v)), TILE)


def count_splits(n_batch: int, n_list: int, d: int, d_v: int, n_max: int) -> int:
    """Returns the splits of ``attend_dense`` (n_list = G) or ``attend_rows`` (n_list = U)."""
    return _tiling(n_batch * n_list, n_max, _width(d, d_v))[1]


def attend_scratch(
    n_batch: int, n_head: int, n_list: int, d: int, d_v: int, n_max: int, device: torch.device
) -> AttendScratch:
    """Allocates memory for ``attend_dense`` (n_list = G) or ``attend_rows`` (n_list = U)."""
    n_split = count_splits(n_batch, n_list, d, d_v, n_max)
    return AttendScratch(
        torch.empty(n_split, n_batch, n_head, d_v, dtype=torch.float32, device=device),
        torch.empty(n_split, n_batch, n_head, dtype=torch.float32, device=device),
    )


@triton.jit(do_not_specialize=["n_split"])
def _attend_kernel(
    q_ptr, k_ptr, v_ptr, idx_ptr, n_ptr, seen_ptr, seen_lse_ptr, k_new_ptr, v_new_ptr, sinks_ptr,
    out_ptr, lse_ptr, arrived_ptr, merged_ptr, scale, softcap, window, n_slot, n_head, n_list,
    n_split, stride_kb, stride_kg, stride_kn, stride_vb, stride_vg, stride_vn, stride_ib,
    stride_iu,
    GROUP: tl.constexpr, HEADS: tl.constexpr, TILE_H: tl.constexpr, D: tl.constexpr,
    D_V: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_N: tl.constexpr,
    GATHER: tl.constexpr, HALVES: tl.constexpr, HAS_OTHERS: tl.constexpr, HAS_NEW: tl.constexpr,
    HAS_LSE: tl.constexpr, CAPPED: tl.constexpr, SINKS: tl.constexpr, WINDOW: tl.constexpr,
    MERGES: tl.constexpr,
):  # fmt: skip
    """HAS_NEW: the step gives the last row. The first split attends to it and stores it.

    MERGES: the last program of a list merges the pieces of its heads.
    """
    split, unit = tl.program_id(0), tl.program_id(1)
    b, u = (unit // n_list).to(tl.int64), unit % n_list
    n = tl.load(n_ptr + (unit if GATHER else b)) - HAS_NEW
    begin = 0
    if WINDOW:
        begin = tl.maximum(n + HAS_NEW - window, 0)
    chunk = tl.cdiv(tl.cdiv(n - begin, n_split), BLOCK_N) * BLOCK_N
    first = begin + split * chunk
    last = tl.minimum(first + chunk, n)
    t = tl.arange(0, TILE_H)
    head = u * HEADS + t
    is_head = t < HEADS
    n_row = b * n_head + head  # of out, without the splits
    piece = split.to(tl.int64) * tl.num_programs(1) * HEADS + n_row
    c, c_v = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_V)
    q = tl.load(
        q_ptr + n_row[:, None] * D + c[None, :], mask=is_head[:, None] & (c < D)[None, :], other=0.0
    )
    q_high = q.to(tl.float16)
    q_low = (q.to(tl.float32) - q_high.to(tl.float32)).to(tl.float16)
    peak = tl.full([TILE_H], float("-inf"), tl.float32)
    mass = tl.zeros([TILE_H], tl.float32)
    acc = tl.zeros([TILE_H, BLOCK_V], tl.float32)
    if SINKS:  # they are in the first split
        is_first = t < tl.where(split == 0, HEADS, 0)
        peak = tl.load(sinks_ptr + head, mask=is_first, other=float("-inf")) * 1.4426950408889634
        mass = is_first.to(tl.float32)
    if HAS_OTHERS:  # the first split starts from the attention over the other rows
        is_first = t < tl.where(split == 0, HEADS, 0)
        seen = tl.load(seen_lse_ptr + n_row, mask=is_first, other=float("-inf"))
        seen *= 1.4426950408889634
        share = (seen > float("-inf")).to(tl.float32)
        acc = tl.load(
            seen_ptr + n_row[:, None] * D_V + c_v[None, :],
            mask=(share > 0)[:, None] & (c_v < D_V)[None, :], other=0.0,
        )  # fmt: skip
        if SINKS:
            sink = peak
            peak = tl.maximum(sink, seen)
            safe = tl.where(peak > float("-inf"), peak, 0.0)
            share = tl.exp2(seen - safe)
            mass = mass * tl.exp2(sink - safe) + share
            acc *= share[:, None]
        else:
            peak, mass = seen, share
    kv_head = (u * HEADS // GROUP).to(tl.int64)
    k_at = k_ptr + b * stride_kb + kv_head * stride_kg
    v_at = v_ptr + b * stride_vb + kv_head * stride_vg
    if HAS_NEW:  # noqa: SIM102 - decided when the kernel is compiled
        if split == 0:
            slot = n.to(tl.int64)
            if WINDOW:
                slot %= n_slot
            k_row = store_row(k_new_ptr + unit * D, k_at + slot * stride_kn, c, D)
            v_row = store_row(v_new_ptr + unit * D_V, v_at + slot * stride_vn, c_v, D_V)
            product = tl.sum(q.to(tl.float32) * k_row.to(tl.float32)[None, :], 1)
            score = scaled(product, scale, softcap, CAPPED)
            if SINKS:
                sink = peak
                peak = tl.maximum(sink, score)
                share = tl.exp2(score - peak)
                mass = tl.exp2(sink - peak) + share
                acc += v_row.to(tl.float32)[None, :] * share[:, None]
            else:
                peak = score
                mass += 1.0
                acc += v_row.to(tl.float32)[None, :]
    for start in range(first, last, BLOCK_N):
        j = start + tl.arange(0, BLOCK_N)
        is_row = j < last
        row = j
        if GATHER:
            row = tl.load(idx_ptr + b * stride_ib + u * stride_iu + j, mask=is_row, other=0)
        if WINDOW:
            row = j % n_slot
        row = row.to(tl.int64)
        k = load_rows(k_at + row * stride_kn, is_row, D, BLOCK_D)
        v = load_rows(v_at + row * stride_vn, is_row, D_V, BLOCK_V)
        scores = tl.dot(q_high, tl.trans(k))
        if HALVES:
            scores = tl.dot(q_low, tl.trans(k), acc=scores)
        scores = scaled(scores, scale, softcap, CAPPED)
        scores = tl.where(is_row[None, :], scores, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(scores, 1))
        old = tl.exp2(peak - new_peak)
        p = tl.exp2(scores - new_peak[:, None])
        mass = mass * old + tl.sum(p, 1)
        acc = tl.dot(p.to(tl.float16), v, acc=acc * old[:, None])
        peak = new_peak
    safe = tl.where(mass > 0, mass, 1.0)
    acc = acc / safe[:, None]
    if HAS_LSE:
        lse = (peak + tl.log2(safe)) * 0.6931471805599453  # -inf without rows, because peak is
        tl.store(lse_ptr + piece, lse, mask=is_head)
    tl.store(
        out_ptr + piece[:, None] * D_V + c_v[None, :], acc,
        mask=is_head[:, None] & (c_v < D_V)[None, :],
    )  # fmt: skip
    if MERGES:  # noqa: SIM102 - decided when the kernel is compiled
        if arrive_last(arrived_ptr + unit, n_split):
            n_rows = tl.num_programs(1) * HEADS
            for i in range(HEADS):
                row = b * n_head + u * HEADS + i
                merge_row(out_ptr, lse_ptr, merged_ptr, n_split, n_rows, row, c_v, D_V, TILE_H)


def attend_dense(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    n: torch.Tensor,
    n_max: int,
    softmax: ScoreSoftmax | float,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    scratch: AttendScratch | None = None,
    others: Attended | None = None,
    new: NewRow | None = None,
    window: RingWindow | None = None,
) -> torch.Tensor:
    """Computes attention of one token a sequence over rows 0..n[b] of a kv head: f32 (B, H, d_v).

    q (B, H, d); k, v: rows of d and d_v elements (rows.py), (B, G, capacity) of any strides; n
    int32 (B,), n_max >= all of them. lse f32 (B, H), if given, is set to the log of the sum of
    exponentials of a head's scores. ``merge`` needs it to join results of disjoint rows. others:
    attention over other rows, which the result includes; ignored where its lse is -inf. new: the
    last row of each sequence, which is written to k and v; not with ``others``. softmax: or its
    scale alone. window: of the rows; then n_max counts rows of it.
    """
    check("n", n, torch.int32, (q.shape[0],), q.device)
    assert new is None or others is None
    rows = _Rows(None, n, k.shape[1], n_max, window)
    return _attend(q, k, v, rows, softmax, out, lse, scratch, others, new)


class _Rows(NamedTuple):
    """The rows of a call: all or a window (idx None), or n_list lists of at most n_max rows."""

    idx: torch.Tensor | None
    n: torch.Tensor
    n_list: int
    n_max: int
    window: RingWindow | None = None


def attend_rows(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    idx: torch.Tensor,
    counts: torch.Tensor,
    softmax: ScoreSoftmax | float,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    scratch: AttendScratch | None = None,
    arrived: torch.Tensor | None = None,
) -> torch.Tensor:
    """Computes attention over the first counts int32 (B, U) rows of each list idx int32 (B, U, m).

    U is the number of lists: H (one a query head) or G (one a kv head, shared by its group). Other
    arguments: see ``attend_dense``. A list without rows gives 0, and -inf as its lse. arrived:
    ``none_arrived`` of U lists, as every launch leaves it. With it, few pieces are merged in the
    launch that makes them; not with ``lse``.
    """
    assert arrived is None or lse is None
    rows = _listed(q, k, idx, counts)
    return _attend(q, k, v, rows, softmax, out, lse, scratch, arrived=arrived)


def attend_pieces(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    idx: torch.Tensor,
    counts: torch.Tensor,
    softmax: ScoreSoftmax | float,
    out: AttendScratch,
) -> None:
    """Computes ``attend_rows`` in ``count_splits`` pieces, for ``merge`` with other pieces."""
    _launch_attend(q, k, v, _listed(q, k, idx, counts), softmax, *out)


def _listed(q: torch.Tensor, k: torch.Tensor, idx: torch.Tensor, counts: torch.Tensor) -> _Rows:
    n_batch, n_list, n_max = idx.shape
    check("idx", idx, torch.int32, (n_batch, n_list, n_max), q.device, strided=True)
    check("counts", counts, torch.int32, (n_batch, n_list), q.device)
    if n_list not in (q.shape[1], k.shape[1]):
        raise ValueError(f"idx has {n_list} lists: expected {q.shape[1]} or {k.shape[1]}")
    return _Rows(idx, counts, n_list, n_max)


def _attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    rows: _Rows,
    softmax: ScoreSoftmax | float,
    out: torch.Tensor | None,
    lse: torch.Tensor | None,
    scratch: AttendScratch | None,
    others: Attended | None = None,
    new: NewRow | None = None,
    arrived: torch.Tensor | None = None,
) -> torch.Tensor:
    (n_batch, n_head, d), d_v, device = q.shape, row_elements(v), q.device
    if out is None:
        out = torch.empty(n_batch, n_head, d_v, dtype=torch.float32, device=device)
    check("out", out, torch.float32, (n_batch, n_head, d_v), device)
    if lse is not None:
        check("lse", lse, torch.float32, (n_batch, n_head), device)
    n_list, n_max = rows.n_list, rows.n_max
    n_split = count_splits(n_batch, n_list, d, d_v, n_max)
    if n_split == 1:
        pieces_lse = None if lse is None else lse[None]
        _launch_attend(q, k, v, rows, softmax, out[None], pieces_lse, others, new)
        return out
    if scratch is None:
        scratch = attend_scratch(n_batch, n_head, n_list, d, d_v, n_max, device)
    if arrived is not None and n_split * (n_head // n_list) <= MERGED:
        check_arrived(arrived, n_batch, n_list, device)
        _launch_attend(q, k, v, rows, softmax, *scratch, others, new, (arrived, out))
        return out
    _launch_attend(q, k, v, rows, softmax, *scratch, others, new)
    return merge(*scratch, out, lse)


def _launch_attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    rows: _Rows,
    softmax: ScoreSoftmax | float,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    others: Attended | None = None,
    new: NewRow | None = None,
    merged: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> None:
    """Writes the pieces of all splits: out f32 (S, B, H, d_v), lse f32 (S, B, H).

    merged: counts of arrivals, and f32 (B, H, d_v) for the pieces together.
    """
    (n_batch, n_head, d), (idx, n, n_list, n_max, window) = q.shape, rows
    n_kv_head, d_v, device = k.shape[1], row_elements(v), q.device
    softmax = softmax_of(softmax, n_head, device)
    check("q", q, QUERY_TYPES, (None, None, None), device)
    check_rows("k", k, (n_batch, n_kv_head, None), d, device)
    check_rows("v", v, (n_batch, n_kv_head, k.shape[2]), d_v, device)
    if n_head % n_kv_head:
        raise ValueError(f"q has {n_head} heads: expected a multiple of k's {n_kv_head}")
    if others is not None:
        check("others.out", others.out, torch.float32, (n_batch, n_head, d_v), device)
        check("others.lse", others.lse, torch.float32, (n_batch, n_head), device)
    if new is not None:
        check_new(new, k, v, d)
    block, n_split = _tiling(n_batch * n_list, n_max, _width(d, d_v))
    check("scratch.out", out, torch.float32, (n_split, n_batch, n_head, d_v), device)
    if lse is not None:
        check("scratch.lse", lse, torch.float32, (n_split, n_batch, n_head), device)
    _attend_kernel[(n_split, n_batch * n_list)](
        q, k, v, idx, n, *(others or (None, None)), *(new or (None, None)), softmax.sinks, out,
        lse, *(merged or (None, None)), softmax.scale, softmax.softcap, *(window or (0, 0)), n_head,
        n_list, n_split,
        *k.stride()[:3], *v.stride()[:3], *((0, 0) if idx is None else idx.stride()[:2]),
        GROUP=n_head // n_kv_head, HEADS=n_head // n_list,
        TILE_H=max(TILE, triton.next_power_of_2(n_head // n_list)), D=d, D_V=d_v,
        BLOCK_D=_width(d, d), BLOCK_V=_width(d_v, d_v), BLOCK_N=block, GATHER=idx is not None,
        HALVES=q.dtype != torch.float16, HAS_OTHERS=others is not None, HAS_NEW=new is not None,
        HAS_LSE=lse is not None, CAPPED=softmax.softcap > 0,
        SINKS=softmax.sinks is not None, WINDOW=window is not None, MERGES=merged is not None,
        # Row numbers must arrive before rows can be loaded. So a list needs more stages.
        num_warps=4, num_stages=3 if idx is None else 5,
    )  # fmt: skip
