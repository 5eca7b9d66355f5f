"""Products of quantised matrices with a few vectors, and their dequantisation, on the GPU.

A decode step reads every weight once, so bytes in flight and instructions a weight decide its
speed: at 4.5 bits a weight a GPU has four instructions for each at the speed of its memory
(weights/fields.py). Scales are applied to sums of 16 or 32 products. Up to ``MAX_FUSED`` vectors
use f32 arithmetic; more go to the tensor cores, with weights and inputs in TF32 and sums in f32.
Layout: weights/packed.py.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sparsekv_cli.kernels.checks import check
from sparsekv_cli.kernels.weights.fields import (
    EXPONENT,
    constants_of,
    group_values,
    planes_of,
    times_field,
)
from sparsekv_cli.kernels.weights.packed import FLOATS, PACKINGS, PackedMatrix

MAX_BATCH = 16
MAX_FUSED = 2  # vectors above which the tensor cores take fewer instructions
MATMUL_ROWS = 64  # rows of a program of the tensor-core kernel: they share its inputs
MATMUL_UNITS = 4  # units of a step of that kernel: more do not fit the registers
MATMUL_WARPS, MATMUL_STAGES = 4, 3  # of that kernel, and of its pipeline of loads
PROGRAMS = 512  # wanted at least, a few for each multiprocessor


@triton.jit
def _matvec_kernel(
    low_ptr, high_ptr, scale_ptr, minimum_ptr, super_scale_ptr, super_minimum_ptr, x_ptr, out_ptr,
    n_batch, n_rows, n_unit, stride_xb, stride_ob, exponent,
    BATCH: tl.constexpr, ROWS: tl.constexpr, UNITS: tl.constexpr, LOW_BITS: tl.constexpr,
    HIGH_BITS: tl.constexpr, ZERO: tl.constexpr, HALVES: tl.constexpr, MINIMUM: tl.constexpr,
    SUPER: tl.constexpr,
):  # fmt: skip
    FIELDS: tl.constexpr = 32 // LOW_BITS  # of a word
    PER_HALF: tl.constexpr = FIELDS // HALVES
    SPLIT: tl.constexpr = 32 // (4 * FIELDS)  # units a group of 32 elements
    batch = tl.arange(0, BATCH)[:, None, None]
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[None, :, None]
    word, unit = tl.arange(0, 4 * UNITS)[None, None, :], tl.arange(0, UNITS)[None, None, :]
    n_group = n_unit // SPLIT
    sums = tl.zeros((BATCH, ROWS, UNITS), tl.float32)
    for start in range(0, n_unit, UNITS):
        has_word = start + word // 4 < n_unit
        mask = has_word & (row < n_rows)
        at = row * (4 * n_unit) + start * 4 + word
        # Words without a value need no zeros: any bits are finite, and their inputs are 0.
        low = tl.load(low_ptr + at, mask=mask, eviction_policy="evict_first")
        low = low.to(tl.uint32, bitcast=True)
        high = low
        if HIGH_BITS > 0:  # laid out as ``low`` is, four a thread
            at = tl.max_contiguous(at, [1, 1, 4])
            high = tl.load(high_ptr + at, mask=mask, eviction_policy="evict_first").to(tl.uint32)
        x_at = x_ptr + batch * stride_xb + (start + word // 4) * (4 * FIELDS) + word % 4
        group = (start + unit) // SPLIT
        of_rows = (start + unit < n_unit) & (row < n_rows)
        x_sum = tl.zeros((BATCH, 1, 4 * UNITS), tl.float32)
        for half in tl.static_range(HALVES):
            products = tl.zeros((BATCH, ROWS, 4 * UNITS), tl.float32)
            for i in tl.static_range(PER_HALF):
                x = tl.load(
                    x_at + 4 * (half * PER_HALF + i), mask=has_word & (batch < n_batch), other=0
                )
                x = x.to(tl.float32)
                products += times_field(
                    low, high, x, exponent, half * PER_HALF + i, LOW_BITS, HIGH_BITS, ZERO
                )
                if MINIMUM:
                    x_sum += x
            scale = group_values(
                scale_ptr, super_scale_ptr, row, group, half, n_group, of_rows, SUPER, HALVES
            )
            sums += tl.sum(tl.reshape(products, (BATCH, ROWS, UNITS, 4)), axis=3) * scale
        if MINIMUM:
            minimum = group_values(
                minimum_ptr, super_minimum_ptr, row, group, 0, n_group, of_rows, SUPER, 1
            )
            if SUPER:
                minimum = -minimum
            sums += tl.sum(tl.reshape(x_sum, (BATCH, 1, UNITS, 4)), axis=3) * minimum
    out = tl.sum(sums, axis=2)[:, :, None]
    tl.store(out_ptr + batch * stride_ob + row, out, mask=(batch < n_batch) & (row < n_rows))


@triton.jit
def _matvec_float_kernel(
    w_ptr, x_ptr, out_ptr, n_batch, n_rows, n_columns, stride_w, stride_xb, stride_ob,
    BATCH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    batch = tl.arange(0, BATCH)[:, None, None]
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[None, :, None]
    column = tl.arange(0, COLUMNS)[None, None, :]
    sums = tl.zeros((BATCH, ROWS, COLUMNS), tl.float32)
    for start in range(0, n_columns, COLUMNS):
        c = start + column
        mask = (c < n_columns) & (row < n_rows)
        w = tl.load(w_ptr + row * stride_w + c, mask=mask, other=0, eviction_policy="evict_first")
        mask = (c < n_columns) & (batch < n_batch)
        x = tl.load(x_ptr + batch * stride_xb + c, mask=mask, other=0)
        sums += w.to(tl.float32) * x.to(tl.float32)
    out = tl.sum(sums, axis=2)[:, :, None]
    tl.store(out_ptr + batch * stride_ob + row, out, mask=(batch < n_batch) & (row < n_rows))


@triton.jit
def _rounded(x):
    """f32 rounded to the 10 bits of mantissa that tensor cores keep; they would cut them off."""
    bits = (x.to(tl.uint32, bitcast=True) + 0x1000) & 0xFFFFE000
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _matmul_kernel(
    low_ptr, high_ptr, scale_ptr, minimum_ptr, super_scale_ptr, super_minimum_ptr, x_ptr, parts_ptr,
    n_batch, n_rows, n_unit, units_a_part, stride_xb, exponent,
    BATCH: tl.constexpr, ROWS: tl.constexpr, UNITS: tl.constexpr, LOW_BITS: tl.constexpr,
    HIGH_BITS: tl.constexpr, ZERO: tl.constexpr, HALVES: tl.constexpr, MINIMUM: tl.constexpr,
    SUPER: tl.constexpr,
):  # fmt: skip
    FIELDS: tl.constexpr = 32 // LOW_BITS
    PER_HALF: tl.constexpr = FIELDS // HALVES
    SPLIT: tl.constexpr = 32 // (4 * FIELDS)
    part = tl.program_id(1)
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    batch = tl.arange(0, BATCH)
    word, word_of_x = tl.arange(0, 4 * UNITS)[None, :], tl.arange(0, 4 * UNITS)[:, None]
    n_group = n_unit // SPLIT
    stop = tl.minimum(n_unit, (part + 1) * units_a_part)
    sums = tl.zeros((ROWS, BATCH), tl.float32)
    for start in range(part * units_a_part, stop, UNITS):
        mask = (start + word // 4 < stop) & (row < n_rows)
        at = row * (4 * n_unit) + start * 4 + word
        low = tl.load(low_ptr + at, mask=mask, other=0).to(tl.uint32, bitcast=True)
        high = low
        if HIGH_BITS > 0:
            high = tl.load(high_ptr + at, mask=mask, other=0).to(tl.uint32)
        group = (start + word // 4) // SPLIT
        minimum = tl.zeros((ROWS, 4 * UNITS), tl.float32)
        if MINIMUM:
            minimum = group_values(
                minimum_ptr, super_minimum_ptr, row, group, 0, n_group, mask, SUPER, 1
            )
            if SUPER:
                minimum = -minimum
        x_at = x_ptr + batch[None, :] * stride_xb
        x_at += (start + word_of_x // 4) * (4 * FIELDS) + word_of_x % 4
        x_mask = (start + word_of_x // 4 < stop) & (batch[None, :] < n_batch)
        for half in tl.static_range(HALVES):
            scale = group_values(
                scale_ptr, super_scale_ptr, row, group, half, n_group, mask, SUPER, HALVES
            )
            for i in tl.static_range(PER_HALF):
                w = (
                    times_field(
                        low, high, scale, exponent, half * PER_HALF + i, LOW_BITS, HIGH_BITS, ZERO
                    )
                    + minimum
                )
                x = tl.load(x_at + 4 * (half * PER_HALF + i), mask=x_mask, other=0).to(tl.float32)
                sums = tl.dot(_rounded(w), _rounded(x), sums, input_precision="tf32")
    at = (part * n_batch + batch[None, :]).to(tl.int64) * n_rows + row
    tl.store(parts_ptr + at, sums, mask=(row < n_rows) & (batch[None, :] < n_batch))


@triton.jit
def _matmul_float_kernel(
    w_ptr, x_ptr, parts_ptr, n_batch, n_rows, n_columns, columns_a_part, stride_w, stride_xb,
    BATCH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    part = tl.program_id(1)
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    batch, column = tl.arange(0, BATCH)[None, :], tl.arange(0, COLUMNS)
    stop = tl.minimum(n_columns, (part + 1) * columns_a_part)
    sums = tl.zeros((ROWS, BATCH), tl.float32)
    for start in range(part * columns_a_part, stop, COLUMNS):
        c, c_of_x = start + column[None, :], start + column[:, None]
        w = tl.load(w_ptr + row * stride_w + c, mask=(c < stop) & (row < n_rows), other=0)
        mask = (c_of_x < stop) & (batch < n_batch)
        x = tl.load(x_ptr + batch * stride_xb + c_of_x, mask=mask, other=0)
        w, x = w.to(tl.float32), x.to(tl.float32)
        sums = tl.dot(_rounded(w), _rounded(x), sums, input_precision="tf32")
    at = (part * n_batch + batch).to(tl.int64) * n_rows + row
    tl.store(parts_ptr + at, sums, mask=(row < n_rows) & (batch < n_batch))


@triton.jit
def _add_parts_kernel(parts_ptr, out_ptr, n, n_row, n_part, stride_ob, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for part in range(n_part):
        total += tl.load(parts_ptr + part * n + at, mask=at < n, other=0)
    tl.store(out_ptr + at // n_row * stride_ob + at % n_row, total, mask=at < n)


@triton.jit
def _dequantize_kernel(
    low_ptr, high_ptr, scale_ptr, minimum_ptr, super_scale_ptr, super_minimum_ptr, out_ptr,
    n_rows, n_unit, stride_o, exponent,
    ROWS: tl.constexpr, UNITS: tl.constexpr, LOW_BITS: tl.constexpr, HIGH_BITS: tl.constexpr,
    ZERO: tl.constexpr, HALVES: tl.constexpr, MINIMUM: tl.constexpr, SUPER: tl.constexpr,
):  # fmt: skip
    FIELDS: tl.constexpr = 32 // LOW_BITS
    PER_HALF: tl.constexpr = FIELDS // HALVES
    SPLIT: tl.constexpr = 32 // (4 * FIELDS)
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    word = tl.program_id(1) * (4 * UNITS) + tl.arange(0, 4 * UNITS)[None, :]
    mask = (word < 4 * n_unit) & (row < n_rows)
    at = row * (4 * n_unit) + word
    low = tl.load(low_ptr + at, mask=mask, other=0).to(tl.uint32, bitcast=True)
    high = low
    if HIGH_BITS > 0:
        high = tl.load(high_ptr + at, mask=mask, other=0).to(tl.uint32)
    unit = word // 4
    group, n_group = unit // SPLIT, n_unit // SPLIT
    minimum = tl.zeros((ROWS, 4 * UNITS), tl.float32)
    if MINIMUM:
        minimum = group_values(
            minimum_ptr, super_minimum_ptr, row, group, 0, n_group, mask, SUPER, 1
        )
        if SUPER:
            minimum = -minimum
    out_at = out_ptr + row * stride_o + unit * (4 * FIELDS) + word % 4
    for half in tl.static_range(HALVES):
        scale = group_values(
            scale_ptr, super_scale_ptr, row, group, half, n_group, mask, SUPER, HALVES
        )
        for i in tl.static_range(PER_HALF):
            w = (
                times_field(
                    low, high, scale, exponent, half * PER_HALF + i, LOW_BITS, HIGH_BITS, ZERO
                )
                + minimum
            )
            tl.store(out_at + 4 * (half * PER_HALF + i), w.to(out_ptr.dtype.element_ty), mask=mask)


def _warps_along(n: int, a_warp: int) -> int:
    """Warps that share n items of a row, ``a_warp`` each at a time, with few of them idle."""
    padded = {warps: -(-n // (warps * a_warp)) * warps * a_warp for warps in (4, 2, 1)}
    return next(warps for warps in padded if 10 * padded[warps] <= 11 * min(padded.values()))


def _rows_a_program(n_rows: int) -> int:
    """Rows that share the inputs a thread has loaded, as long as there are programs enough."""
    most = 4
    while most > 1 and n_rows < PROGRAMS * most:
        most //= 2
    return most


def _parts(n_rows: int, n_step: int) -> tuple[int, int]:
    """Steps of the inner loop in a program of the tensor-core kernels, and programs a row."""
    wanted = -(-PROGRAMS // -(-n_rows // MATMUL_ROWS))
    steps = -(-n_step // min(wanted, n_step))
    return steps, -(-n_step // steps)


def matvec_scratch(w: PackedMatrix, n_batch: int) -> torch.Tensor:
    """f32 scratch of ``matvec`` for B vectors; empty where it needs none."""
    if n_batch <= MAX_FUSED:
        return torch.empty(0, dtype=torch.float32, device=w.low.device)
    n_part = _parts(w.n_rows, -(-w.n_columns // _step_columns(w)))[1]
    shape = n_part, n_batch, w.n_rows
    return torch.empty(shape, dtype=torch.float32, device=w.low.device)


def _step_columns(w: PackedMatrix) -> int:
    """Columns of a step of the tensor-core kernels."""
    return 64 if w.name in FLOATS else MATMUL_UNITS * 128 // PACKINGS[w.name].low_bits


def matvec(
    w: PackedMatrix,
    x: torch.Tensor,
    out: torch.Tensor | None = None,
    scratch: torch.Tensor | None = None,
) -> torch.Tensor:
    """y f32 (B, rows) = x W^T for x (B, columns) f32, f16 or bf16, B from 1 to 16, summed in f32.

    Up to MAX_FUSED vectors: weights and inputs as they are. More: both rounded to 11 bits (TF32).
    out: f32 (B, rows), rows any stride apart; scratch: as ``matvec_scratch``.
    """
    n_batch, device = x.shape[0], w.low.device
    if not 1 <= n_batch <= MAX_BATCH:
        raise ValueError(f"x has {n_batch} rows: expected 1 to {MAX_BATCH}")
    dtypes = (torch.float32, torch.float16, torch.bfloat16)
    check("x", x, dtypes, (n_batch, w.n_columns), device, strided=True)
    if out is None:
        out = torch.empty(n_batch, w.n_rows, dtype=torch.float32, device=device)
    check("out", out, torch.float32, (n_batch, w.n_rows), device, strided=True)
    if n_batch <= MAX_FUSED:
        _matvec_fused(w, x, out)
        return out
    if scratch is None:
        scratch = matvec_scratch(w, n_batch)
    n_part = _matmul(w, x, scratch)
    n = n_batch * w.n_rows
    _add_parts_kernel[(triton.cdiv(n, 256),)](
        scratch, out, n, w.n_rows, n_part, out.stride(0), BLOCK=256, num_warps=2
    )
    return out


def _matvec_fused(w: PackedMatrix, x: torch.Tensor, out: torch.Tensor) -> None:
    n_batch, rows = x.shape[0], _rows_a_program(w.n_rows)
    batch = triton.next_power_of_2(n_batch)
    grid = (triton.cdiv(w.n_rows, rows),)
    if w.name in FLOATS:
        a_thread = 16 // w.low.itemsize
        warps = _warps_along(w.n_columns, 32 * a_thread)
        _matvec_float_kernel[grid](
            w.low, x, out, n_batch, w.n_rows, w.n_columns, w.low.stride(0), x.stride(0),
            out.stride(0), BATCH=batch, ROWS=rows, COLUMNS=32 * a_thread * warps, num_warps=warps,
        )  # fmt: skip
        return
    n_unit = w.low.shape[1] // 4
    warps = _warps_along(n_unit, 32)
    _matvec_kernel[grid](
        *planes_of(w), x, out, n_batch, w.n_rows, n_unit, x.stride(0), out.stride(0),
        EXPONENT, BATCH=batch, ROWS=rows, UNITS=32 * warps, **constants_of(w), num_warps=warps,
    )  # fmt: skip


def _matmul(w: PackedMatrix, x: torch.Tensor, scratch: torch.Tensor) -> int:
    """Products over parts of the columns, f32 (parts, B, rows); returns how many parts."""
    n_batch, columns = x.shape[0], _step_columns(w)
    steps, n_part = _parts(w.n_rows, -(-w.n_columns // columns))
    check("scratch", scratch, torch.float32, (n_part, n_batch, w.n_rows), w.low.device)
    grid = (triton.cdiv(w.n_rows, MATMUL_ROWS), n_part)
    if w.name in FLOATS:
        _matmul_float_kernel[grid](
            w.low, x, scratch, n_batch, w.n_rows, w.n_columns, steps * columns, w.low.stride(0),
            x.stride(0), BATCH=16, ROWS=MATMUL_ROWS, COLUMNS=columns,
            num_warps=MATMUL_WARPS, num_stages=MATMUL_STAGES,
        )  # fmt: skip
        return n_part
    n_unit = w.low.shape[1] // 4
    units = MATMUL_UNITS
    _matmul_kernel[grid](
        *planes_of(w), x, scratch, n_batch, w.n_rows, n_unit, steps * units, x.stride(0),
        EXPONENT, BATCH=16, ROWS=MATMUL_ROWS, UNITS=units, **constants_of(w),
        num_warps=MATMUL_WARPS, num_stages=MATMUL_STAGES,
    )  # fmt: skip
    return n_part


def dequantize(
    w: PackedMatrix, dtype: torch.dtype = torch.bfloat16, out: torch.Tensor | None = None
) -> torch.Tensor:
    """W (rows, columns) as ``dtype``, f32, f16 or bf16, each weight rounded once, for prefill."""
    if out is None:
        out = torch.empty(w.n_rows, w.n_columns, dtype=dtype, device=w.low.device)
    if dtype not in (torch.float32, torch.float16, torch.bfloat16):
        raise ValueError(f"dtype is {dtype}: expected float32, float16 or bfloat16")
    check("out", out, dtype, (w.n_rows, w.n_columns), w.low.device, strided=True)
    if w.name in FLOATS:
        return out.copy_(w.low)
    n_unit = w.low.shape[1] // 4
    grid = (triton.cdiv(w.n_rows, 4), triton.cdiv(n_unit, 32))
    _dequantize_kernel[grid](
        *planes_of(w), out, w.n_rows, n_unit, out.stride(0), EXPONENT, ROWS=4, UNITS=32,
        **constants_of(w), num_warps=4,
    )  # fmt: skip
    return out
