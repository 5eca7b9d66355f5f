"""Summaries of pages of the KV cache, on the GPU.

cpu/quest/pages.py defines summaries. quest/scores.py scores pages. A step summarises the page that
it completes (quest/step.py).
"""

import torch
import triton
import triton.language as tl

from sparsekv_cli.kernels.attention.decode import _width
from sparsekv_cli.kernels.attention.rows import check_rows, load_row, row_elements
from sparsekv_cli.kernels.checks import check


@triton.jit
def summarise_rows(
    at, stride_n, c, first, count, WIDTH: tl.constexpr, MEANSTD: tl.constexpr
):  # rows first..count - 1 at ``at`` -> high, low f32 (BLOCK_D,)
    """See cpu/quest/pages.py. Sums have the same order as there, so that roundings agree."""
    size = (count - first).to(tl.float32)
    row = load_row(at + first * stride_n, c, WIDTH).to(tl.float32)
    high, low = row, row
    if MEANSTD:
        for r in range(first + 1, count):
            high += load_row(at + r * stride_n, c, WIDTH).to(tl.float32)
        mean = high * (1 / size)
        squares = tl.zeros_like(mean)
        for r in range(first, count):
            row = load_row(at + r * stride_n, c, WIDTH).to(tl.float32)
            squares = tl.fma(row - mean, row - mean, squares)
        std = tl.sqrt(squares * (1 / size))
        high, low = mean + std, mean - std
    else:
        for r in range(first + 1, count):
            row = load_row(at + r * stride_n, c, WIDTH).to(tl.float32)
            high, low = tl.maximum(high, row), tl.minimum(low, row)
    return high, low


@triton.jit
def summarise_page(
    k_at, stride_kn, hi_at, lo_at, j, n_sinks,
    PAGE: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, MEANSTD: tl.constexpr,
):  # fmt: skip
    """Writes the summary of page j of the rows at ``k_at`` to ``hi_at`` and ``lo_at``."""
    c = tl.arange(0, BLOCK_D)
    skipped = tl.where(j == 0, n_sinks, 0)
    first_row = k_at + j.to(tl.int64) * PAGE * stride_kn
    high, low = summarise_rows(first_row, stride_kn, c, skipped, PAGE, D, MEANSTD)
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
    summarise_page(k_at, stride_kn, hi_ptr + at, lo_ptr + at, j, n_sinks, PAGE, D, BLOCK_D, MEANSTD)


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

    k: rows (attention/rows.py), (B, G, capacity) of any strides. n_sinks < page: rows of page 0
    that are left out of its summary. They are attended to anyway, and their large elements would
    widen the bounds.
    """
    check_summaries(k, hi, lo, page, last_page, n_sinks)
    if last_page * page > k.shape[2]:
        raise ValueError(f"last_page = {last_page}: k has {k.shape[2]} rows")
    (n_batch, n_kv_head), d = k.shape[:2], row_elements(k)
    if last_page > first_page:
        _page_summaries_kernel[(last_page - first_page, n_batch * n_kv_head)](
            k, hi, lo, first_page, n_sinks, n_kv_head, *k.stride()[:3], *hi.stride()[:3],
            PAGE=page, D=d, BLOCK_D=_width(d, d), MEANSTD=meanstd, num_warps=1,
        )  # fmt: skip


def check_summaries(
    k: torch.Tensor, hi: torch.Tensor, lo: torch.Tensor, page: int, n_page: int, n_sinks: int
) -> None:
    """Raises ValueError unless the summaries hi, lo of n_page pages fit the rows k."""
    check_rows("k", k, (None, None, None), None, k.device)
    (n_batch, n_kv_head), d = k.shape[:2], row_elements(k)
    check("hi", hi, torch.float16, (n_batch, n_kv_head, None, d), k.device, strided=True)
    check("lo", lo, torch.float16, tuple(hi.shape), k.device, strided=True)
    if hi.stride() != lo.stride():
        raise ValueError(f"lo has strides {lo.stride()}: expected hi's, {hi.stride()}")
    if hi.shape[2] < n_page:
        raise ValueError(f"hi has room for {hi.shape[2]} pages: expected {n_page}")
    if not 0 <= n_sinks < page:
        raise ValueError(f"n_sinks = {n_sinks}: expected 0 to page - 1 = {page - 1}")
