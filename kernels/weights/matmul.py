"""Products of matrices with several vectors, by the GPU's tensor cores: of one matrix, or of two.

Weights and inputs are f16 (TF32 for plain floats), sums f32. The inputs of a vector are scaled to
the range of f16. They are stored in the order in which the kernel unpacks weights.
"""

import torch
import triton
import triton.language as tl

from sparsekv_cli.kernels.weights.fields import (
    constants_of,
    field_pair,
    group_values,
    joined_fields,
    load_scales,
    planes_of,
    wide_bits,
)
from sparsekv_cli.kernels.weights.packed import FLOATS, PackedMatrix

BATCH = 16  # vectors of a program; some may be unused
ROWS = 64  # rows of a program: they share its inputs
UNITS = 8  # units of a step of a program
WARPS, STAGES = 4, 3  # of a program, and of its pipeline of loads
PROGRAMS = 512  # fewest programs, if possible: a few for each multiprocessor
PEAK = 2048.0  # largest input of a vector as f16


@triton.jit
def _to_f16_kernel(
    x_ptr, out_ptr, scale_ptr, n_columns, stride_xb,
    BLOCK: tl.constexpr, FIELDS: tl.constexpr, UNITS: tl.constexpr, PEAK: tl.constexpr,
    JOINED: tl.constexpr,
):  # fmt: skip
    """Writes a vector times 1 / scale as f16, in steps of UNITS units: by field, unit and word.

    JOINED: by pair of fields, unit, word and field. Elements after the last column are 0.
    """
    b = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    SIZE: tl.constexpr = 4 * FIELDS * UNITS
    within = at % SIZE
    field, word = within // (4 * UNITS), within % (4 * UNITS)
    if JOINED:
        field = within // (8 * UNITS) + within % 2 * (FIELDS // 2)
        word = within % (8 * UNITS) // 2
    column = (at // SIZE * UNITS + word // 4) * (4 * FIELDS) + field * 4 + word % 4
    x = tl.load(x_ptr + b * stride_xb + column, mask=column < n_columns, other=0).to(tl.float32)
    peak = tl.max(tl.abs(x), 0)
    damage = tl.sum(x * 0.0, 0)  # NaN if one of x is NaN or infinite
    inverse = PEAK / tl.maximum(peak, 1e-30)
    n_out = tl.cdiv(n_columns, SIZE) * SIZE
    tl.store(out_ptr + b * n_out + at, (x * inverse).to(tl.float16), mask=at < n_out)
    tl.store(scale_ptr + b, peak * (1.0 / PEAK) + damage)


@triton.jit
def _multiply_rows(
    low_ptr, high_ptr, scale_ptr, super_ptr, x_ptr, x_scale_ptr, out_ptr,
    first, n_batch, n_rows, n_unit, units_a_part, stride_xb, stride_op, stride_ob,
    BATCH: tl.constexpr, ROWS: tl.constexpr, UNITS: tl.constexpr, LOW_BITS: tl.constexpr,
    HIGH_BITS: tl.constexpr, ZERO: tl.constexpr, HALVES: tl.constexpr, MINIMUM: tl.constexpr,
    SUPER: tl.constexpr, JOINED: tl.constexpr,
):  # fmt: skip
    """Multiplies a part of the columns of ROWS rows from ``first`` on. JOINED: see dot.py."""
    FIELDS: tl.constexpr = 32 // LOW_BITS
    SPLIT: tl.constexpr = 32 // (4 * FIELDS)
    part = tl.program_id(1)
    row = (first + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    batch = tl.arange(0, BATCH)
    word = tl.arange(0, 4 * UNITS)[None, :]
    unit = tl.arange(0, UNITS)[None, :]
    n_group = n_unit // SPLIT
    stop = tl.minimum(n_unit, (part + 1) * units_a_part)
    sums = tl.zeros((ROWS, BATCH), tl.float32)
    for start in range(part * units_a_part, stop, UNITS):
        mask = (start + word // 4 < stop) & (row < n_rows)
        at = row * (4 * n_unit) + start * 4 + word
        low = tl.load(low_ptr + at, mask=mask, other=0).to(tl.uint32, bitcast=True)
        high = low
        if HIGH_BITS > 0:
            high = wide_bits(tl.load(high_ptr + at, mask=mask, other=0), HIGH_BITS)
        of_group, of_super = load_scales(
            scale_ptr, super_ptr, row, (start + unit) // SPLIT, n_group,
            (start + unit < stop) & (row < n_rows), SUPER,
        )  # fmt: skip
        scale, second = group_values(of_group, of_super, HALVES, MINIMUM, SUPER)
        scale, second = scale.to(tl.float16), second.to(tl.float16)
        x_at = x_ptr + batch[None, :] * stride_xb + start * (4 * FIELDS)
        has_x = batch[None, :] < n_batch
        if JOINED:
            sums = _add_joined(
                sums, low, high, scale, second, x_at, has_x, ROWS, UNITS, LOW_BITS, HIGH_BITS, ZERO,
                HALVES,
            )  # fmt: skip
        else:
            scale, second = _a_word(scale, ROWS, UNITS, 4), _a_word(second, ROWS, UNITS, 4)
            x_at += tl.arange(0, 4 * UNITS)[:, None]
            for i in tl.static_range(FIELDS // 2):
                one, two = field_pair(low, high, i, LOW_BITS, HIGH_BITS, ZERO)
                if HALVES == 2:
                    one, two = one * scale, two * second
                elif MINIMUM:
                    one, two = one * scale + second, two * scale + second
                else:
                    one, two = one * scale, two * scale
                x_one = tl.load(x_at + 4 * UNITS * i, mask=has_x, other=0)
                x_two = tl.load(x_at + 4 * UNITS * (i + FIELDS // 2), mask=has_x, other=0)
                sums = tl.dot(one, x_one, sums)
                sums = tl.dot(two, x_two, sums)
    is_batch = batch[None, :] < n_batch
    sums *= tl.load(x_scale_ptr + batch[None, :], mask=is_batch, other=0)
    at = part.to(tl.int64) * stride_op + batch[None, :] * stride_ob + row
    tl.store(out_ptr + at, sums, mask=(row < n_rows) & is_batch)


@triton.jit(do_not_specialize=["n_batch", "units_a_part"])
def _matmul_kernel(
    low_ptr, high_ptr, scale_ptr, super_ptr, x_ptr, x_scale_ptr, out_ptr,
    n_batch, n_rows, n_unit, units_a_part, stride_xb, stride_op, stride_ob,
    BATCH: tl.constexpr, ROWS: tl.constexpr, UNITS: tl.constexpr, LOW_BITS: tl.constexpr,
    HIGH_BITS: tl.constexpr, ZERO: tl.constexpr, HALVES: tl.constexpr, MINIMUM: tl.constexpr,
    SUPER: tl.constexpr, JOINED: tl.constexpr,
):  # fmt: skip
    _multiply_rows(
        low_ptr, high_ptr, scale_ptr, super_ptr, x_ptr, x_scale_ptr, out_ptr,
        tl.program_id(0) * ROWS, n_batch, n_rows, n_unit, units_a_part, stride_xb, stride_op,
        stride_ob, BATCH, ROWS, UNITS, LOW_BITS, HIGH_BITS, ZERO, HALVES, MINIMUM, SUPER, JOINED,
    )  # fmt: skip


@triton.jit(do_not_specialize=["n_batch", "n_program", "units_a_part"])
def _matmul_pair_kernel(
    low_ptr, high_ptr, scale_ptr, super_ptr, low_2_ptr, high_2_ptr, scale_2_ptr, super_2_ptr, x_ptr,
    x_scale_ptr, out_ptr, out_2_ptr,
    n_batch, n_rows, n_rows_2, n_unit, n_program, units_a_part, stride_xb, stride_op, stride_ob,
    BATCH: tl.constexpr, ROWS: tl.constexpr, UNITS: tl.constexpr, LOW_BITS: tl.constexpr,
    HIGH_BITS: tl.constexpr, ZERO: tl.constexpr, HALVES: tl.constexpr, MINIMUM: tl.constexpr,
    SUPER: tl.constexpr, JOINED: tl.constexpr, HIGH_BITS_2: tl.constexpr, ZERO_2: tl.constexpr,
    HALVES_2: tl.constexpr, MINIMUM_2: tl.constexpr, SUPER_2: tl.constexpr,
):  # fmt: skip
    """The first n_program programs multiply one matrix, the others the second one."""
    program = tl.program_id(0)
    if program < n_program:
        _multiply_rows(
            low_ptr, high_ptr, scale_ptr, super_ptr, x_ptr, x_scale_ptr, out_ptr, program * ROWS,
            n_batch, n_rows, n_unit, units_a_part, stride_xb, stride_op, stride_ob, BATCH, ROWS,
            UNITS, LOW_BITS, HIGH_BITS, ZERO, HALVES, MINIMUM, SUPER, JOINED,
        )  # fmt: skip
    else:
        _multiply_rows(
            low_2_ptr, high_2_ptr, scale_2_ptr, super_2_ptr, x_ptr, x_scale_ptr, out_2_ptr,
            (program - n_program) * ROWS, n_batch, n_rows_2, n_unit, units_a_part, stride_xb,
            stride_op, stride_ob, BATCH, ROWS, UNITS, LOW_BITS, HIGH_BITS_2, ZERO_2, HALVES_2,
            MINIMUM_2, SUPER_2, JOINED,
        )  # fmt: skip


@triton.jit
def _a_word(values, ROWS: tl.constexpr, UNITS: tl.constexpr, N: tl.constexpr):
    """Repeats values (ROWS, UNITS) N times each: (ROWS, N UNITS)."""
    wide = tl.broadcast_to(values[:, :, None], (ROWS, UNITS, N))
    return tl.reshape(wide, (ROWS, N * UNITS))


@triton.jit
def _add_joined(
    sums, low, high, scale, second, x_at, has_x,
    ROWS: tl.constexpr, UNITS: tl.constexpr, LOW_BITS: tl.constexpr, HIGH_BITS: tl.constexpr,
    ZERO: tl.constexpr, HALVES: tl.constexpr,
):  # fmt: skip
    """Adds the products of a step. Weights are unpacked where tensor cores read them."""
    if HALVES == 2:  # each half of a word has its own scale
        scale = tl.interleave(_a_word(scale, ROWS, UNITS, 4), _a_word(second, ROWS, UNITS, 4))
        second = tl.zeros_like(scale)
    else:
        scale, second = _a_word(scale, ROWS, UNITS, 8), _a_word(second, ROWS, UNITS, 8)
    x_at += tl.arange(0, 8 * UNITS)[:, None]
    for i in tl.static_range(16 // LOW_BITS):
        weights = joined_fields(low, high, scale, second, i, LOW_BITS, HIGH_BITS, ZERO)
        x = tl.load(x_at + 8 * UNITS * i, mask=has_x, other=0)
        sums = tl.dot(weights, x, sums)
    return sums


@triton.jit
def _rounded(x):
    """Rounds f32 to the 10 bits of mantissa that tensor cores keep. They would truncate."""
    bits = (x.to(tl.uint32, bitcast=True) + 0x1000) & 0xFFFFE000
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _matmul_float_kernel(
    w_ptr, x_ptr, out_ptr, n_batch, n_rows, n_columns, columns_a_part, stride_w, stride_xb,
    stride_op, stride_ob,
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
    at = part.to(tl.int64) * stride_op + batch * stride_ob + row
    tl.store(out_ptr + at, sums, mask=(row < n_rows) & (batch < n_batch))


@triton.jit
def _add_parts_kernel(parts_ptr, out_ptr, n, n_row, n_part, stride_ob, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for part in range(n_part):
        total += tl.load(parts_ptr + part * n + at, mask=at < n, other=0)
    tl.store(out_ptr + at // n_row * stride_ob + at % n_row, total, mask=at < n)


def _parts(n_program: int, n_step: int) -> tuple[int, int]:
    """Returns the steps of the inner loop of a program, and the programs of a row."""
    wanted = max(1, PROGRAMS // n_program)
    steps = -(-n_step // min(wanted, n_step))
    return steps, -(-n_step // steps)


def _to_f16(
    x: torch.Tensor, n_column: int, n_field: int, joined: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the inputs as a kernel reads them, f16 (B, n_column), and their scales f32 (B,)."""
    n_batch, device = x.shape[0], x.device
    inputs = torch.empty(n_batch, n_column, dtype=torch.float16, device=device)
    scales = torch.empty(n_batch, dtype=torch.float32, device=device)
    block = triton.next_power_of_2(n_column)
    _to_f16_kernel[(n_batch,)](
        x, inputs, scales, x.shape[1], x.stride(0), BLOCK=block, FIELDS=n_field, UNITS=UNITS,
        PEAK=PEAK, JOINED=joined, num_warps=min(16, max(1, block // 512)),
    )  # fmt: skip
    return inputs, scales


def _room_for_parts(n_part: int, out: torch.Tensor) -> torch.Tensor:
    """Returns memory for the sums of n_part parts of the columns, f32 (n_part, B, rows)."""
    if n_part == 1:
        return out[None]
    return torch.empty(n_part, *out.shape, dtype=torch.float32, device=out.device)


def _add_parts(parts: torch.Tensor, out: torch.Tensor) -> None:
    n_part, n = len(parts), out.numel()
    if n_part > 1:
        _add_parts_kernel[(triton.cdiv(n, 256),)](
            parts, out, n, out.shape[1], n_part, out.stride(0), BLOCK=256, num_warps=2
        )


def matmul(w: PackedMatrix, x: torch.Tensor, out: torch.Tensor, joined: bool) -> None:
    """``multiply`` of weights/dot.py for up to BATCH vectors."""
    n_batch = x.shape[0]
    columns = 64 if w.name in FLOATS else UNITS * 128 // constants_of(w)["LOW_BITS"]
    n_step, n_program = -(-w.n_columns // columns), triton.cdiv(w.n_rows, ROWS)
    steps, n_part = _parts(n_program, n_step)
    parts = _room_for_parts(n_part, out)
    if w.name in FLOATS:
        _matmul_float_kernel[(n_program, n_part)](
            w.low, x, parts, n_batch, w.n_rows, w.n_columns, steps * columns, w.low.stride(0),
            x.stride(0), *parts.stride()[:2], BATCH=BATCH, ROWS=ROWS, COLUMNS=columns,
            num_warps=WARPS, num_stages=STAGES,
        )  # fmt: skip
    else:
        constants = constants_of(w)
        inputs, scales = _to_f16(x, n_step * columns, 32 // constants["LOW_BITS"], joined)
        _matmul_kernel[(n_program, n_part)](
            *planes_of(w), inputs, scales, parts, n_batch, w.n_rows, w.low.shape[1] // 4,
            steps * UNITS, inputs.stride(0), *parts.stride()[:2], BATCH=BATCH, ROWS=ROWS,
            UNITS=UNITS, JOINED=joined, **constants, num_warps=WARPS, num_stages=STAGES,
        )  # fmt: skip
    _add_parts(parts, out)


def matmul_pair(
    w: PackedMatrix, w_2: PackedMatrix, x: torch.Tensor, out: torch.Tensor, joined: bool
) -> None:
    """``multiply_pair`` of weights/dot.py for up to BATCH vectors."""
    constants, second = constants_of(w), constants_of(w_2)
    columns = UNITS * 128 // constants["LOW_BITS"]
    n_step = -(-w.n_columns // columns)
    n_program, n_program_2 = (triton.cdiv(each.n_rows, ROWS) for each in (w, w_2))
    steps, n_part = _parts(n_program + n_program_2, n_step)
    parts = _room_for_parts(n_part, out)
    inputs, scales = _to_f16(x, n_step * columns, 32 // constants["LOW_BITS"], joined)
    second = {f"{name}_2": value for name, value in second.items() if name != "LOW_BITS"}
    _matmul_pair_kernel[(n_program + n_program_2, n_part)](
        *planes_of(w), *planes_of(w_2), inputs, scales, parts, parts[:, :, w.n_rows :],
        x.shape[0], w.n_rows, w_2.n_rows, w.low.shape[1] // 4, n_program, steps * UNITS,
        inputs.stride(0), *parts.stride()[:2], BATCH=BATCH, ROWS=ROWS, UNITS=UNITS, JOINED=joined,
        **constants, **second, num_warps=WARPS, num_stages=STAGES,
    )  # fmt: skip
    _add_parts(parts, out)
