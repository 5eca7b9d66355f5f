"""Quest's scores of pages on the GPU: the largest of each kv head's group.

cpu/quest/pages.py says what a score is. freekv/scores.py pools the same scores by their softmax.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from sparsekv_cli.kernels.attention.decode import QUERY_TYPES, TILE, _tiling, _width
from sparsekv_cli.kernels.checks import check


@triton.jit
def _halves(q):
    """f32 as the sum of two f16."""
    high = q.to(tl.float16)
    return high, (q - high.to(tl.float32)).to(tl.float16)


@triton.jit
def split_query(
    q_ptr, unit, GROUP: tl.constexpr, TILE_H: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr
):  # -> f16 (TILE_H, BLOCK_D): relu(q) and -relu(-q) of a kv head's group, two halves each
    """The queries that ``score_pages`` takes."""
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
    """scale (relu(q) . hi - relu(-q) . lo). at: element of the first candidate's summary."""
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
def _largest_scores_kernel(
    q_ptr, hi_ptr, lo_ptr, n_ptr, budget_ptr, out_ptr, n_page_ptr, n_best_ptr, scale, n_kv_head,
    n_split, stride_hb, stride_hg, stride_hn, stride_ob, stride_og,
    PAGE: tl.constexpr, GROUP: tl.constexpr, TILE_H: tl.constexpr, D: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    split, unit = tl.program_id(0), tl.program_id(1)
    b, g = (unit // n_kv_head).to(tl.int64), (unit % n_kv_head).to(tl.int64)
    n = tl.load(n_ptr + b)
    n_page = tl.maximum((n - 1) // PAGE, 0)
    if (split == 0) & (g == 0):
        n_best = (tl.load(budget_ptr + b) - (n - n_page * PAGE)) // PAGE
        tl.store(n_page_ptr + b, n_page)
        tl.store(n_best_ptr + b, tl.maximum(n_best, 0))
    chunk = tl.cdiv(tl.cdiv(n_page, n_split), BLOCK_N) * BLOCK_N
    last = tl.minimum((split + 1) * chunk, n_page)
    up_high, up_low, down_high, down_low = split_query(q_ptr, unit, GROUP, TILE_H, D, BLOCK_D)
    is_head = tl.arange(0, TILE_H) < GROUP
    at = b * stride_hb + g * stride_hg
    for start in range(split * chunk, last, BLOCK_N):
        j = start + tl.arange(0, BLOCK_N)
        scores = score_pages(
            up_high, up_low, down_high, down_low, hi_ptr, lo_ptr, at, stride_hn, j, last, scale, D,
            BLOCK_D,
        )  # fmt: skip
        best = tl.max(tl.where(is_head[:, None], scores, float("-inf")), 0)
        tl.store(out_ptr + b * stride_ob + g * stride_og + j, best, mask=j < last)


class PooledPages(NamedTuple):
    """Candidates of B sequences, and how many of them a kv head takes."""

    scores: torch.Tensor  # f32 (B, G, n_page_max), of the pages from the first candidate on
    n_page: torch.Tensor  # int32 (B,): candidates
    n_best: torch.Tensor  # int32 (B,)


def pooled_pages(
    n_batch: int, n_kv_head: int, n_page_max: int, device: torch.device
) -> PooledPages:
    """Memory for the result of ``largest_scores``."""
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
    """Raises ValueError unless the arguments of ``largest_scores`` fit each other."""
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


def largest_scores(
    q: torch.Tensor,
    hi: torch.Tensor,
    lo: torch.Tensor,
    n: torch.Tensor,
    budget: torch.Tensor,
    n_page_max: int,
    page: int,
    scale: float,
    out: PooledPages | None = None,
) -> PooledPages:
    """The largest score of each kv head's group for whole pages, and how many are to be taken.

    A head's score of a page is scale (relu(q) . hi - relu(-q) . lo). q (B, H, d); hi, lo f16 (B, G,
    pages, d); n, budget int32 (B,): rows in context, and to attend to. Candidates are the whole
    pages before the last row, n_page_max at most. The number to take is what the budget allows next
    to the rows after the pages. out: memory for the result, for n_page_max pages.
    """
    n_batch, n_head, d = q.shape
    n_kv_head = hi.shape[1]
    if out is None:
        out = pooled_pages(n_batch, n_kv_head, n_page_max, q.device)
    check_scored(q, hi, lo, n, budget, out)
    block, n_split = _tiling(n_batch * n_kv_head, n_page_max, _width(d, d))
    group = n_head // n_kv_head
    _largest_scores_kernel[(n_split, n_batch * n_kv_head)](
        q, hi, lo, n, budget, *out, scale, n_kv_head, n_split, *hi.stride()[:3],
        *out.scores.stride()[:2],
        PAGE=page, GROUP=group, TILE_H=max(TILE, triton.next_power_of_2(group)), D=d,
        BLOCK_D=_width(d, d), BLOCK_N=block, num_warps=4, num_stages=3,
    )  # fmt: skip
    return out
