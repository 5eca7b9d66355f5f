"""FreeKV's arrays on a GPU: K and V of a layer in pages, on the host and on the device.

    resident   sinks' pages, the window's ring, slots   NHD (page, p, kv head, d), K and V apart
    pool       all pages between sinks and window       HND (page, kv head, K and V, p, d), pinned

Names are those of cpu/freekv/pages.py, with a leading dimension of B sequences. Slots are an LRU
cache of pages for each kv head. A kv head's part of a page is contiguous in the pool.
"""

from typing import NamedTuple

import torch
import triton.language as tl

from sparsekv_cli.kernels.checks import check
from sparsekv_cli.kernels.pinned import zeros_on_host

# Columns of ``state`` as in cpu/freekv/pages.py, and the number of pages in sinks and pool.
CLOCK, N_CHOSEN, QUERY, END, BEST, OFFLOADED, N_STATE = (tl.constexpr(i) for i in range(7))
# Columns of ``statistics``.
HIT, RECALLED, SENT, SCORED, CORRECTED, STEPPED, ATTENDED, N_STATISTICS = (
    tl.constexpr(i) for i in range(8)
)
NO_PAGE = tl.constexpr(-1)


class PageTensors(NamedTuple):
    """One layer of B sequences: G kv heads, pages of p rows, m pages chosen at most."""

    pool: torch.Tensor  # f16 (B, n_page, G, p (d + d_v)), pinned host memory; page n_sink + i at i
    k: torch.Tensor  # f16 (B, n_resident, p, G, d)
    v: torch.Tensor  # f16 (B, n_resident, p, G, d_v)
    hi: torch.Tensor  # f16 (B, G, n_sink + n_page, d), see quest/pages.py
    lo: torch.Tensor  # f16 (B, G, n_sink + n_page, d)
    slot_of: torch.Tensor  # int32 (B, G, n_sink + n_page): the slot that holds a page, or -1
    page_in: torch.Tensor  # int32 (B, G, n_slot): the page in a slot, or -1
    stamps: torch.Tensor  # int32 (B, G, n_slot): when a slot was last used
    chosen: torch.Tensor  # int32 (B, G, m): pages chosen, ascending
    slots: torch.Tensor  # int32 (B, G, m): the slots of the chosen pages
    missing: torch.Tensor  # int32 (B, G, m): whether a chosen page must still be fetched
    state: torch.Tensor  # int32 (B, G, N_STATE)
    statistics: torch.Tensor  # int64 (B, G, N_STATISTICS)


class Layout(NamedTuple):
    """Numbers of pages at the front of ``PageTensors.k``, and the kind of summaries."""

    n_sink: int
    n_ring: int
    meanstd: bool


def empty_pages(
    n_batch: int, n_kv_head: int, d: int, d_v: int, page: int, n_page: int, n_slot: int, m: int,
    layout: Layout, device: torch.device, n_pool: int = 0,
) -> PageTensors:  # fmt: skip
    """Returns arrays for n_page pages in addition to the sinks', n_slot slots, m pages chosen.

    n_pool: pages that the host has room for, if more than n_page.
    """
    heads = n_batch, n_kv_head
    n_resident = layout.n_sink + layout.n_ring + n_slot

    def halves(*shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.float16, device=device)

    def numbers(*shape: int, fill: int = 0, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.full((*heads, *shape), fill, dtype=dtype, device=device)

    return PageTensors(
        pool=zeros_on_host((n_batch, max(n_page, n_pool), n_kv_head, page * (d + d_v)), device),
        k=halves(n_batch, n_resident, page, n_kv_head, d),
        v=halves(n_batch, n_resident, page, n_kv_head, d_v),
        hi=halves(*heads, layout.n_sink + n_page, d),
        lo=halves(*heads, layout.n_sink + n_page, d),
        slot_of=numbers(layout.n_sink + n_page, fill=-1),
        page_in=numbers(n_slot, fill=-1),
        stamps=numbers(n_slot),
        chosen=numbers(m),
        slots=numbers(m),
        missing=numbers(m),
        state=numbers(N_STATE.value),
        statistics=numbers(N_STATISTICS.value, dtype=torch.int64),
    )  # fmt: skip


def check_pages(pages: PageTensors, layout: Layout) -> None:
    """Raises ValueError unless all arrays fit each other."""
    n_batch, n_resident, page, n_kv, d = pages.k.shape
    d_v, n_page, m = pages.v.shape[4], pages.hi.shape[2], pages.chosen.shape[2]
    n_slot, device = n_resident - layout.n_sink - layout.n_ring, pages.k.device
    f16, i32, heads = torch.float16, torch.int32, (n_batch, n_kv)
    expected = {
        "k": (f16, (n_batch, n_resident, page, n_kv, d)),
        "v": (f16, (n_batch, n_resident, page, n_kv, d_v)),
        "hi": (f16, (*heads, n_page, d)),
        "lo": (f16, (*heads, n_page, d)),
        "slot_of": (i32, (*heads, n_page)),
        "page_in": (i32, (*heads, n_slot)),
        "stamps": (i32, (*heads, n_slot)),
        "chosen": (i32, (*heads, m)),
        "slots": (i32, (*heads, m)),
        "missing": (i32, (*heads, m)),
        "state": (i32, (*heads, N_STATE.value)),
        "statistics": (torch.int64, (*heads, N_STATISTICS.value)),
    }
    for name, (dtype, shape) in expected.items():
        check(name, getattr(pages, name), dtype, shape, device)
    check("pool", pages.pool, f16, (n_batch, None, n_kv, page * (d + d_v)), pages.pool.device)
    if device.type == "cuda" and not pages.pool.is_pinned():
        raise ValueError("pool is pageable: expected pinned host memory")
    if n_slot < m:
        raise ValueError(f"k has {n_slot} slots: expected one for each of {m} chosen pages")
