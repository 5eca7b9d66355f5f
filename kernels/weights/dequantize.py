"""Dequantisation of matrices on the GPU, for the dense products of a prefill."""

import torch
import triton
import triton.language as tl

from sparsekv_cli.kernels.checks import check
from sparsekv_cli.kernels.weights.fields import (
    constants_of,
    field_pair,
    group_values,
    load_scales,
    planes_of,
    wide_bits,
)
from sparsekv_cli.kernels.weights.packed import FLOATS, PackedMatrix


@triton.jit
def _dequantize_kernel(
    low_ptr, high_ptr, scale_ptr, super_ptr, out_ptr, n_rows, n_unit, stride_o,
    ROWS: tl.constexpr, UNITS: tl.constexpr, LOW_BITS: tl.constexpr, HIGH_BITS: tl.constexpr,
    ZERO: tl.constexpr, HALVES: tl.constexpr, MINIMUM: tl.constexpr, SUPER: tl.constexpr,
):  # fmt: skip
    FIELDS: tl.constexpr = 32 // LOW_BITS
    SPLIT: tl.constexpr = 32 // (4 * FIELDS)
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    word = tl.program_id(1) * (4 * UNITS) + tl.arange(0, 4 * UNITS)[None, :]
    mask = (word < 4 * n_unit) & (row < n_rows)
    at = row * (4 * n_unit) + word
    low = tl.load(low_ptr + at, mask=mask, other=0).to(tl.uint32, bitcast=True)
    high = low
    if HIGH_BITS > 0:
        high = wide_bits(tl.load(high_ptr + at, mask=mask, other=0), HIGH_BITS)
    unit = word // 4
    of_group, of_super = load_scales(
        scale_ptr, super_ptr, row, unit // SPLIT, n_unit // SPLIT, mask, SUPER
    )
    scale, second = group_values(of_group, of_super, HALVES, MINIMUM, SUPER)
    of_second, minimum = (second, 0.0) if HALVES == 2 else (scale, second)
    out_at = out_ptr + row * stride_o + unit * (4 * FIELDS) + word % 4
    for i in tl.static_range(FIELDS // 2):
        one, two = field_pair(low, high, i, LOW_BITS, HIGH_BITS, ZERO)
        one, two = one.to(tl.float32) * scale, two.to(tl.float32) * of_second
        if MINIMUM:
            one, two = one + minimum, two + minimum
        tl.store(out_at + 4 * i, one.to(out_ptr.dtype.element_ty), mask=mask)
        two_at = out_at + 4 * (i + FIELDS // 2)
        tl.store(two_at, two.to(out_ptr.dtype.element_ty), mask=mask)


def dequantize(
    w: PackedMatrix, dtype: torch.dtype = torch.bfloat16, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Returns W (rows, columns) as ``dtype``: f32, f16 or bf16. Each weight is rounded once."""
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
        *planes_of(w), out, w.n_rows, n_unit, out.stride(0), ROWS=4, UNITS=32,
        **constants_of(w), num_warps=4,
    )  # fmt: skip
    return out
