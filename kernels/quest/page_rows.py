"""Lists the rows of chosen pages for attention, on the GPU."""

import torch
import triton
import triton.language as tl

from sparsekv_cli.kernels.checks import check

BLOCK = 256  # rows that one program writes


@triton.jit
def _page_rows_kernel(
    chosen_ptr, sizes_ptr, n_ptr, idx_ptr, counts_ptr, n_list, n_sinks, stride_cb, stride_cu,
    stride_ib, stride_iu,
    PAGE: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    unit = tl.program_id(1)
    b, u = (unit // n_list).to(tl.int64), (unit % n_list).to(tl.int64)
    n, n_chosen = tl.load(n_ptr + b), tl.load(sizes_ptr + unit)
    sinks = tl.minimum(n_sinks, n)
    chosen_at = chosen_ptr + b * stride_cb + u * stride_cu
    # Pages ascend, so page i starts at row i PAGE or later: the first few hold all the sinks.
    i = tl.arange(0, BLOCK_S)
    pages = tl.load(chosen_at + i, mask=i < n_chosen, other=0)
    twice = tl.minimum(tl.maximum(sinks - pages * PAGE, 0), PAGE)
    n_twice = tl.sum(tl.where(i < n_chosen, twice, 0), 0)
    window = tl.maximum((n - 1) // PAGE * PAGE, sinks)
    n_before = sinks + n_chosen * PAGE - n_twice
    count = n_before + n - window
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    of_pages = tl.maximum(place - sinks + n_twice, 0)
    is_paged = (place >= sinks) & (place < n_before)
    of_page = tl.load(chosen_at + of_pages // PAGE, mask=is_paged, other=0)
    row = tl.where(is_paged, of_page * PAGE + of_pages % PAGE, window + place - n_before)
    row = tl.where(place < sinks, place, row)
    tl.store(idx_ptr + b * stride_ib + u * stride_iu + place, row, mask=place < count)
    if tl.program_id(0) == 0:
        tl.store(counts_ptr + unit, count)


def page_rows(
    chosen: torch.Tensor,
    sizes: torch.Tensor,
    n: torch.Tensor,
    page: int,
    n_sinks: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Lists the rows of the chosen pages, the first n_sinks rows and the current page, ascending.

    chosen int32 (B, U, m): sizes int32 (B, U) whole pages before that of row n - 1, ascending; n
    int32 (B,). Returns idx int32 (B, U, n_sinks + (m + 1) page) and the numbers of rows in it,
    counts int32 (B, U). The result is that of select_pages in cpu/quest/pages.py.
    """
    n_batch, n_list, m = chosen.shape
    device, width = chosen.device, n_sinks + (m + 1) * page
    check("chosen", chosen, torch.int32, (None, None, None), device, strided=True)
    check("sizes", sizes, torch.int32, (n_batch, n_list), device)
    check("n", n, torch.int32, (n_batch,), device)
    idx = torch.empty(n_batch, n_list, width, dtype=torch.int32, device=device)
    counts = torch.empty(n_batch, n_list, dtype=torch.int32, device=device)
    _page_rows_kernel[(triton.cdiv(width, BLOCK), n_batch * n_list)](
        chosen, sizes, n, idx, counts, n_list, n_sinks, *chosen.stride()[:2], *idx.stride()[:2],
        PAGE=page, BLOCK_S=triton.next_power_of_2(max(1, triton.cdiv(n_sinks, page))), BLOCK=BLOCK,
        num_warps=2,
    )  # fmt: skip
    return idx, counts
