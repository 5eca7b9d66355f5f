"""Rows of K and V in device memory, and how kernels read and write them: f16 or q8_0.

An f16 row is its d elements. A q8_0 row is that of cpu/attention/rows.py: one int8 an element, then
an f16 scale a block of 32 elements. It ends at a multiple of 16 bytes, so that loads are wide. Its
type is uint8, and d is a multiple of 16. A row with d = 80 has 80 bytes of quants, 6 bytes of
scales (of 32, 32 and 16 elements) and 10 bytes without use. Elements are read as f16.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from sparsekv_cli.kernels.checks import check

QUANT_BLOCK = 32  # elements that share a scale
UNIT = 16  # a row has a multiple of so many bytes; d is a multiple of it
TYPES = (torch.float16, torch.uint8)


class NewRow(NamedTuple):
    """The rows that a decode step adds to K and V, one a sequence: row n - 1 of n."""

    k: torch.Tensor  # f32 (B, G, d)
    v: torch.Tensor  # f32 (B, G, d_v)


def row_items(d: int, dtype: torch.dtype) -> int:
    """Returns the items of a row of d elements in this type: row_items(128, uint8) is 144."""
    if dtype == torch.float16:
        return d
    if d % UNIT:
        raise ValueError(f"q8_0 rows of {d} elements: expected a multiple of {UNIT}")
    return -(-(d + 2 * -(-d // QUANT_BLOCK)) // UNIT) * UNIT


def row_elements(x: torch.Tensor) -> int:
    """Returns d of rows (..., items): the reverse of ``row_items``."""
    n = x.shape[-1]
    if x.dtype == torch.float16:
        return n
    return n - UNIT * -(-n // (QUANT_BLOCK * UNIT // 2 + UNIT))


def check_rows(
    name: str,
    x: torch.Tensor,
    shape: tuple[int | None, int | None, int | None],
    d: int | None,
    device: torch.device,
) -> None:
    """Raises ValueError unless x has rows of d elements, (B, G, capacity) of any strides."""
    items = None if d is None else row_items(d, x.dtype)
    check(name, x, TYPES, (*shape, items), device, strided=True)


def check_new(
    new: NewRow, k: torch.Tensor, v: torch.Tensor, d: int, device: torch.device | None = None
) -> None:
    """Raises ValueError unless ``new`` fits the rows k (B, G, capacity) and v.

    d: elements of a new key; a row of k may have fewer. device: the device of k and v; None: the
    row's.
    """
    n_batch, n_kv_head, capacity, _ = v.shape
    device = new.k.device if device is None else device
    d_v = row_elements(v)
    check("new.k", new.k, torch.float32, (n_batch, n_kv_head, d), new.k.device)
    check("new.v", new.v, torch.float32, (n_batch, n_kv_head, d_v), new.k.device)
    check_rows("k", k, (n_batch, n_kv_head, capacity), None, device)
    check_rows("v", v, (n_batch, n_kv_head, None), d_v, device)


def pack_rows(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Returns x (..., d) as rows (..., items) of ``dtype``, rounded as on the CPU."""
    if dtype == torch.float16:
        return x.to(dtype)
    d, items = x.shape[-1], row_items(x.shape[-1], dtype)
    blocks = torch.nn.functional.pad(x.float(), (0, -d % QUANT_BLOCK))
    blocks = blocks.unflatten(-1, (-1, QUANT_BLOCK))
    # A tensor, because a division by a number may become a product with its inverse.
    scale = blocks.abs().amax(-1) / torch.full((), 127.0, device=x.device)
    half = scale.to(torch.float16)
    inverse = torch.where(half == 0, 0.0, 1 / scale)
    quants = (blocks * inverse[..., None]).round().to(torch.int8).flatten(-2)[..., :d]
    rows = torch.zeros(*x.shape[:-1], items, dtype=dtype, device=x.device)
    rows[..., :d] = quants.view(torch.uint8)
    rows[..., d : d + 2 * half.shape[-1]] = half.view(torch.uint8)
    return rows


def unpack_rows(rows: torch.Tensor) -> torch.Tensor:
    """Returns the elements of rows (..., items) as f16 (..., d). f16 rows are not copied."""
    if rows.dtype == torch.float16:
        return rows
    d = row_elements(rows)
    n_block, n_whole = -(-d // QUANT_BLOCK), d // QUANT_BLOCK
    whole = n_whole * QUANT_BLOCK
    scales = rows[..., d : d + 2 * n_block].contiguous().view(torch.float16)
    elements = torch.empty(*rows.shape[:-1], d, dtype=torch.float16, device=rows.device)
    elements.copy_(rows[..., :d].view(torch.int8))
    elements[..., :whole].unflatten(-1, (-1, QUANT_BLOCK)).mul_(scales[..., :n_whole, None])
    elements[..., whole:] *= scales[..., n_whole:]
    return elements


@triton.jit
def store_row(new_ptr, at, c, WIDTH: tl.constexpr):
    """Writes f32 elements c < WIDTH of a new row to the row ``at``; returns it as f16."""
    x = tl.load(new_ptr + c, mask=c < WIDTH, other=0.0)
    if at.dtype.element_ty == tl.uint8:
        SIZE: tl.constexpr = c.shape[0] if c.shape[0] < 32 else 32
        N_BLOCK: tl.constexpr = c.shape[0] // SIZE
        blocks = tl.reshape(x, [N_BLOCK, SIZE])
        peak = tl.max(tl.abs(blocks), 1)
        scale = peak / 127.0 + tl.sum(blocks * 0.0, 1)  # NaN if an element is NaN
        half = scale.to(tl.float16)
        inverse = tl.where(half == 0, 0.0, 1.0 / tl.where(half == 0, 1.0, scale))
        nearest = (blocks * inverse[:, None] + 12582912.0) - 12582912.0  # 1.5 * 2^23
        quants = nearest.to(tl.int8)
        flat = tl.reshape(quants, [c.shape[0]])
        tl.store(at + c, flat.to(tl.uint8, bitcast=True), mask=c < WIDTH)
        i = tl.arange(0, N_BLOCK)
        scales_at = (at + WIDTH).to(tl.pointer_type(tl.float16), bitcast=True)
        tl.store(scales_at + i, half, mask=i * SIZE < WIDTH)
        row = tl.reshape(quants.to(tl.float16) * half[:, None], [c.shape[0]])
    else:
        row = x.to(tl.float16)
        tl.store(at + c, row, mask=c < WIDTH)
    return row


@triton.jit
def load_row(at, c, WIDTH: tl.constexpr):
    """Returns elements c < WIDTH of the row ``at`` as f16, and 0 for others."""
    row = tl.load(at + c, mask=c < WIDTH, other=0)
    if at.dtype.element_ty == tl.uint8:
        SIZE: tl.constexpr = c.shape[0] if c.shape[0] < 32 else 32
        N_BLOCK: tl.constexpr = c.shape[0] // SIZE
        i = tl.arange(0, N_BLOCK)
        scales_at = (at + WIDTH).to(tl.pointer_type(tl.float16), bitcast=True)
        scales = tl.load(scales_at + i, mask=i * SIZE < WIDTH, other=0.0)
        quants = row.to(tl.int8, bitcast=True).to(tl.float16)
        blocks = tl.reshape(quants, [N_BLOCK, SIZE])
        row = tl.reshape(blocks * scales[:, None], [c.shape[0]])
    return row


@triton.jit
def load_rows(at, is_row, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Returns the rows ``at`` (N,) where ``is_row``, f16 (N, BLOCK); 0 in other places."""
    c = tl.arange(0, BLOCK)
    mask = is_row[:, None] & (c < WIDTH)[None, :]
    rows = tl.load(at[:, None] + c[None, :], mask=mask, other=0)
    if at.dtype.element_ty == tl.uint8:
        SIZE: tl.constexpr = BLOCK if BLOCK < 32 else 32
        N_BLOCK: tl.constexpr = BLOCK // SIZE
        i = tl.arange(0, N_BLOCK)
        scales_at = (at + WIDTH).to(tl.pointer_type(tl.float16), bitcast=True)
        is_scale = is_row[:, None] & (i * SIZE < WIDTH)[None, :]
        scales = tl.load(scales_at[:, None] + i[None, :], mask=is_scale, other=0.0)
        wide = tl.broadcast_to(scales[:, :, None], [at.shape[0], N_BLOCK, SIZE])
        rows = rows.to(tl.int8, bitcast=True).to(tl.float16)
        rows *= tl.reshape(wide, [at.shape[0], BLOCK])
    return rows


@triton.jit
def _store_rows_kernel(
    k_new_ptr, v_new_ptr, n_ptr, k_ptr, v_ptr, n_slot, n_kv_head,
    stride_kb, stride_kg, stride_kn, stride_vb, stride_vg, stride_vn,
    D: tl.constexpr, D_V: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
    RING: tl.constexpr,
):  # fmt: skip
    unit = tl.program_id(0)
    b, g = (unit // n_kv_head).to(tl.int64), (unit % n_kv_head).to(tl.int64)
    row = (tl.load(n_ptr + b) - 1).to(tl.int64)
    if RING:
        row %= n_slot
    k_at = k_ptr + b * stride_kb + g * stride_kg + row * stride_kn
    v_at = v_ptr + b * stride_vb + g * stride_vg + row * stride_vn
    store_row(k_new_ptr + unit * D, k_at, tl.arange(0, BLOCK_D), D)
    store_row(v_new_ptr + unit * D_V, v_at, tl.arange(0, BLOCK_V), D_V)


def store_rows(
    new: NewRow, k: torch.Tensor, v: torch.Tensor, n: torch.Tensor, n_slot: int = 0
) -> None:
    """Writes new rows to places n - 1 of k and v (B, G, capacity); n int32 (B,).

    n_slot: if it is not 0, row i lies in slot i % n_slot.
    """
    n_batch, n_kv_head, d = new.k.shape
    d_v = new.v.shape[2]
    check_new(new, k, v, d)
    check("n", n, torch.int32, (n_batch,), new.k.device)
    _store_rows_kernel[(n_batch * n_kv_head,)](
        *new, n, k, v, n_slot, n_kv_head, *k.stride()[:3], *v.stride()[:3], D=d, D_V=d_v,
        BLOCK_D=max(16, triton.next_power_of_2(d)), BLOCK_V=max(16, triton.next_power_of_2(d_v)),
        RING=n_slot > 0, num_warps=2,
    )  # fmt: skip
