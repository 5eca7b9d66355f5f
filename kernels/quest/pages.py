"""Pages of the KV cache on the GPU: summaries, and scores pooled over a group of heads.

cpu/quest/pages.py says what a summary and its score are. The scores of a group's heads are pooled
into one a kv head: their largest (Quest), or the mean of their softmax over all candidates
(FreeKV).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from sparsekv_cli.kernels.attention.decode import (
    QUERY_TYPES,
    TILE,
    NewRow,
    _tiling,
    _width,
    check_new,
    store_row,
)
from sparsekv_cli.kernels.checks import check


@triton.jit
def summarise_rows(
    at, stride_n, c, is_channel, first, count, MEANSTD: tl.constexpr
):  # rows first..count - 1 at ``at`` -> high, low f32 (BLOCK_D,)
    """As in cpu/quest/pages.py, with sums in the same order, so that roundings agree."""
    size = (count - first).to(tl.float32)
    row = tl.load(at + first * stride_n + c, mask=is_channel, other=0.0).to(tl.float32)
    high, low = row, row
    if MEANSTD:
        for r in range(first + 1, count):
            high += tl.load(at + r * stride_n + c, mask=is_channel, other=0.0).to(tl.float32)
        mean = high * (1 / size)
        squares = tl.zeros_like(mean)
        for r in range(first, count):
            row = tl.load(at + r * stride_n + c, mask=is_channel, other=0.0).to(tl.float32)
            squares = tl.fma(row - mean, row - mean, squares)
        std = tl.sqrt(squares * (1 / size))
        high, low = mean + std, mean - std
    else:
        for r in range(first + 1, count):
            row = tl.load(at + r * stride_n + c, mask=is_channel, other=0.0).to(tl.float32)
            high, low = tl.maximum(high, row), tl.minimum(low, row)
    return high, low


@triton.jit
def _summarise_page(
    k_at, stride_kn, hi_at, lo_at, j, n_sinks,
    PAGE: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, MEANSTD: tl.constexpr,
):  # fmt: skip
    """Writes the summary of page j of the rows at ``k_at`` to ``hi_at`` and ``lo_at``."""
    c = tl.arange(0, BLOCK_D)
    skipped = tl.where(j == 0, n_sinks, 0)
    first_row = k_at + j.to(tl.int64) * PAGE * stride_kn
    high, low = summarise_rows(first_row, stride_kn, c, c < D, skipped, PAGE, MEANSTD)
    tl.store(hi_at + c, high.to(tl.float16), mask=c < D)
    tl.store(lo_at + c, low.to(tl.float16), mask=c < D)


@triton.jit(do_not_specialize=["first_page"])
def _page_summaries_kernel(
    k_ptr, hi_ptr, lo_ptr, first_page, n_sinks, n_kv_head,
    stride_kb, stride_kg, stride_kn, stride_hb, stride_hg, stride_hn,
    PAGE: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, MEANSTD: tl.constexpr,
):  # fmt: skip
    unit = tl.program_id(1)
    b, g = (unit // n_kv_head).to(tl.int64), (unit % n_kv_head).to(tl.int64)
    j = first_page + tl.program_id(0)
    k_at = k_ptr + b * stride_kb + g * stride_kg
    at = b * stride_hb + g * stride_hg + j.to(tl.int64) * stride_hn
    _summarise_page(
        k_at, stride_kn, hi_ptr + at, lo_ptr + at, j, n_sinks, PAGE, D, BLOCK_D, MEANSTD
    )


def page_summaries(
    k: torch.Tensor,
    hi: torch.Tensor,
    lo: torch.Tensor,
    page: int,
    meanstd: bool,
    first_page: int,
    last_page: int,
    n_sinks: int = 0,
) -> None:
    """Writes hi, lo f16 (B, G, >= last_page, d) of the whole pages first_page..last_page - 1.

    k f16 (B, G, capacity, d), any strides of rows. n_sinks < page: rows of page 0 that are left out
    of its summary, because they are attended anyway and would stretch it.
    """
    _check_summaries(k, hi, lo, page, last_page, n_sinks)
    if last_page * page > k.shape[2]:
        raise ValueError(f"last_page = {last_page}: k has {k.shape[2]} rows")
    n_batch, n_kv_head, _, d = k.shape
    if last_page > first_page:
        _page_summaries_kernel[(last_page - first_page, n_batch * n_kv_head)](
            k, hi, lo, first_page, n_sinks, n_kv_head, *k.stride()[:3], *hi.stride()[:3],
            PAGE=page, D=d, BLOCK_D=_width(d, d), MEANSTD=meanstd, num_warps=1,
        )  # fmt: skip


def _check_summaries(
    k: torch.Tensor, hi: torch.Tensor, lo: torch.Tensor, page: int, n_page: int, n_sinks: int
) -> None:
    check("k", k, torch.float16, (None, None, None, None), k.device, strided=True)
    n_batch, n_kv_head, _, d = k.shape
    check("hi", hi, torch.float16, (n_batch, n_kv_head, None, d), k.device, strided=True)
    check("lo", lo, torch.float16, tuple(hi.shape), k.device, strided=True)
    if hi.stride() != lo.stride():
        raise ValueError(f"lo has strides {lo.stride()}: expected hi's, {hi.stride()}")
    if hi.shape[2] < n_page:
        raise ValueError(f"hi has room for {hi.shape[2]} pages: expected {n_page}")
    if not 0 <= n_sinks < page:
        raise ValueError(f"n_sinks = {n_sinks}: expected 0 to page - 1 = {page - 1}")


@triton.jit
def _halves(q):
    """f32 as the sum of two f16."""
    high = q.to(tl.float16)
    return high, (q - high.to(tl.float32)).to(tl.float16)


@triton.jit(do_not_specialize=["n_split"])
def _page_scores_kernel(
    q_ptr, hi_ptr, lo_ptr, n_ptr, budget_ptr, wanted_ptr, out_ptr, peak_ptr, mass_ptr, n_page_ptr,
    n_best_ptr, k_new_ptr, v_new_ptr, k_ptr, v_ptr, scale, first, recent, reserved, least, n_sinks,
    n_kv_head, n_split, stride_hb, stride_hg, stride_hn, stride_ob, stride_oh,
    stride_kb, stride_kg, stride_kn, stride_vb, stride_vg, stride_vn,
    PAGE: tl.constexpr, GROUP: tl.constexpr, TILE_H: tl.constexpr, D: tl.constexpr,
    D_V: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_N: tl.constexpr,
    SOFTMAX: tl.constexpr, SOME: tl.constexpr, HAS_NEW: tl.constexpr, MEANSTD: tl.constexpr,
):  # fmt: skip
    """SOFTMAX: each head's scores, with peak and mass of their softmax over the split.

    Otherwise the largest score of a group. HAS_NEW: stores the row that comes from the step, too,
    and the summary of the page that it completes, which is no candidate yet.
    """
    split, unit = tl.program_id(0), tl.program_id(1)
    b, g = (unit // n_kv_head).to(tl.int64), (unit % n_kv_head).to(tl.int64)
    n = tl.load(n_ptr + b)
    end = (n - recent) // PAGE
    n_page = tl.maximum(end - first, 0)
    if (split == 0) & (g == 0):
        kept = tl.where(reserved < 0, n - end * PAGE, reserved)
        n_best = tl.maximum((tl.load(budget_ptr + b) - kept) // PAGE, least)
        tl.store(n_page_ptr + b, n_page)
        tl.store(n_best_ptr + b, n_best)
    if HAS_NEW:  # noqa: SIM102 - decided when the kernel is compiled
        if split == 0:
            row = (n - 1).to(tl.int64)
            k_at = k_ptr + b * stride_kb + g * stride_kg
            v_at = v_ptr + b * stride_vb + g * stride_vg + row * stride_vn
            store_row(k_new_ptr + unit * D, k_at + row * stride_kn, tl.arange(0, BLOCK_D), D)
            store_row(v_new_ptr + unit * D_V, v_at, tl.arange(0, BLOCK_V), D_V)
            if n % PAGE == 0:
                tl.debug_barrier()  # the summary reads what other threads have stored
                whole = n // PAGE - 1
                to = b * stride_hb + g * stride_hg + whole.to(tl.int64) * stride_hn
                _summarise_page(
                    k_at, stride_kn, hi_ptr + to, lo_ptr + to, whole, n_sinks, PAGE, D, BLOCK_D,
                    MEANSTD,
                )  # fmt: skip
    if SOME:
        n_page = tl.where(tl.load(wanted_ptr + unit) > 0, n_page, 0)
    chunk = tl.cdiv(tl.cdiv(n_page, n_split), BLOCK_N) * BLOCK_N
    last = tl.minimum((split + 1) * chunk, n_page)
    t, c = tl.arange(0, TILE_H), tl.arange(0, BLOCK_D)
    head = unit.to(tl.int64) * GROUP + t
    q = tl.load(
        q_ptr + head[:, None] * D + c[None, :],
        mask=(t < GROUP)[:, None] & (c < D)[None, :], other=0.0,
    ).to(tl.float32)  # fmt: skip
    up_high, up_low = _halves(tl.maximum(q, 0.0))
    down_high, down_low = _halves(tl.minimum(q, 0.0))
    at = b * stride_hb + g * stride_hg + first * stride_hn
    peak = tl.full([TILE_H], float("-inf"), tl.float32)
    mass = tl.zeros([TILE_H], tl.float32)
    for start in range(split * chunk, last, BLOCK_N):
        j = start + tl.arange(0, BLOCK_N)
        place = at + j.to(tl.int64)[:, None] * stride_hn + c[None, :]
        is_page = (j < last)[:, None] & (c < D)[None, :]
        hi = tl.load(hi_ptr + place, mask=is_page, other=0.0)
        lo = tl.load(lo_ptr + place, mask=is_page, other=0.0)
        scores = tl.dot(up_high, tl.trans(hi))
        scores = tl.dot(up_low, tl.trans(hi), acc=scores)
        scores = tl.dot(down_high, tl.trans(lo), acc=scores)
        scores = tl.dot(down_low, tl.trans(lo), acc=scores) * scale
        if SOFTMAX:
            out_at = out_ptr + b * stride_ob + (g * GROUP + t)[:, None] * stride_oh + j[None, :]
            tl.store(out_at, scores, mask=(t < GROUP)[:, None] & (j < last)[None, :])
            scores = tl.where((j < last)[None, :], scores, float("-inf"))
            new_peak = tl.maximum(peak, tl.max(scores, 1))
            p = tl.exp2((scores - new_peak[:, None]) * 1.4426950408889634)
            mass = mass * tl.exp2((peak - new_peak) * 1.4426950408889634) + tl.sum(p, 1)
            peak = new_peak
        else:
            best = tl.max(tl.where((t < GROUP)[:, None], scores, float("-inf")), 0)
            tl.store(out_ptr + b * stride_ob + g * stride_oh + j, best, mask=j < last)
    if SOFTMAX:
        piece = (split * tl.num_programs(1) + unit) * GROUP + t
        tl.store(peak_ptr + piece, peak, mask=t < GROUP)
        tl.store(mass_ptr + piece, mass, mask=t < GROUP)


@triton.jit(do_not_specialize=["n_split"])
def _pool_softmax_kernel(
    scores_ptr, peak_ptr, mass_ptr, n_page_ptr, wanted_ptr, out_ptr, n_kv_head, n_split,
    stride_sb, stride_sh, stride_ob, stride_og,
    GROUP: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_N: tl.constexpr, SOME: tl.constexpr,
):  # fmt: skip
    chunk, unit = tl.program_id(0), tl.program_id(1)
    b, g = (unit // n_kv_head).to(tl.int64), (unit % n_kv_head).to(tl.int64)
    n_page = tl.load(n_page_ptr + b)
    if SOME:
        n_page = tl.where(tl.load(wanted_ptr + unit) > 0, n_page, 0)
    j = chunk * BLOCK_N + tl.arange(0, BLOCK_N)
    s = tl.arange(0, BLOCK_S)
    pooled = tl.zeros([BLOCK_N], tl.float32)
    if chunk * BLOCK_N < n_page:
        for t in tl.static_range(GROUP):
            head = g * GROUP + t
            at = s * tl.num_programs(1) * GROUP + unit * GROUP + t
            peaks = tl.load(peak_ptr + at, mask=s < n_split, other=float("-inf"))
            masses = tl.load(mass_ptr + at, mask=s < n_split, other=0.0)
            peak = tl.max(peaks, 0)
            mass = tl.sum(masses * tl.exp2((peaks - peak) * 1.4426950408889634), 0)
            scores = tl.load(
                scores_ptr + b * stride_sb + head * stride_sh + j, mask=j < n_page,
                other=float("-inf"),
            )  # fmt: skip
            pooled += tl.exp2((scores - peak) * 1.4426950408889634) / (mass * GROUP)
        tl.store(out_ptr + b * stride_ob + g * stride_og + j, pooled, mask=j < n_page)


class PooledPages(NamedTuple):
    """Candidates of B sequences, and how many of them a kv head takes."""

    scores: torch.Tensor  # f32 (B, G, n_page_max), of the pages from the first candidate on
    n_page: torch.Tensor  # int32 (B,): candidates
    n_best: torch.Tensor  # int32 (B,)


class PageScratch(NamedTuple):
    """What ``pool_pages`` leaves for its second launch: S splits. Nothing but for softmax."""

    scores: torch.Tensor  # f32 (B, H, n_page_max)
    peak: torch.Tensor  # f32 (S, B, H)
    mass: torch.Tensor  # f32 (S, B, H)


def page_scratch(
    n_batch: int, n_head: int, n_kv_head: int, d: int, n_page_max: int, device: torch.device
) -> PageScratch:
    """Memory for ``pool_pages`` with softmax."""
    _, n_split = _tiling(n_batch * n_kv_head, n_page_max, _width(d, d))
    shapes = (n_batch, n_head, n_page_max), (n_split, n_batch, n_head), (n_split, n_batch, n_head)
    return PageScratch(*(torch.empty(s, dtype=torch.float32, device=device) for s in shapes))


def pooled_pages(
    n_batch: int, n_kv_head: int, n_page_max: int, device: torch.device
) -> PooledPages:
    """Memory for the result of ``pool_pages``."""
    n_page, n_best = torch.empty(2, n_batch, dtype=torch.int32, device=device)
    shape = (n_batch, n_kv_head, n_page_max)
    return PooledPages(torch.empty(shape, dtype=torch.float32, device=device), n_page, n_best)


def pool_pages(
    q: torch.Tensor,
    hi: torch.Tensor,
    lo: torch.Tensor,
    n: torch.Tensor,
    budget: torch.Tensor,
    n_page_max: int,
    page: int,
    scale: float,
    *,
    softmax: bool,
    first: int = 0,
    recent: int = 1,
    reserved: int | None = None,
    least: int = 0,
    wanted: torch.Tensor | None = None,
    out: PooledPages | None = None,
    scratch: PageScratch | None = None,
    new: NewRow | None = None,
    into: tuple[torch.Tensor, torch.Tensor] | None = None,
    meanstd: bool = False,
    n_sinks: int = 0,
) -> PooledPages:
    """Scores of the candidates, pooled over each kv head's group, and how many are to be taken.

    A head's score of a page is scale (relu(q) . hi - relu(-q) . lo); pooled is the largest of the
    group, or with ``softmax`` the mean of each head's softmax over the candidates. q (B, H, d); hi,
    lo f16 (B, G, pages, d); n, budget int32 (B,): rows in context, and to attend to. Candidates are
    first..(n - recent) // page - 1, n_page_max of them at most; max(least, (budget - reserved) //
    page) are to be taken. reserved: rows attended beside, by default those behind the candidates.
    wanted int32 (B, G), if given: the kv heads that choose; scores of others are not written. new:
    the last row of each sequence, which is written to the two of ``into``, k f16 (B, G, capacity,
    d) and v (B, G, capacity, d_v); if it completes a page, hi and lo get its summary, as
    ``page_summaries`` makes it with ``meanstd`` and ``n_sinks``.
    """
    n_batch, n_head, d = q.shape
    n_kv_head, device = hi.shape[1], q.device
    check("q", q, QUERY_TYPES, (None, None, None), device)
    check("hi", hi, torch.float16, (n_batch, None, None, d), device, strided=True)
    check("lo", lo, torch.float16, tuple(hi.shape), device, strided=True)
    check("n", n, torch.int32, (n_batch,), device)
    check("budget", budget, torch.int32, (n_batch,), device)
    if wanted is not None:
        check("wanted", wanted, torch.int32, (n_batch, n_kv_head), device)
    if n_head % n_kv_head:
        raise ValueError(f"q has {n_head} heads: expected a multiple of hi's {n_kv_head}")
    if hi.stride() != lo.stride():
        raise ValueError(f"lo has strides {lo.stride()}: expected hi's, {hi.stride()}")
    if new is not None:
        assert into is not None
        check_new(new, *into, d)
        _check_summaries(into[0], hi, lo, page, 0, n_sinks)
    k, v = into or (hi, hi)
    if out is None:
        out = pooled_pages(n_batch, n_kv_head, n_page_max, device)
    check("out.scores", out.scores, torch.float32, (n_batch, n_kv_head, n_page_max), device)
    check("out.n_page", out.n_page, torch.int32, (n_batch,), device)
    check("out.n_best", out.n_best, torch.int32, (n_batch,), device)
    block, n_split = _tiling(n_batch * n_kv_head, n_page_max, _width(d, d))
    scores, peak, mass = out.scores, None, None
    if softmax:
        if scratch is None:
            scratch = page_scratch(n_batch, n_head, n_kv_head, d, n_page_max, device)
        scores, peak, mass = scratch
        check("scratch.scores", scores, torch.float32, (n_batch, n_head, n_page_max), device)
        check("scratch.peak", peak, torch.float32, (n_split, n_batch, n_head), device)
        check("scratch.mass", mass, torch.float32, (n_split, n_batch, n_head), device)
    group = n_head // n_kv_head
    _page_scores_kernel[(n_split, n_batch * n_kv_head)](
        q, hi, lo, n, budget, wanted, scores, peak, mass, out.n_page, out.n_best,
        *(new or (None, None)), k, v, scale, first, recent, -1 if reserved is None else reserved,
        least, n_sinks, n_kv_head, n_split, *hi.stride()[:3], *scores.stride()[:2], *k.stride()[:3],
        *v.stride()[:3],
        PAGE=page, GROUP=group, TILE_H=max(TILE, triton.next_power_of_2(group)), D=d,
        D_V=v.shape[3], BLOCK_D=_width(d, d), BLOCK_V=_width(v.shape[3], v.shape[3]),
        BLOCK_N=block, SOFTMAX=softmax, SOME=wanted is not None, HAS_NEW=new is not None,
        MEANSTD=meanstd, num_warps=4, num_stages=3,
    )  # fmt: skip
    if softmax:
        _pool_softmax_kernel[(triton.cdiv(n_page_max, 256), n_batch * n_kv_head)](
            scores, peak, mass, out.n_page, wanted, out.scores, n_kv_head, n_split,
            *scores.stride()[:2], *out.scores.stride()[:2],
            GROUP=group, BLOCK_S=triton.next_power_of_2(n_split), BLOCK_N=256,
            SOME=wanted is not None, num_warps=2,
        )  # fmt: skip
    return out
