"""Quest's step on the GPU, in one launch: adds the new row, chooses pages, and lists their rows.

The programs of a kv head score its pages (quest/scores.py). The last to arrive chooses.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from sparsekv_cli.kernels.attention.arrivals import arrive_last
from sparsekv_cli.kernels.attention.decode import _width
from sparsekv_cli.kernels.attention.rows import NewRow, check_new, row_elements, store_row
from sparsekv_cli.kernels.quest.pages import check_summaries, summarise_page
from sparsekv_cli.kernels.quest.scores import (
    check_scored,
    list_best_pages,
    page_scratch,
    page_tiling,
    score_split,
)


@triton.jit
def _list_rows(
    chosen_at, n_chosen, n, n_sinks, idx_at, counts_at,
    PAGE: tl.constexpr, BLOCK_I: tl.constexpr, PIECE: tl.constexpr,
):  # fmt: skip
    """Lists the first n_sinks rows, the rows of the chosen pages and the current page."""
    sinks = tl.minimum(n_sinks, n)
    # Pages ascend, so page i starts at row i PAGE or later: the first few hold all the sinks.
    i = tl.arange(0, BLOCK_I)
    pages = tl.load(chosen_at + i, mask=i < n_chosen, other=0)
    twice = tl.minimum(tl.maximum(sinks - pages * PAGE, 0), PAGE)
    n_twice = tl.sum(tl.where(i < n_chosen, twice, 0), 0)
    window = tl.maximum((n - 1) // PAGE * PAGE, sinks)
    n_before = sinks + n_chosen * PAGE - n_twice
    count = n_before + n - window
    for start in range(0, count, PIECE):
        place = start + tl.arange(0, PIECE)
        of_pages = tl.maximum(place - sinks + n_twice, 0)
        is_paged = (place >= sinks) & (place < n_before)
        of_page = tl.load(chosen_at + of_pages // PAGE, mask=is_paged, other=0)
        row = tl.where(is_paged, of_page * PAGE + of_pages % PAGE, window + place - n_before)
        tl.store(idx_at + place, tl.where(place < sinks, place, row), mask=place < count)
    tl.store(counts_at, count)


@triton.jit(do_not_specialize=["n_split", "n_page_max"])
def _step_kernel(
    q_ptr, k_new_ptr, v_new_ptr, k_ptr, v_ptr, hi_ptr, lo_ptr, n_ptr, budget_ptr, arrived_ptr,
    scores_ptr, peak_ptr, mass_ptr, keys_ptr, chosen_ptr, idx_ptr, counts_ptr,
    scale, n_sinks, n_kv_head, n_split, n_page_max, m, width,
    stride_kb, stride_kg, stride_kn, stride_vb, stride_vg, stride_vn, stride_hb, stride_hg,
    stride_hn,
    PAGE: tl.constexpr, GROUP: tl.constexpr, TILE_H: tl.constexpr, TILE_G: tl.constexpr,
    D: tl.constexpr, D_V: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_I: tl.constexpr, BLOCK: tl.constexpr,
    FITS: tl.constexpr, PIECE: tl.constexpr, MEANSTD: tl.constexpr,
):  # fmt: skip
    split, unit = tl.program_id(0), tl.program_id(1)
    b, g = (unit // n_kv_head).to(tl.int64), (unit % n_kv_head).to(tl.int64)
    n = tl.load(n_ptr + b)
    n_page = (n - 1) // PAGE  # whole pages before that of the new row
    summaries = b * stride_hb + g * stride_hg
    if split == 0:
        row = (n - 1).to(tl.int64)
        k_at = k_ptr + b * stride_kb + g * stride_kg
        v_at = v_ptr + b * stride_vb + g * stride_vg + row * stride_vn
        store_row(k_new_ptr + unit * D, k_at + row * stride_kn, tl.arange(0, BLOCK_D), D)
        store_row(v_new_ptr + unit * D_V, v_at, tl.arange(0, BLOCK_V), D_V)
        if n % PAGE == 0:  # the page is complete, and no candidate yet
            tl.debug_barrier()  # the summary reads what other threads have stored
            at = summaries + n_page.to(tl.int64) * stride_hn
            summarise_page(
                k_at, stride_kn, hi_ptr + at, lo_ptr + at, n_page, n_sinks, PAGE, D, BLOCK_D,
                MEANSTD,
            )  # fmt: skip
    score_split(
        q_ptr, hi_ptr, lo_ptr, scores_ptr, peak_ptr, mass_ptr, summaries, stride_hn, n_page, scale,
        n_split, n_page_max, GROUP, TILE_H, D, BLOCK_D, BLOCK_N,
    )  # fmt: skip
    if arrive_last(arrived_ptr + unit, n_split):
        keys_at = keys_ptr + unit.to(tl.int64) * n_page_max
        n_best = tl.maximum((tl.load(budget_ptr + b) - 1) // PAGE, 0)
        n_chosen = tl.minimum(n_best, n_page)
        chosen_at = chosen_ptr + unit * m
        list_best_pages(
            scores_ptr, peak_ptr, mass_ptr, keys_at, unit, n_page, n_split, n_page_max, n_chosen,
            chosen_at, GROUP, TILE_G, BLOCK_S, PIECE, BLOCK, FITS,
        )  # fmt: skip
        _list_rows(
            chosen_at, n_chosen, n, n_sinks, idx_ptr + unit.to(tl.int64) * width, counts_ptr + unit,
            PAGE, BLOCK_I, PIECE,
        )  # fmt: skip


class PageRules(NamedTuple):
    """The numbers of a method's pages. See ``page_summaries`` for meanstd and n_sinks."""

    page: int
    meanstd: bool
    n_sinks: int
    scale: float


def step_rows(
    q: torch.Tensor,
    new: NewRow,
    k: torch.Tensor,
    v: torch.Tensor,
    hi: torch.Tensor,
    lo: torch.Tensor,
    arrived: torch.Tensor,
    n: torch.Tensor,
    budget: torch.Tensor,
    m: int,
    rules: PageRules,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Adds the last row of each sequence, and lists the rows to attend to, ascending.

    The row is written to the rows k and v (B, G, capacity), f16 or q8_0. The summary of a page that
    it completes is written to hi, lo f16 (B, G, pages, d). q (B, H, d); n, budget int32 (B,): rows
    in context, the new one included, and rows to attend to. A kv head takes the (budget - 1) //
    page <= m best of the whole pages before the new row's page. A head's score of a page is
    scale (relu(q) . hi - relu(-q) . lo). The best pages have the largest mean of the group's
    softmax. Returns idx int32 (B, G, n_sinks + (m + 1) page) and the numbers of rows in it, counts
    int32 (B, G). The result is that of select_pages in cpu/quest/pages.py. arrived int32
    (B, G or more): ``none_arrived``, as every launch leaves it.
    """
    (n_batch, n_head, d), n_kv_head, d_v, device = q.shape, k.shape[1], row_elements(v), q.device
    page, meanstd, n_sinks, scale = rules
    check_scored(q, hi, lo, n, budget, arrived)
    check_new(new, k, v, d)
    check_summaries(k, hi, lo, page, 0, n_sinks)
    n_page_max, width = max(1, hi.shape[2]), n_sinks + (m + 1) * page
    (grid, constants, n_warp) = page_tiling(n_batch, n_head, n_kv_head, d, n_page_max)
    scratch = page_scratch(n_batch, n_head, n_kv_head, d, n_page_max, device)
    chosen, idx = (
        torch.empty(n_batch, n_kv_head, size, dtype=torch.int32, device=device)
        for size in (m, width)
    )
    counts = torch.empty(n_batch, n_kv_head, dtype=torch.int32, device=device)
    _step_kernel[grid](
        q, *new, k, v, hi, lo, n, budget, arrived, *scratch, chosen, idx, counts, scale, n_sinks,
        n_kv_head, grid[0], n_page_max, m, width, *k.stride()[:3], *v.stride()[:3],
        *hi.stride()[:3], PAGE=page, D_V=d_v, BLOCK_V=_width(d_v, d_v),
        BLOCK_I=triton.next_power_of_2(max(1, triton.cdiv(n_sinks, page))), MEANSTD=meanstd,
        **constants, num_warps=n_warp, num_stages=3,
    )  # fmt: skip
    return idx, counts
