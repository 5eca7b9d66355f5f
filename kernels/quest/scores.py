"""Scores of pages on the GPU, for Quest and FreeKV: the mean of a group's softmax.

cpu/quest/pages.py defines the scores of pages. The first launch writes the scores of each head.
The second launch pools them.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from sparsekv_cli.kernels.attention.decode import QUERY_TYPES, TILE, _tiling, _width
from sparsekv_cli.kernels.checks import check


@triton.jit
def _halves(q):
    """Returns two f16 whose sum is the f32 ``q``."""
    high = q.to(tl.float16)
    return high, (q - high.to(tl.float32)).to(tl.float16)


@triton.jit
def split_query(
    q_ptr, unit, GROUP: tl.constexpr, TILE_H: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr
):  # -> f16 (TILE_H, BLOCK_D): relu(q) and -relu(-q) of a kv head's group, two halves each
    """Returns the queries for ``score_pages``."""
    t, c = tl.arange(0, TILE_H), tl.arange(0, BLOCK_D)
    head = unit.to(tl.int64) * GROUP + t
    q = tl.load(
        q_ptr + head[:, None] * D + c[None, :],
        mask=(t < GROUP)[:, None] & (c < D)[None, :], other=0.0,
    ).to(tl.float32)  # fmt: skip
    up_high, up_low = _halves(tl.maximum(q, 0.0))
    down_high, down_low = _halves(tl.minimum(q, 0.0))
    return up_high, up_low, down_high, down_low


@triton.jit
def score_pages(
    up_high, up_low, down_high, down_low, hi_ptr, lo_ptr, at, stride_hn, j, last, scale,
    D: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip # -> f32 (TILE_H, BLOCK_N): scores of the pages j < last
    """Returns scale (relu(q) . hi - relu(-q) . lo). at: offset of the first candidate's summary."""
    c = tl.arange(0, BLOCK_D)
    place = at + j.to(tl.int64)[:, None] * stride_hn + c[None, :]
    is_page = (j < last)[:, None] & (c < D)[None, :]
    hi = tl.load(hi_ptr + place, mask=is_page, other=0.0)
    lo = tl.load(lo_ptr + place, mask=is_page, other=0.0)
    scores = tl.dot(up_high, tl.trans(hi))
    scores = tl.dot(up_low, tl.trans(hi), acc=scores)
    scores = tl.dot(down_high, tl.trans(lo), acc=scores)
    return tl.dot(down_low, tl.trans(lo), acc=scores) * scale


@triton.jit(do_not_specialize=["n_split"])
def _head_scores_kernel(
    q_ptr, hi_ptr, lo_ptr, n_ptr, budget_ptr, wanted_ptr, out_ptr, peak_ptr, mass_ptr, n_page_ptr,
    n_best_ptr, scale, first, recent, reserved, least, n_kv_head, n_split,
    stride_hb, stride_hg, stride_hn, stride_ob, stride_oh,
    PAGE: tl.constexpr, GROUP: tl.constexpr, TILE_H: tl.constexpr, D: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, SOME: tl.constexpr,
):  # fmt: skip
    """Writes each head's scores, and peak and mass of their softmax over the split."""
    split, unit = tl.program_id(0), tl.program_id(1)
    b, g = (unit // n_kv_head).to(tl.int64), (unit % n_kv_head).to(tl.int64)
    n = tl.load(n_ptr + b)
    n_page = tl.maximum((n - recent) // PAGE - first, 0)
    if (split == 0) & (g == 0):
        n_best = tl.maximum((tl.load(budget_ptr + b) - reserved) // PAGE, least)
        tl.store(n_page_ptr + b, n_page)
        tl.store(n_best_ptr + b, n_best)
    if SOME:
        n_page = tl.where(tl.load(wanted_ptr + unit) > 0, n_page, 0)
    chunk = tl.cdiv(tl.cdiv(n_page, n_split), BLOCK_N) * BLOCK_N
    last = tl.minimum((split + 1) * chunk, n_page)
    up_high, up_low, down_high, down_low = split_query(q_ptr, unit, GROUP, TILE_H, D, BLOCK_D)
    t = tl.arange(0, TILE_H)
    at = b * stride_hb + g * stride_hg + first * stride_hn
    peak = tl.full([TILE_H], float("-inf"), tl.float32)
    mass = tl.zeros([TILE_H], tl.float32)
    for start in range(split * chunk, last, BLOCK_N):
        j = start + tl.arange(0, BLOCK_N)
        scores = score_pages(
            up_high, up_low, down_high, down_low, hi_ptr, lo_ptr, at, stride_hn, j, last, scale, D,
            BLOCK_D,
        )  # fmt: skip
        out_at = out_ptr + b * stride_ob + (g * GROUP + t)[:, None] * stride_oh + j[None, :]
        tl.store(out_at, scores, mask=(t < GROUP)[:, None] & (j < last)[None, :])
        scores = tl.where((j < last)[None, :], scores, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(scores, 1))
        p = tl.exp2((scores - new_peak[:, None]) * 1.4426950408889634)
        mass = mass * tl.exp2((peak - new_peak) * 1.4426950408889634) + tl.sum(p, 1)
        peak = new_peak
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
    """Scores of the candidates of B sequences, and the number of pages to choose."""

    scores: torch.Tensor  # f32 (B, G, n_page_max), of the pages from the first candidate on
    n_page: torch.Tensor  # int32 (B,): candidates
    n_best: torch.Tensor  # int32 (B,): pages that a kv head chooses


def pooled_pages(
    n_batch: int, n_kv_head: int, n_page_max: int, device: torch.device
) -> PooledPages:
    """Allocates the result of ``softmax_scores``."""
    n_page, n_best = torch.empty(2, n_batch, dtype=torch.int32, device=device)
    shape = (n_batch, n_kv_head, n_page_max)
    return PooledPages(torch.empty(shape, dtype=torch.float32, device=device), n_page, n_best)


def check_scored(
    q: torch.Tensor,
    hi: torch.Tensor,
    lo: torch.Tensor,
    n: torch.Tensor,
    budget: torch.Tensor,
    out: PooledPages,
) -> None:
    """Raises ValueError unless the arguments of ``softmax_scores`` fit each other."""
    n_batch, n_head, d = q.shape
    n_kv_head, device = hi.shape[1], q.device
    check("q", q, QUERY_TYPES, (None, None, None), device)
    check("hi", hi, torch.float16, (n_batch, None, None, d), device, strided=True)
    check("lo", lo, torch.float16, tuple(hi.shape), device, strided=True)
    check("n", n, torch.int32, (n_batch,), device)
    check("budget", budget, torch.int32, (n_batch,), device)
    if n_head % n_kv_head:
        raise ValueError(f"q has {n_head} heads: expected a multiple of hi's {n_kv_head}")
    if hi.stride() != lo.stride():
        raise ValueError(f"lo has strides {lo.stride()}: expected hi's, {hi.stride()}")
    check("out.scores", out.scores, torch.float32, (n_batch, n_kv_head, None), device)
    check("out.n_page", out.n_page, torch.int32, (n_batch,), device)
    check("out.n_best", out.n_best, torch.int32, (n_batch,), device)


class PageCandidates(NamedTuple):
    """The candidates are the pages first..(n - recent) // page - 1.

    max(least, (budget - reserved) // page) of them are chosen. reserved: rows that are attended to
    in addition.
    """

    first: int
    recent: int
    reserved: int
    least: int = 0


class PageScratch(NamedTuple):
    """Memory between the two launches of ``softmax_scores``, S splits."""

    scores: torch.Tensor  # f32 (B, H, n_page_max)
    peak: torch.Tensor  # f32 (S, B, H)
    mass: torch.Tensor  # f32 (S, B, H)


def page_scratch(
    n_batch: int, n_head: int, n_kv_head: int, d: int, n_page_max: int, device: torch.device
) -> PageScratch:
    """Allocates scratch for ``softmax_scores``."""
    _, n_split = _tiling(n_batch * n_kv_head, n_page_max, _width(d, d))
    shapes = (n_batch, n_head, n_page_max), (n_split, n_batch, n_head), (n_split, n_batch, n_head)
    return PageScratch(*(torch.empty(s, dtype=torch.float32, device=device) for s in shapes))


def softmax_scores(
    q: torch.Tensor,
    hi: torch.Tensor,
    lo: torch.Tensor,
    n: torch.Tensor,
    budget: torch.Tensor,
    n_page_max: int,
    page: int,
    scale: float,
    candidates: PageCandidates,
    wanted: torch.Tensor | None = None,
    out: PooledPages | None = None,
    scratch: PageScratch | None = None,
) -> PooledPages:
    """Returns the mean of the group's softmax over the candidates, and the number to choose.

    A head's score of a page is scale (relu(q) . hi - relu(-q) . lo). q (B, H, d); hi, lo f16 (B, G,
    pages, d); n, budget int32 (B,): rows in context, and rows to attend to. There are at most
    n_page_max candidates. wanted int32 (B, G), if given: kv heads whose entry is 0 do not choose,
    and their scores are not written. out: memory for the result, for n_page_max pages.
    """
    n_batch, n_head, d = q.shape
    n_kv_head, device = hi.shape[1], q.device
    if out is None:
        out = pooled_pages(n_batch, n_kv_head, n_page_max, device)
    if scratch is None:
        scratch = page_scratch(n_batch, n_head, n_kv_head, d, n_page_max, device)
    check_scored(q, hi, lo, n, budget, out)
    if wanted is not None:
        check("wanted", wanted, torch.int32, (n_batch, n_kv_head), device)
    block, n_split = _tiling(n_batch * n_kv_head, n_page_max, _width(d, d))
    scores, peak, mass = scratch
    check("scratch.scores", scores, torch.float32, (n_batch, n_head, n_page_max), device)
    check("scratch.peak", peak, torch.float32, (n_split, n_batch, n_head), device)
    check("scratch.mass", mass, torch.float32, (n_split, n_batch, n_head), device)
    group = n_head // n_kv_head
    _head_scores_kernel[(n_split, n_batch * n_kv_head)](
        q, hi, lo, n, budget, wanted, scores, peak, mass, out.n_page, out.n_best, scale,
        *candidates, n_kv_head, n_split, *hi.stride()[:3], *scores.stride()[:2],
        PAGE=page, GROUP=group, TILE_H=max(TILE, triton.next_power_of_2(group)), D=d,
        BLOCK_D=_width(d, d), BLOCK_N=block, SOME=wanted is not None, num_warps=4, num_stages=3,
    )  # fmt: skip
    _pool_softmax_kernel[(triton.cdiv(n_page_max, 256), n_batch * n_kv_head)](
        scores, peak, mass, out.n_page, wanted, out.scores, n_kv_head, n_split,
        *scores.stride()[:2], *out.scores.stride()[:2],
        GROUP=group, BLOCK_S=triton.next_power_of_2(n_split), BLOCK_N=256,
        SOME=wanted is not None, num_warps=2,
    )  # fmt: skip
    return out
