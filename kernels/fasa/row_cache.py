"""FASA-M's row cache: recently chosen rows stay on the GPU, others are fetched from the host.

V and the dims of K that are not dominant lie in pinned memory of the host (fasa/chunks.py). Each kv
head has as many slots on the device as its query heads can choose rows in a step. A chosen row
without a slot is fetched over the bus into a slot whose row no head has chosen. Slots are reused in
their order.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from sparsekv_cli.kernels.checks import check, check_on_host

FETCHED = 16  # rows that a program fetches from the host
# Columns of ``state``: launches of ``place_rows`` so far, the slot that is reused next, and the
# number of slots to fill.
CLOCK, HAND, N_MISSING, N_STATE = (tl.constexpr(i) for i in range(4))
# Columns of ``statistics``: chosen rows that had a slot, and rows that were fetched.
HIT, RECALLED, N_STATISTICS = (tl.constexpr(i) for i in range(3))
NO_ROW = tl.constexpr(-1)


class Resident(NamedTuple):
    """The slots of B sequences: G kv heads, S slots each."""

    k: torch.Tensor  # f16 (B, G, S, d), the dominant dims first
    v: torch.Tensor  # f16 (B, G, S, d_v)
    slot_of: torch.Tensor  # int32 (B, G, capacity): the slot that holds a row, or -1
    row_in: torch.Tensor  # int32 (B, G, S): the row in a slot, or -1
    used: torch.Tensor  # int32 (B, G, S): CLOCK when a slot's row was last chosen
    free: torch.Tensor  # int32 (B, G, S): scratch of a launch
    missing: torch.Tensor  # int32 (B, G, S): the slots to fill
    state: torch.Tensor  # int32 (B, G, N_STATE)
    statistics: torch.Tensor  # int64 (B, G, N_STATISTICS)


def empty_resident(
    n_batch: int, n_kv_head: int, n_slot: int, d: int, d_v: int, capacity: int, device: torch.device
) -> Resident:
    """Returns slots without rows, for a context of at most ``capacity`` rows."""
    heads = n_batch, n_kv_head

    def numbers(*shape: int, fill: int = 0, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.full((*heads, *shape), fill, dtype=dtype, device=device)

    return Resident(
        k=torch.zeros(*heads, n_slot, d, dtype=torch.float16, device=device),
        v=torch.zeros(*heads, n_slot, d_v, dtype=torch.float16, device=device),
        slot_of=numbers(capacity, fill=-1),
        row_in=numbers(n_slot, fill=-1),
        used=numbers(n_slot, fill=-1),
        free=numbers(n_slot),
        missing=numbers(n_slot),
        state=numbers(N_STATE.value),
        statistics=numbers(N_STATISTICS.value, dtype=torch.int64),
    )


@triton.jit
def _place_rows_kernel(
    idx_ptr, counts_ptr, n_ptr, slot_of_ptr, row_in_ptr, used_ptr, free_ptr, missing_ptr,
    state_ptr, statistics_ptr, places_ptr, m, n_slot, capacity, n_kv_head, stride_ib, stride_iu,
    GROUP: tl.constexpr, BLOCK: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """One program takes the lists of a kv head one after another."""
    unit = tl.program_id(0)
    b, g = (unit // n_kv_head).to(tl.int64), unit % n_kv_head
    unit = unit.to(tl.int64)
    slot_of_at, row_in_at = slot_of_ptr + unit * capacity, row_in_ptr + unit * n_slot
    used_at, free_at = used_ptr + unit * n_slot, free_ptr + unit * n_slot
    state_at, statistics_at = state_ptr + unit * N_STATE, statistics_ptr + unit * N_STATISTICS
    lane, lane_s = tl.arange(0, BLOCK), tl.arange(0, BLOCK_S)
    now = tl.load(state_at + CLOCK) + 1
    # An interrupted step may have left another row in the slot of the newest row.
    newest = tl.load(n_ptr + b) - 1
    stale = tl.load(slot_of_at + newest)
    tl.store(row_in_at + tl.maximum(stale, 0), NO_ROW, mask=stale >= 0)
    tl.store(slot_of_at + newest, NO_ROW)
    tl.debug_barrier()
    for t in range(GROUP):
        count = tl.load(counts_ptr + unit * GROUP + t)
        idx_at = idx_ptr + b * stride_ib + (g * GROUP + t) * stride_iu
        for start in range(0, count, BLOCK):
            j = start + lane
            row = tl.load(idx_at + j, mask=j < count, other=0)
            slot = tl.load(slot_of_at + row, mask=j < count, other=NO_ROW)
            tl.store(used_at + slot, tl.zeros_like(slot) + now, mask=slot >= 0)
    tl.debug_barrier()
    hand = tl.load(state_at + HAND)
    n_free, n_hit = 0, 0
    for start in range(0, n_slot, BLOCK_S):
        j = start + lane_s
        slot = (hand + j) % n_slot
        used = tl.load(used_at + slot, mask=j < n_slot, other=now)
        is_free = (used < now).to(tl.int32)
        tl.store(free_at + n_free + tl.cumsum(is_free, 0) - 1, slot, mask=is_free > 0)
        n_free += tl.sum(is_free, 0)
        n_hit += tl.sum(((used == now) & (j < n_slot)).to(tl.int32), 0)
    tl.debug_barrier()
    n_missing = 0
    for t in range(GROUP):
        count = tl.load(counts_ptr + unit * GROUP + t)
        idx_at = idx_ptr + b * stride_ib + (g * GROUP + t) * stride_iu
        for start in range(0, count, BLOCK):
            j = start + lane
            row = tl.load(idx_at + j, mask=j < count, other=0)
            slot = tl.load(slot_of_at + row, mask=j < count, other=0)
            is_new = (j < count) & (slot < 0)
            order = n_missing + tl.cumsum(is_new.to(tl.int32), 0) - 1  # below n_free
            new = tl.load(free_at + order, mask=is_new, other=0)
            old = tl.load(row_in_at + new, mask=is_new, other=NO_ROW)
            tl.debug_barrier()  # every warp knows which rows are new
            tl.store(slot_of_at + old, tl.full([BLOCK], NO_ROW, tl.int32), mask=old >= 0)
            tl.store(slot_of_at + row, new, mask=is_new)
            tl.store(row_in_at + new, row, mask=is_new)
            tl.store(used_at + new, tl.zeros_like(new) + now, mask=is_new)
            tl.store(missing_ptr + unit * n_slot + order, new, mask=is_new)
            at = places_ptr + (unit * GROUP + t) * m + j
            tl.store(at, tl.where(is_new, new, slot), mask=j < count)
            n_missing += tl.sum(is_new.to(tl.int32), 0)
            tl.debug_barrier()  # the next list must find these rows
    last = tl.load(free_at + tl.maximum(n_missing - 1, 0))
    tl.store(state_at + HAND, (last + 1) % n_slot, mask=n_missing > 0)
    tl.store(state_at + CLOCK, now)
    tl.store(state_at + N_MISSING, n_missing)
    tl.store(statistics_at + HIT, tl.load(statistics_at + HIT) + n_hit)
    tl.store(statistics_at + RECALLED, tl.load(statistics_at + RECALLED) + n_missing)


def place_rows(
    resident: Resident,
    idx: torch.Tensor,
    counts: torch.Tensor,
    n: torch.Tensor,
    places: torch.Tensor,
) -> None:
    """Assigns slots to the rows that query heads have chosen. ``fetch_rows`` fills the slots.

    idx int32 (B, H, m): lists of counts int32 (B, H) rows, no row twice in a list; n int32 (B,):
    rows in context. places int32 (B, H, m): set to the slots of ``idx``.
    """
    n_batch, n_head, m = idx.shape
    n_kv_head, n_slot, device = resident.k.shape[1], resident.k.shape[2], idx.device
    capacity = resident.slot_of.shape[2]
    group = n_head // n_kv_head
    check("idx", idx, torch.int32, (None, None, None), device, strided=True)
    check("counts", counts, torch.int32, (n_batch, n_head), device)
    check("n", n, torch.int32, (n_batch,), device)
    check("slot_of", resident.slot_of, torch.int32, (n_batch, n_kv_head, None), device)
    for name in ("row_in", "used", "free", "missing"):
        shape = n_batch, n_kv_head, n_slot
        check(name, getattr(resident, name), torch.int32, shape, device)
    check("state", resident.state, torch.int32, (n_batch, n_kv_head, N_STATE.value), device)
    shape = n_batch, n_kv_head, N_STATISTICS.value
    check("statistics", resident.statistics, torch.int64, shape, device)
    if n_slot < min(group * m, capacity):
        raise ValueError(f"k has {n_slot} slots: expected {min(group * m, capacity)}")
    check("places", places, torch.int32, (n_batch, n_head, m), device)
    block, block_s = (min(512, max(32, triton.next_power_of_2(size))) for size in (m, n_slot))
    _place_rows_kernel[(n_batch * n_kv_head,)](
        idx, counts, n, *resident[2:], places, m, n_slot, capacity, n_kv_head, *idx.stride()[:2],
        GROUP=group, BLOCK=block, BLOCK_S=block_s, num_warps=4,
        maxnreg=96,  # programs are few, so registers need not be saved: Triton 3.6's ptxas spills
    )  # fmt: skip


@triton.jit
def _fetch_rows_kernel(
    missing_ptr, row_in_ptr, state_ptr, dom_ptr, rest_ptr, v_ptr, k_out_ptr, v_out_ptr, n_kv_head,
    n_slot, stride_db, stride_dg, stride_dc, stride_rb, stride_rg, stride_rn, stride_vb, stride_vg,
    stride_vn, C: tl.constexpr, N_REST: tl.constexpr, D_V: tl.constexpr, BLOCK_C: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    unit = tl.program_id(1).to(tl.int64)
    b, g = unit // n_kv_head, unit % n_kv_head
    count = tl.load(state_ptr + unit * N_STATE + N_MISSING)
    first = tl.program_id(0) * BLOCK
    if first < count:
        j = first + tl.arange(0, BLOCK)
        is_row = (j < count)[:, None]
        slot = tl.load(missing_ptr + unit * n_slot + j, mask=j < count, other=0)
        row = tl.load(row_in_ptr + unit * n_slot + slot, mask=j < count, other=0)
        row = row.to(tl.int64)[:, None]
        c_r, c_v = tl.arange(0, BLOCK_R)[None, :], tl.arange(0, BLOCK_V)[None, :]
        rest_at = rest_ptr + b * stride_rb + g * stride_rg
        v_at = v_ptr + b * stride_vb + g * stride_vg
        # Loads from the host come first, because they take longest.
        rest = tl.load(rest_at + row * stride_rn + c_r, mask=is_row & (c_r < N_REST), other=0.0)
        v = tl.load(v_at + row * stride_vn + c_v, mask=is_row & (c_v < D_V), other=0.0)
        c = tl.arange(0, BLOCK_C)[None, :]
        dom_at = dom_ptr + b * stride_db + g * stride_dg + c.to(tl.int64) * stride_dc
        dom = tl.load(dom_at + row, mask=is_row & (c < C), other=0.0)
        to = (unit * n_slot + slot)[:, None]
        k_out = k_out_ptr + to * (C + N_REST)
        tl.store(k_out + c, dom, mask=is_row & (c < C))
        tl.store(k_out + C + c_r, rest, mask=is_row & (c_r < N_REST))
        tl.store(v_out_ptr + to * D_V + c_v, v, mask=is_row & (c_v < D_V))


def fetch_rows(resident: Resident, dom: torch.Tensor, rest: torch.Tensor, v: torch.Tensor) -> None:
    """Fills the slots that ``place_rows`` has assigned.

    dom f16 (B, G, C, capacity) on the device; rest f16 (B, G, capacity, d_rest) and v f16
    (B, G, capacity, d_v) in pinned memory of the host.
    """
    n_batch, n_kv_head, n_slot, d = resident.k.shape
    n_dim, n_rest, d_v, device = dom.shape[2], rest.shape[3], v.shape[3], dom.device
    check("dom", dom, torch.float16, (n_batch, n_kv_head, d - n_rest, None), device, strided=True)
    check_on_host("rest", rest, (n_batch, n_kv_head, None, n_rest), device)
    check_on_host("v", v, (n_batch, n_kv_head, None, d_v), device)
    check("resident.k", resident.k, torch.float16, (n_batch, n_kv_head, n_slot, d), device)
    check("resident.v", resident.v, torch.float16, (n_batch, n_kv_head, n_slot, d_v), device)
    _fetch_rows_kernel[(triton.cdiv(n_slot, FETCHED), n_batch * n_kv_head)](
        resident.missing, resident.row_in, resident.state, dom, rest, v, resident.k, resident.v,
        n_kv_head, n_slot, *dom.stride()[:3], *rest.stride()[:3], *v.stride()[:3],
        C=n_dim, N_REST=n_rest, D_V=d_v,
        BLOCK_C=triton.next_power_of_2(n_dim), BLOCK_R=triton.next_power_of_2(max(1, n_rest)),
        BLOCK_V=triton.next_power_of_2(d_v), BLOCK=FETCHED, num_warps=4,
    )  # fmt: skip
