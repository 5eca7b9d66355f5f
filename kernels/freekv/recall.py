"""FreeKV's step on the GPU: copies pages from the window to pinned host memory, and back.

The arrays are in freekv/pages.py. The kernels read and write the pool over the bus and change the
layout as they copy. The host decides nothing. ``wanted`` says which kv heads choose pages
(freekv/choice.py).
"""

import torch
import triton
import triton.language as tl

from sparsekv_cli.kernels.attention.decode import _width
from sparsekv_cli.kernels.checks import check
from sparsekv_cli.kernels.freekv.pages import (
    BEST,
    END,
    N_CHOSEN,
    N_STATE,
    N_STATISTICS,
    OFFLOADED,
    QUERY,
    SENT,
    Layout,
    PageTensors,
)
from sparsekv_cli.kernels.quest.pages import summarise_rows


@triton.jit
def _pool_at(pool_ptr, pools_ptr, b, n_unit, APART: tl.constexpr, SIZE: tl.constexpr):
    """Returns the start of sequence b's pool, which has n_unit units of SIZE elements."""
    if APART:
        # The hint keeps loads and stores at 16 bytes each.
        return pool_ptr + tl.multiple_of(tl.load(pools_ptr + b), 8)
    else:
        return pool_ptr + b * n_unit * SIZE


@triton.jit(do_not_specialize=["ahead", "recent"])
def _offload_pages_kernel(
    pool_ptr, pools_ptr, k_ptr, v_ptr, hi_ptr, lo_ptr, state_ptr, statistics_ptr, n_ptr, budget_ptr,
    wanted_ptr, ahead, recent, reserved, n_sink, n_ring, n_kv_head, n_resident, n_pool, n_page_max,
    PAGE: tl.constexpr, D: tl.constexpr, D_V: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr, ROWS: tl.constexpr, MEANSTD: tl.constexpr, WANT: tl.constexpr,
    APART: tl.constexpr,
):  # fmt: skip
    unit = tl.program_id(0)
    b, g = (unit // n_kv_head).to(tl.int64), (unit % n_kv_head).to(tl.int64)
    pool_at = _pool_at(pool_ptr, pools_ptr, b, n_pool * n_kv_head, APART, PAGE * (D + D_V))
    state_at = state_ptr + unit * N_STATE
    n = tl.load(n_ptr + b) + ahead
    window = (n - recent) // PAGE
    first = tl.load(state_at + OFFLOADED)
    c, c_v, r = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_V), tl.arange(0, ROWS)
    for j in range(first, window):
        row = (b * n_resident + n_sink + j % n_ring) * PAGE * n_kv_head + g
        place = ((j - n_sink) * n_kv_head + g) * PAGE * (D + D_V)
        for start in tl.static_range(0, PAGE, ROWS):
            rows = start + r
            is_k = (rows < PAGE)[:, None] & (c < D)[None, :]
            from_k = k_ptr + (row + rows * n_kv_head)[:, None] * D + c[None, :]
            to_k = pool_at + place + rows[:, None] * D + c[None, :]
            tl.store(to_k, tl.load(from_k, mask=is_k, other=0.0), mask=is_k)
            is_v = (rows < PAGE)[:, None] & (c_v < D_V)[None, :]
            from_v = v_ptr + (row + rows * n_kv_head)[:, None] * D_V + c_v[None, :]
            to_v = pool_at + place + PAGE * D + rows[:, None] * D_V + c_v[None, :]
            tl.store(to_v, tl.load(from_v, mask=is_v, other=0.0), mask=is_v)
        high, low = summarise_rows(
            k_ptr + row * D, n_kv_head * D, c, tl.full([], 0, tl.int32), PAGE, D, MEANSTD
        )
        at = ((b * n_kv_head + g) * n_page_max + j) * D
        tl.store(hi_ptr + at + c, high.to(tl.float16), mask=c < D)
        tl.store(lo_ptr + at + c, low.to(tl.float16), mask=c < D)
    tl.debug_barrier()  # every warp has read OFFLOADED, the first page to copy
    if window > first:
        tl.store(state_at + OFFLOADED, window)
        sent_at = statistics_ptr + unit * N_STATISTICS + SENT
        tl.store(sent_at, tl.load(sent_at) + window - first)
    if WANT:
        n_best = tl.maximum((tl.load(budget_ptr + b) - reserved) // PAGE, 1)
        is_new = (tl.load(state_at + QUERY) != n - 1) | (tl.load(state_at + END) != window)
        is_new = is_new | (tl.load(state_at + BEST) != n_best)
        tl.store(wanted_ptr + unit, is_new.to(tl.int32))


def offload_pages(
    pages: PageTensors,
    layout: Layout,
    n: torch.Tensor,
    recent: int,
    *,
    ahead: int = 0,
    budget: torch.Tensor | None = None,
    reserved: int = 0,
    wanted: torch.Tensor | None = None,
    pools: torch.Tensor | None = None,
) -> None:
    """Copies pages that have left the window into the pool and summarises them.

    The window of n[b] + ahead rows starts at page (n[b] + ahead - recent) // p. ``wanted`` int32
    (B, G), if given, is set to 1 for kv heads that have not yet chosen for that many rows. They
    choose with the query of the row before. The candidates are the pages before the window. They
    choose max(1, (budget - reserved) // p) of these. pools: see ``check_pools``.
    """
    n_batch, n_resident, page, n_kv, d = pages.k.shape
    d_v, device = pages.v.shape[4], pages.k.device
    check("n", n, torch.int32, (n_batch,), device)
    if wanted is not None:
        assert budget is not None
        check("wanted", wanted, torch.int32, (n_batch, n_kv), device)
        check("budget", budget, torch.int32, (n_batch,), device)
    check_pools(pages, pools)
    _offload_pages_kernel[(n_batch * n_kv,)](
        pages.pool, pools, pages.k, pages.v, pages.hi, pages.lo, pages.state, pages.statistics, n,
        budget, wanted, ahead, recent, reserved, layout.n_sink, layout.n_ring, n_kv, n_resident,
        pages.pool.shape[1], pages.hi.shape[2], PAGE=page, D=d, D_V=d_v, BLOCK_D=_width(d, d),
        BLOCK_V=_width(d_v, d_v), ROWS=_rows(page), MEANSTD=layout.meanstd,
        WANT=wanted is not None, APART=pools is not None, num_warps=4,
    )  # fmt: skip


def check_pools(pages: PageTensors, pools: torch.Tensor | None) -> None:
    """Raises ValueError unless ``pools`` is None or has the offset of each sequence's pool.

    pools int64 (B,): elements from the start of pages.pool, the first sequence's, a multiple of 8.
    With it, sequences with separate pools in pinned memory can share a launch.
    """
    if pools is not None:
        check("pools", pools, torch.int64, (len(pages.k),), pages.k.device)
    elif len(pages.pool) != len(pages.k):
        raise ValueError(f"pool is of {len(pages.pool)} sequences: expected {len(pages.k)}")


def _rows(page: int) -> int:
    """Returns the rows of a page that a program copies at a time."""
    return min(16, triton.next_power_of_2(page))


@triton.jit(do_not_specialize=["recent"])
def _fetch_pages_kernel(
    pool_ptr, pools_ptr, k_ptr, v_ptr, chosen_ptr, slots_ptr, missing_ptr, state_ptr, n_ptr,
    idx_ptr, counts_ptr, recent, n_sink, n_ring, n_kv_head, n_resident, n_pool, m, stride_i,
    PAGE: tl.constexpr, D: tl.constexpr, D_V: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr, ROWS: tl.constexpr, LIST: tl.constexpr, APART: tl.constexpr,
):  # fmt: skip
    """Copies the missing pages; LIST: writes the rows that a step attends to."""
    i, unit = tl.program_id(0), tl.program_id(1)
    b, g = (unit // n_kv_head).to(tl.int64), (unit % n_kv_head).to(tl.int64)
    n_chosen = tl.load(state_ptr + unit * N_STATE + N_CHOSEN)
    r = tl.arange(0, ROWS)
    if i < n_chosen:
        page = tl.load(chosen_ptr + unit * m + i)
        resident = n_sink + n_ring + tl.load(slots_ptr + unit * m + i)
        if LIST:
            for start in tl.static_range(0, PAGE, ROWS):
                rows = start + r
                place = (n_sink + i) * PAGE + rows
                idx_at = idx_ptr + unit * stride_i + place
                tl.store(idx_at, resident * PAGE + rows, mask=rows < PAGE)
        if tl.load(missing_ptr + unit * m + i) > 0:
            c, c_v = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_V)
            size: tl.constexpr = PAGE * (D + D_V)
            pool_at = _pool_at(pool_ptr, pools_ptr, b, n_pool * n_kv_head, APART, size)
            unit_at = pool_at + ((page - n_sink) * n_kv_head + g) * size
            row = (b * n_resident + resident) * PAGE * n_kv_head + g
            for start in tl.static_range(0, PAGE, ROWS):
                rows = start + r
                is_k = (rows < PAGE)[:, None] & (c < D)[None, :]
                is_v = (rows < PAGE)[:, None] & (c_v < D_V)[None, :]
                from_k = unit_at + rows[:, None] * D + c[None, :]
                from_v = unit_at + PAGE * D + rows[:, None] * D_V + c_v[None, :]
                k = tl.load(from_k, mask=is_k, other=0.0)
                v = tl.load(from_v, mask=is_v, other=0.0)
                to = (row + rows * n_kv_head)[:, None]
                tl.store(k_ptr + to * D + c[None, :], k, mask=is_k)
                tl.store(v_ptr + to * D_V + c_v[None, :], v, mask=is_v)
    if LIST:  # noqa: SIM102
        if i == m:  # the sinks, and the window after the chosen pages
            n = tl.load(n_ptr + b)
            idx_at = idx_ptr + unit * stride_i
            window = (n - recent) // PAGE
            before = (n_sink + n_chosen) * PAGE
            n_window = n - window * PAGE
            for start in range(0, n_sink * PAGE, ROWS):
                tl.store(idx_at + start + r, start + r, mask=start + r < n_sink * PAGE)
            for start in range(0, n_window, ROWS):
                at = start + r
                row = (n_sink + (window + at // PAGE) % n_ring) * PAGE + at % PAGE
                tl.store(idx_at + before + at, row, mask=at < n_window)
            tl.store(counts_ptr + unit, before + n_window)


def fetch_pages(
    pages: PageTensors,
    layout: Layout,
    n: torch.Tensor | None = None,
    recent: int = 0,
    idx: torch.Tensor | None = None,
    counts: torch.Tensor | None = None,
    *,
    pools: torch.Tensor | None = None,
) -> None:
    """Copies the chosen pages that are missing from the pool to their slots.

    With idx int32 (B, G, >= (n_sink + m + n_ring) p), counts int32 (B, G) and n int32 (B,) it also
    lists resident rows. A step of n rows attends to them, in order of position. pools: see
    ``check_pools``.
    """
    n_batch, n_resident, page, n_kv, d = pages.k.shape
    d_v, m, device = pages.v.shape[4], pages.chosen.shape[2], pages.k.device
    if idx is not None:
        assert n is not None and counts is not None
        width = (layout.n_sink + m + layout.n_ring) * page
        check("idx", idx, torch.int32, (n_batch, n_kv, None), device)
        check("counts", counts, torch.int32, (n_batch, n_kv), device)
        check("n", n, torch.int32, (n_batch,), device)
        if idx.shape[2] < width:
            raise ValueError(f"idx has room for {idx.shape[2]} rows: expected {width}")
    check_pools(pages, pools)
    _fetch_pages_kernel[(m + (idx is not None), n_batch * n_kv)](
        pages.pool, pools, pages.k, pages.v, pages.chosen, pages.slots, pages.missing, pages.state,
        n, idx, counts, recent, layout.n_sink, layout.n_ring, n_kv, n_resident,
        pages.pool.shape[1], m, 0 if idx is None else idx.stride(1),
        PAGE=page, D=d, D_V=d_v, BLOCK_D=_width(d, d), BLOCK_V=_width(d_v, d_v), ROWS=_rows(page),
        LIST=idx is not None, APART=pools is not None, num_warps=4,
    )  # fmt: skip
