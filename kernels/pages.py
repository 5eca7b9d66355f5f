"""Pages of the KV cache on the GPU: summaries, scores, pooling over a group, and rows of pages.

What a summary and its score are is told in cpu/pages.py. A sequence of n rows has its candidates in
pages first..(n - recent) // page - 1; ``recent`` rows at least are left to a window that is always
attended. The scores of a group's heads are pooled into one a kv head: their largest (Quest), or the
mean of their softmax (FreeKV), which needs every split's peak and mass of a head.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from sparsekv_cli.kernels.attention import QUERY_TYPES, TILE, _tiling, _width
from sparsekv_cli.kernels.checks import check


@triton.jit
def summarise_rows(
    at, stride_n, c, is_channel, first, count, MEANSTD: tl.constexpr
):  # rows first..count - 1 at ``at`` -> high, low f32 (BLOCK_D,)
    """As cpu/pages.py summarise_rows, in the same order of rows, so that roundings agree."""
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


@triton.jit(do_not_specialize=["first_page"])
def _page_summaries_kernel(
    k_ptr, n_ptr, hi_ptr, lo_ptr, first_page, n_sinks, n_kv_head,
    stride_kb, stride_kg, stride_kn, stride_hb, stride_hg, stride_hn,
    PAGE: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, MEANSTD: tl.constexpr,
    STEP: tl.constexpr,
):  # fmt: skip
    unit = tl.program_id(1)
    b, g = (unit // n_kv_head).to(tl.int64), (unit % n_kv_head).to(tl.int64)
    j = first_page + tl.program_id(0)
    if STEP:
        n = tl.load(n_ptr + b)
        j = tl.where((n - 1) % PAGE == 0, (n - 1) // PAGE - 1, -1)
    if j >= 0:
        c = tl.arange(0, BLOCK_D)
        k_at = k_ptr + b * stride_kb + g * stride_kg + j.to(tl.int64) * PAGE * stride_kn
        skipped = tl.where(j == 0, n_sinks, 0)
        high, low = summarise_rows(k_at, stride_kn, c, c < D, skipped, PAGE, MEANSTD)
        at = b * stride_hb + g * stride_hg + j.to(tl.int64) * stride_hn
        tl.store(hi_ptr + at + c, high.to(tl.float16), mask=c < D)
        tl.store(lo_ptr + at + c, low.to(tl.float16), mask=c < D)


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
    if last_page > first_page:
        _summarise(k, None, hi, lo, page, meanstd, first_page, last_page - first_page, n_sinks)


def page_summaries_step(
    k: torch.Tensor,
    n: torch.Tensor,
    hi: torch.Tensor,
    lo: torch.Tensor,
    page: int,
    meanstd: bool,
    n_sinks: int = 0,
) -> None:
    """``page_summaries`` of the one page that n rows make whole, the last row being in the next.

    n int32 (B,), on the device: at most steps there is nothing to do.
    """
    check("n", n, torch.int32, (k.shape[0],), k.device)
    _check_summaries(k, hi, lo, page, 0, n_sinks)
    _summarise(k, n, hi, lo, page, meanstd, 0, 1, n_sinks)


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


def _summarise(
    k: torch.Tensor,
    n: torch.Tensor | None,
    hi: torch.Tensor,
    lo: torch.Tensor,
    page: int,
    meanstd: bool,
    first_page: int,
    n_page: int,
    n_sinks: int,
) -> None:
    n_batch, n_kv_head, _, d = k.shape
    _page_summaries_kernel[(n_page, n_batch * n_kv_head)](
        k, n, hi, lo, first_page, n_sinks, n_kv_head, *k.stride()[:3], *hi.stride()[:3],
        PAGE=page, D=d, BLOCK_D=_width(d, d), MEANSTD=meanstd, STEP=n is not None, num_warps=1,
    )  # fmt: skip


@triton.jit
def _halves(q):
    """f32 as the sum of two f16."""
    high = q.to(tl.float16)
    return high, (q - high.to(tl.float32)).to(tl.float16)


@triton.jit(do_not_specialize=["n_split"])
def _page_scores_kernel(
    q_ptr, hi_ptr, lo_ptr, n_ptr, out_ptr, peak_ptr, mass_ptr, scale, first, recent, n_kv_head,
    n_split, stride_hb, stride_hg, stride_hn, stride_ob, stride_oh,
    PAGE: tl.constexpr, GROUP: tl.constexpr, TILE_H: tl.constexpr, D: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, POOL: tl.constexpr,
):  # fmt: skip
    """POOL: writes the largest of a group's scores, f32 (B, G, n); otherwise each head's, with the
    peak and mass of its softmax over the split."""
    split, unit = tl.program_id(0), tl.program_id(1)
    b, g = (unit // n_kv_head).to(tl.int64), (unit % n_kv_head).to(tl.int64)
    n = tl.maximum((tl.load(n_ptr + b) - recent) // PAGE - first, 0)  # candidates
    chunk = tl.cdiv(tl.cdiv(n, n_split), BLOCK_N) * BLOCK_N
    last = tl.minimum((split + 1) * chunk, n)
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
        if POOL:
            best = tl.max(tl.where((t < GROUP)[:, None], scores, float("-inf")), 0)
            tl.store(out_ptr + b * stride_ob + g * stride_oh + j, best, mask=j < last)
        else:
            out_at = out_ptr + b * stride_ob + (g * GROUP + t)[:, None] * stride_oh + j[None, :]
            tl.store(out_at, scores, mask=(t < GROUP)[:, None] & (j < last)[None, :])
            scores = tl.where((j < last)[None, :], scores, float("-inf"))
            new_peak = tl.maximum(peak, tl.max(scores, 1))
            p = tl.exp2((scores - new_peak[:, None]) * 1.4426950408889634)
            mass = mass * tl.exp2((peak - new_peak) * 1.4426950408889634) + tl.sum(p, 1)
            peak = new_peak
    if not POOL:
        piece = split * tl.num_programs(1) * GROUP + unit * GROUP + t
        tl.store(peak_ptr + piece, peak, mask=t < GROUP)
        tl.store(mass_ptr + piece, mass, mask=t < GROUP)


class PageScratch(NamedTuple):
    """What ``pool_pages`` keeps of one call for its second launch: S splits."""

    scores: torch.Tensor  # f32 (B, H, n_page_max)
    peak: torch.Tensor  # f32 (S, B, H)
    mass: torch.Tensor  # f32 (S, B, H)


def page_scratch(
    n_batch: int, n_head: int, n_kv_head: int, d: int, n_page_max: int, device: torch.device
) -> PageScratch:
    """Memory for ``pool_pages`` of softmax."""
    _, n_split = _tiling(n_batch * n_kv_head, n_page_max, _width(d, d))
    shapes = (n_batch, n_head, n_page_max), (n_split, n_batch, n_head), (n_split, n_batch, n_head)
    return PageScratch(*(torch.empty(s, dtype=torch.float32, device=device) for s in shapes))


def page_scores(
    q: torch.Tensor,
    hi: torch.Tensor,
    lo: torch.Tensor,
    n: torch.Tensor,
    n_page_max: int,
    page: int,
    scale: float,
    first: int = 0,
    recent: int = 1,
    scratch: PageScratch | None = None,
) -> PageScratch:
    """Scores of the candidates, scale (relu(q) . hi - relu(-q) . lo): scores[b, h, j] of page first + j.

    q (B, H, d); hi, lo f16 (B, G, >= first + n_page_max, d); n int32 (B,). n_page_max bounds the
    candidates (n[b] - recent) // page - first. peak, mass of the result: of the softmax over each
    split's candidates.
    """
    n_batch, n_head, d = q.shape
    if scratch is None:
        scratch = page_scratch(n_batch, n_head, hi.shape[1], d, n_page_max, q.device)
    check("scratch.scores", scratch.scores, torch.float32, (n_batch, n_head, n_page_max), q.device)
    _score(q, hi, lo, n, n_page_max, page, scale, first, recent, scratch.scores, scratch)
    return scratch


def _score(
    q: torch.Tensor,
    hi: torch.Tensor,
    lo: torch.Tensor,
    n: torch.Tensor,
    n_page_max: int,
    page: int,
    scale: float,
    first: int,
    recent: int,
    out: torch.Tensor,
    scratch: PageScratch | None,
) -> None:
    """Launches ``_page_scores_kernel``; without scratch the group's largest score goes to out."""
    n_batch, n_head, d = q.shape
    n_kv_head = hi.shape[1]
    check("q", q, QUERY_TYPES, (None, None, None), q.device)
    check("hi", hi, torch.float16, (n_batch, None, None, d), q.device, strided=True)
    check("lo", lo, torch.float16, tuple(hi.shape), q.device, strided=True)
    check("n", n, torch.int32, (n_batch,), q.device)
    if n_head % n_kv_head:
        raise ValueError(f"q has {n_head} heads: expected a multiple of hi's {n_kv_head}")
    if hi.stride() != lo.stride():
        raise ValueError(f"lo has strides {lo.stride()}: expected hi's, {hi.stride()}")
    group = n_head // n_kv_head
    block, n_split = _tiling(n_batch * n_kv_head, n_page_max, _width(d, d))
    peak = mass = None
    if scratch is not None:
        peak, mass = scratch.peak, scratch.mass
        for name, x in (("peak", peak), ("mass", mass)):
            check(f"scratch.{name}", x, torch.float32, (n_split, n_batch, n_head), q.device)
    _page_scores_kernel[(n_split, n_batch * n_kv_head)](
        q, hi, lo, n, out, peak, mass, scale, first, recent, n_kv_head, n_split,
        *hi.stride()[:3], *out.stride()[:2],
        PAGE=page, GROUP=group, TILE_H=max(TILE, triton.next_power_of_2(group)), D=d,
        BLOCK_D=_width(d, d), BLOCK_N=block, POOL=scratch is None, num_warps=4, num_stages=3,
    )  # fmt: skip
