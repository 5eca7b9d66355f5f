"""FreeKV's choice on the GPU, in one launch: scores pages, chooses some, and assigns slots to them.

The arrays are in freekv/pages.py. The programs of a kv head score its pages (quest/scores.py). The
last to arrive chooses. ``wanted`` says which kv heads choose pages.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from sparsekv_cli.kernels.attention.arrivals import arrive_last
from sparsekv_cli.kernels.checks import check
from sparsekv_cli.kernels.freekv.pages import (
    ATTENDED,
    BEST,
    CLOCK,
    END,
    HIT,
    N_CHOSEN,
    N_STATE,
    N_STATISTICS,
    NO_PAGE,
    QUERY,
    RECALLED,
    SCORED,
    STEPPED,
    Layout,
    PageTensors,
)
from sparsekv_cli.kernels.quest.scores import (
    PageScratch,
    check_scored,
    check_scratch,
    list_best_pages,
    page_tiling,
    score_split,
)


@triton.jit
def _assign_slots(
    fresh_at, n_chosen, wanted, slot_of_at, page_in_at, stamps_at, chosen_at, slots_at, missing_at,
    state_at, statistics_at, n, window, n_best, n_sink, n_slot, m,
    BLOCK_M: tl.constexpr, BLOCK_L: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Assigns slots to the chosen pages; reuses the least recently used slots."""
    i, s = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_L)
    now = tl.load(state_at + CLOCK) + 1
    pages = n_sink + tl.load(fresh_at + i, mask=i < n_chosen, other=0)
    slots = tl.load(slot_of_at + pages, mask=i < n_chosen, other=0)
    is_missing = ((i < n_chosen) & (slots < 0)).to(tl.int32)
    n_missing = tl.sum(is_missing, 0)
    order = tl.cumsum(is_missing, 0) - 1
    # Hits get their time stamp first, so that no chosen page loses its slot.
    tl.store(stamps_at + slots, tl.zeros_like(slots) + now, mask=(i < n_chosen) & (slots >= 0))
    tl.debug_barrier()
    stamps = tl.load(stamps_at + s, mask=s < n_slot, other=0x7FFFFFFF)
    page_in = tl.load(page_in_at + s, mask=s < n_slot, other=NO_PAGE)
    for miss in range(0, n_missing):
        is_this = (is_missing > 0) & (order == miss)
        page = tl.sum(tl.where(is_this, pages, 0), 0)
        slot = tl.argmin(stamps, 0)  # the first of the least recently used slots
        old = tl.sum(tl.where(s == slot, page_in, 0), 0)
        tl.store(slot_of_at + tl.maximum(old, 0), NO_PAGE, mask=old >= 0)
        tl.store(slot_of_at + page, slot)
        page_in = tl.where(s == slot, page, page_in)
        stamps = tl.where(s == slot, now, stamps)
        slots = tl.where(is_this, slot, slots)
    tl.store(page_in_at + s, page_in, mask=s < n_slot)
    tl.store(stamps_at + s, stamps, mask=s < n_slot)
    tl.store(chosen_at + i, pages, mask=i < n_chosen)
    tl.store(slots_at + i, slots, mask=i < n_chosen)
    tl.store(missing_at + i, is_missing, mask=i < m)
    tl.store(state_at + CLOCK, now)
    tl.store(state_at + N_CHOSEN, n_chosen)
    query = n - 1  # rows in context when the query was the current one
    if STEP:
        query = tl.where(wanted == 1, n, n - 1)
    tl.store(state_at + QUERY, query)
    tl.store(state_at + END, window)
    tl.store(state_at + BEST, n_best)
    is_partial = (window - n_sink > n_best).to(tl.int64)
    scored = tl.load(statistics_at + SCORED) + is_partial * window
    tl.store(statistics_at + SCORED, scored)
    tl.store(statistics_at + HIT, tl.load(statistics_at + HIT) + n_chosen - n_missing)
    tl.store(statistics_at + RECALLED, tl.load(statistics_at + RECALLED) + n_missing)


@triton.jit
def _end_choice(
    q_ptr, previous_ptr, statistics_at, unit, n, n_chosen, window, n_sink,
    PAGE: tl.constexpr, GROUP: tl.constexpr, TILE_G: tl.constexpr, D: tl.constexpr,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Counts a step. Its query becomes the previous query."""
    count = (n_sink + n_chosen) * PAGE + n - window * PAGE
    tl.store(statistics_at + STEPPED, tl.load(statistics_at + STEPPED) + 1)
    tl.store(statistics_at + ATTENDED, tl.load(statistics_at + ATTENDED) + count)
    c, t = tl.arange(0, BLOCK_D), tl.arange(0, TILE_G)
    at = (unit * GROUP + t)[:, None] * D + c[None, :]
    is_q = (t < GROUP)[:, None] & (c < D)[None, :]
    tl.store(previous_ptr + at, tl.load(q_ptr + at, mask=is_q), mask=is_q)


@triton.jit(do_not_specialize=["n_split", "ahead", "recent", "n_candidate_max"])
def _choose_pages_kernel(
    query_ptr, n_ptr, budget_ptr, q_ptr, previous_ptr, wanted_ptr, arrived_ptr, fresh_ptr,
    scores_ptr, peak_ptr, mass_ptr, keys_ptr, hi_ptr, lo_ptr, slot_of_ptr, page_in_ptr, stamps_ptr,
    chosen_ptr, slots_ptr, missing_ptr, state_ptr, statistics_ptr,
    scale, ahead, recent, reserved, n_sink, n_kv_head, n_split, n_candidate_max, n_page_max, n_slot,
    m,
    PAGE: tl.constexpr, GROUP: tl.constexpr, TILE_H: tl.constexpr, TILE_G: tl.constexpr,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_S: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_L: tl.constexpr, BLOCK: tl.constexpr, FITS: tl.constexpr,
    PIECE: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """STEP: a step calls it. The step is counted, and its query becomes the previous query."""
    split, unit = tl.program_id(0), tl.program_id(1)
    b = unit // n_kv_head
    n = tl.load(n_ptr + b) + ahead
    window = (n - recent) // PAGE
    wanted = tl.load(wanted_ptr + unit)
    state_at, statistics_at = state_ptr + unit * N_STATE, statistics_ptr + unit * N_STATISTICS
    missing_at = missing_ptr + unit * m
    if wanted > 0:
        n_page = tl.maximum(window - n_sink, 0)
        at = (unit.to(tl.int64) * n_page_max + n_sink) * D
        score_split(
            query_ptr, hi_ptr, lo_ptr, scores_ptr, peak_ptr, mass_ptr, at, D, n_page, scale,
            n_split, n_candidate_max, GROUP, TILE_H, D, BLOCK_D, BLOCK_N,
        )  # fmt: skip
        if arrive_last(arrived_ptr + unit, n_split):
            keys_at = keys_ptr + unit.to(tl.int64) * n_candidate_max
            n_best = tl.maximum((tl.load(budget_ptr + b) - reserved) // PAGE, 1)
            n_chosen = tl.minimum(n_best, n_page)
            fresh_at = fresh_ptr + unit * m
            list_best_pages(
                scores_ptr, peak_ptr, mass_ptr, keys_at, unit, n_page, n_split, n_candidate_max,
                n_chosen, fresh_at, GROUP, TILE_G, BLOCK_S, PIECE, BLOCK, FITS,
            )  # fmt: skip
            _assign_slots(
                fresh_at, n_chosen, wanted, slot_of_ptr + unit.to(tl.int64) * n_page_max,
                page_in_ptr + unit * n_slot, stamps_ptr + unit * n_slot, chosen_ptr + unit * m,
                slots_ptr + unit * m, missing_at, state_at, statistics_at, n, window, n_best,
                n_sink, n_slot, m, BLOCK_M, BLOCK_L, STEP,
            )  # fmt: skip
            if STEP:
                _end_choice(
                    q_ptr, previous_ptr, statistics_at, unit, n, n_chosen, window, n_sink, PAGE,
                    GROUP, TILE_G, D, BLOCK_D,
                )  # fmt: skip
    elif split == 0:
        i = tl.arange(0, BLOCK_M)
        tl.store(missing_at + i, tl.zeros([BLOCK_M], tl.int32), mask=i < m)
        if STEP:
            n_chosen = tl.load(state_at + N_CHOSEN)
            _end_choice(
                q_ptr, previous_ptr, statistics_at, unit, n, n_chosen, window, n_sink, PAGE, GROUP,
                TILE_G, D, BLOCK_D,
            )  # fmt: skip


class ChoiceBuffers(NamedTuple):
    """Tensors that a choice reads and writes, in addition to the pages."""

    wanted: torch.Tensor  # int32 (B, G): the kv heads with another number than 0 choose
    arrived: torch.Tensor  # int32 (B, G): see quest/scores.py none_arrived
    fresh: torch.Tensor  # int32 (B, G, m): candidates chosen, counted from the first, ascending
    scratch: PageScratch


def choose_pages(
    pages: PageTensors,
    layout: Layout,
    query: torch.Tensor,
    n: torch.Tensor,
    budget: torch.Tensor,
    recent: int,
    reserved: int,
    scale: float,
    buffers: ChoiceBuffers,
    *,
    q: torch.Tensor | None = None,
    previous: torch.Tensor | None = None,
) -> None:
    """Chooses pages with the query f32 (B, H, d), and assigns slots to them.

    The candidates are the pages from n_sink to (n[b] - recent) // p - 1. The max(1, (budget -
    reserved) // p) best are chosen. The best pages have the largest mean of the group's softmax
    (quest/step.py). A step passes q and previous f32 (B, H, d), and previous is set to q. A choice
    ahead, for n + 1 rows, passes None for both.
    """
    n_batch, _, page, n_kv, d = pages.k.shape
    device, m, n_slot = pages.k.device, pages.chosen.shape[2], pages.stamps.shape[2]
    n_head, n_page_max = query.shape[1], pages.hi.shape[2]
    n_candidate_max = max(1, n_page_max - layout.n_sink)
    check_scored(query, pages.hi, pages.lo, n, budget, buffers.arrived)
    check("wanted", buffers.wanted, torch.int32, (n_batch, n_kv), device)
    check("fresh", buffers.fresh, torch.int32, (n_batch, n_kv, m), device)
    check_scratch(buffers.scratch, query, n_kv, n_candidate_max)
    if q is not None:
        assert previous is not None
        for name, x in (("q", q), ("previous", previous)):
            check(name, x, torch.float32, (n_batch, n_head, d), device)
    grid, constants, n_warp = page_tiling(n_batch, n_head, n_kv, d, n_candidate_max)
    _choose_pages_kernel[grid](
        query, n, budget, q, previous, *buffers[:3], *buffers.scratch, *pages[3:], scale,
        0 if q is not None else 1, recent, reserved, layout.n_sink, n_kv, grid[0], n_candidate_max,
        n_page_max, n_slot, m, PAGE=page, BLOCK_M=triton.next_power_of_2(m),
        BLOCK_L=triton.next_power_of_2(n_slot), STEP=q is not None, **constants, num_warps=n_warp,
        num_stages=3,
    )  # fmt: skip
