"""Products of matrices with one or two vectors, on the GPU: of one matrix, or of two at once.

The numbers of a unit are rounded to 16 bits and multiplied as bytes, four at once. A program keeps
its inputs in registers, multiplies many rows by them, and loads the next rows ahead.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from sparsekv_cli.kernels.weights.fields import (
    byte_fields,
    constants_of,
    dot4,
    group_values,
    load_scales,
    planes_of,
    wide_bits,
)
from sparsekv_cli.kernels.weights.packed import FLOATS, PackedMatrix

PROGRAMS = 792  # six on each of 132 multiprocessors
LARGEST = 32512  # largest input as an integer of two bytes


@triton.jit
def _pack_inputs(
    x_at, mask, BATCH: tl.constexpr, UNITS: tl.constexpr, FIELDS: tl.constexpr,
    HALVES: tl.constexpr, LARGEST: tl.constexpr,
):  # fmt: skip
    """Rounds the inputs of units to two bytes, in the order of ``byte_fields``.

    x_at: pointers to field 0 of each word, (BATCH, 1, 4 UNITS). Returns high bytes and low bytes of
    the first and of the second word of bytes, and the unit's scale (BATCH, 1, UNITS). It also
    returns the sums of the first and of the second word's integers, (BATCH, 1, UNITS).
    """
    peak = tl.zeros((BATCH, 1, 4 * UNITS), tl.float32)
    damage = tl.zeros((BATCH, 1, 4 * UNITS), tl.float32)
    for i in tl.static_range(FIELDS):
        x = tl.load(x_at + 4 * i, mask=mask, other=0).to(tl.float32)
        peak = tl.maximum(peak, tl.abs(x))
        damage += x * 0.0  # NaN if x is NaN or infinite
    peak = tl.max(tl.reshape(peak, (BATCH, 1, UNITS, 4)), 3)
    inverse = LARGEST / tl.maximum(peak, 1e-30)
    wide = tl.broadcast_to(inverse[:, :, :, None], (BATCH, 1, UNITS, 4))
    inverse_of_word = tl.reshape(wide, (BATCH, 1, 4 * UNITS))
    high0 = tl.zeros((BATCH, 1, 4 * UNITS), tl.int32)
    high1, low0, low1, sum0, sum1 = high0, high0, high0, high0, high0
    for i in tl.static_range(FIELDS):
        x = tl.load(x_at + 4 * i, mask=mask, other=0).to(tl.float32)
        q = tl.floor(x * inverse_of_word + 0.5).to(tl.int32)
        high, low = ((q + 128) >> 8) & 255, q & 255
        if FIELDS == 4:
            high0 |= high << (8 * i)
            low0 |= low << (8 * i)
            sum0 += q
        elif HALVES == 2:  # bytes 0, 1, 2, 3 are fields 0, 2, 1, 3
            if i < 4:
                high0 |= high << (8 * (i // 2 + 2 * (i % 2)))
                low0 |= low << (8 * (i // 2 + 2 * (i % 2)))
                sum0 += q
            else:
                high1 |= high << (8 * ((i - 4) // 2 + 2 * (i % 2)))
                low1 |= low << (8 * ((i - 4) // 2 + 2 * (i % 2)))
                sum1 += q
        elif i % 2 == 0:
            high0 |= high << (4 * i)
            low0 |= low << (4 * i)
            sum0 += q
        else:
            high1 |= high << (4 * (i - 1))
            low1 |= low << (4 * (i - 1))
            sum1 += q
    sum0 = tl.sum(tl.reshape(sum0, (BATCH, 1, UNITS, 4)), 3)
    sum1 = tl.sum(tl.reshape(sum1, (BATCH, 1, UNITS, 4)), 3)
    scale = peak * (1.0 / LARGEST) + tl.sum(tl.reshape(damage, (BATCH, 1, UNITS, 4)), 3)
    return high0, low0, high1, low1, scale, sum0, sum1


@triton.jit
def _multiply_rows(
    low_ptr, high_ptr, scale_ptr, super_ptr, x_ptr, out_ptr,
    n_batch, n_rows, n_unit, first, step, stride_xb, stride_ob,
    BATCH: tl.constexpr, ROWS: tl.constexpr, UNITS: tl.constexpr, LARGEST: tl.constexpr,
    LOW_BITS: tl.constexpr, HIGH_BITS: tl.constexpr, ZERO: tl.constexpr, HALVES: tl.constexpr,
    MINIMUM: tl.constexpr, SUPER: tl.constexpr,
):  # fmt: skip
    """Multiplies ROWS rows from ``first`` on, then those ``step`` later. It loads rows ahead."""
    FIELDS: tl.constexpr = 32 // LOW_BITS  # of a word
    SPLIT: tl.constexpr = 32 // (4 * FIELDS)  # units a group of 32 elements
    batch = tl.arange(0, BATCH)[:, None, None]
    rows = tl.arange(0, ROWS)[None, :, None]
    word, unit = tl.arange(0, 4 * UNITS)[None, None, :], tl.arange(0, UNITS)[None, None, :]
    has_word, has_unit, group = word // 4 < n_unit, unit < n_unit, unit // SPLIT
    x_at = x_ptr + batch * stride_xb + word // 4 * (4 * FIELDS) + word % 4
    x_high0, x_low0, x_high1, x_low1, x_scale, x_sum0, x_sum1 = _pack_inputs(
        x_at, has_word & (batch < n_batch), BATCH, UNITS, FIELDS, HALVES, LARGEST
    )
    n_group = n_unit // SPLIT
    row = (first + rows).to(tl.int64)
    mask = has_word & (row < n_rows)
    low = tl.load(low_ptr + row * (4 * n_unit) + word, mask=mask, eviction_policy="evict_first")
    high = low
    if HIGH_BITS > 0:
        high = tl.load(high_ptr + row * (4 * n_unit) + word, mask=mask)
    of_group, of_super = load_scales(
        scale_ptr, super_ptr, row, group, n_group, has_unit & (row < n_rows), SUPER
    )
    none = tl.zeros((BATCH, ROWS, 4 * UNITS), tl.int32)
    for start in range(first, n_rows, step):
        even, odd = byte_fields(
            low.to(tl.uint32, bitcast=True), wide_bits(high, HIGH_BITS), LOW_BITS, HIGH_BITS, HALVES
        )
        scale, second = group_values(of_group, of_super, HALVES, MINIMUM, SUPER)
        row = (start + step + rows).to(tl.int64)
        mask = has_word & (row < n_rows)
        low = tl.load(low_ptr + row * (4 * n_unit) + word, mask=mask, eviction_policy="evict_first")
        if HIGH_BITS > 0:
            high = tl.load(high_ptr + row * (4 * n_unit) + word, mask=mask)
        else:
            high = low
        of_group, of_super = load_scales(
            scale_ptr, super_ptr, row, group, n_group, has_unit & (row < n_rows), SUPER
        )
        if HALVES == 2:
            one = dot4(even, x_high0, none) * 256 + dot4(even, x_low0, none)
            two = dot4(odd, x_high1, none) * 256 + dot4(odd, x_low1, none)
            one = tl.sum(tl.reshape(one, (BATCH, ROWS, UNITS, 4)), 3) - ZERO * x_sum0
            two = tl.sum(tl.reshape(two, (BATCH, ROWS, UNITS, 4)), 3) - ZERO * x_sum1
            sums = one.to(tl.float32) * scale + two.to(tl.float32) * second
        else:
            x_sum = x_sum0 + x_sum1
            of_high, of_low = dot4(even, x_high0, none), dot4(even, x_low0, none)
            if FIELDS == 8:
                of_high, of_low = dot4(odd, x_high1, of_high), dot4(odd, x_low1, of_low)
            one = of_high * 256 + of_low
            one = tl.sum(tl.reshape(one, (BATCH, ROWS, UNITS, 4)), 3) - ZERO * x_sum
            sums = one.to(tl.float32) * scale
            if MINIMUM:
                sums += x_sum.to(tl.float32) * second
        out = tl.sum(sums * x_scale, axis=2)[:, :, None]
        done = start + rows
        tl.store(out_ptr + batch * stride_ob + done, out, mask=(batch < n_batch) & (done < n_rows))


@triton.jit(do_not_specialize=["step"])
def _matvec_kernel(
    low_ptr, high_ptr, scale_ptr, super_ptr, x_ptr, out_ptr, chosen_ptr,
    n_batch, n_rows, n_unit, step, stride_xb, stride_ob, n_choice,
    BATCH: tl.constexpr, ROWS: tl.constexpr, UNITS: tl.constexpr, LARGEST: tl.constexpr,
    LOW_BITS: tl.constexpr, HIGH_BITS: tl.constexpr, ZERO: tl.constexpr, HALVES: tl.constexpr,
    MINIMUM: tl.constexpr, SUPER: tl.constexpr, CHOSEN: tl.constexpr,
):  # fmt: skip
    """CHOSEN: the vector and the matrix are those of pair program_id(1), see ``PairChoice``."""
    if CHOSEN:
        pair = tl.program_id(1).to(tl.int64)
        n_word = 4 * n_unit  # of a row
        n_group = n_unit * (32 // LOW_BITS) // 8
        before = tl.load(chosen_ptr + pair).to(tl.int64) * n_rows  # rows of earlier matrices
        low_ptr += before * n_word
        high_ptr += before * n_word
        scale_ptr += before * n_group
        super_ptr += before * (n_group // 8)
        x_ptr += pair // n_choice * stride_xb
        out_ptr += pair * stride_ob
    _multiply_rows(
        low_ptr, high_ptr, scale_ptr, super_ptr, x_ptr, out_ptr, n_batch, n_rows, n_unit,
        tl.program_id(0) * ROWS, step, stride_xb, stride_ob, BATCH, ROWS, UNITS, LARGEST, LOW_BITS,
        HIGH_BITS, ZERO, HALVES, MINIMUM, SUPER,
    )  # fmt: skip


@triton.jit(do_not_specialize=["n_program", "step", "step_2"])
def _matvec_pair_kernel(
    low_ptr, high_ptr, scale_ptr, super_ptr, low_2_ptr, high_2_ptr, scale_2_ptr, super_2_ptr, x_ptr,
    out_ptr, out_2_ptr,
    n_batch, n_rows, n_rows_2, n_unit, n_program, step, step_2, stride_xb, stride_ob,
    BATCH: tl.constexpr, UNITS: tl.constexpr, LARGEST: tl.constexpr, LOW_BITS: tl.constexpr,
    ROWS: tl.constexpr, HIGH_BITS: tl.constexpr, ZERO: tl.constexpr, HALVES: tl.constexpr,
    MINIMUM: tl.constexpr, SUPER: tl.constexpr,
    ROWS_2: tl.constexpr, HIGH_BITS_2: tl.constexpr, ZERO_2: tl.constexpr, HALVES_2: tl.constexpr,
    MINIMUM_2: tl.constexpr, SUPER_2: tl.constexpr,
):  # fmt: skip
    """The first n_program programs multiply one matrix, the others the second one."""
    program = tl.program_id(0)
    if program < n_program:
        _multiply_rows(
            low_ptr, high_ptr, scale_ptr, super_ptr, x_ptr, out_ptr, n_batch, n_rows, n_unit,
            program * ROWS, step, stride_xb, stride_ob, BATCH, ROWS, UNITS, LARGEST, LOW_BITS,
            HIGH_BITS, ZERO, HALVES, MINIMUM, SUPER,
        )  # fmt: skip
    else:
        _multiply_rows(
            low_2_ptr, high_2_ptr, scale_2_ptr, super_2_ptr, x_ptr, out_2_ptr, n_batch, n_rows_2,
            n_unit, (program - n_program) * ROWS_2, step_2, stride_xb, stride_ob, BATCH, ROWS_2,
            UNITS, LARGEST, LOW_BITS, HIGH_BITS_2, ZERO_2, HALVES_2, MINIMUM_2, SUPER_2,
        )  # fmt: skip


@triton.jit
def _matvec_float_kernel(
    w_ptr, x_ptr, out_ptr, chosen_ptr, n_batch, n_rows, n_columns, stride_w, stride_xb, stride_ob,
    n_choice, BATCH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, CHOSEN: tl.constexpr,
):  # fmt: skip
    if CHOSEN:
        pair = tl.program_id(1).to(tl.int64)
        w_ptr += tl.load(chosen_ptr + pair).to(tl.int64) * n_rows * stride_w
        x_ptr += pair // n_choice * stride_xb
        out_ptr += pair * stride_ob
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


def _warps_along(n: int, a_warp: int) -> int:
    """Returns the warps that share n items of a row, ``a_warp`` each at a time, with few idle."""
    padded = {warps: -(-n // (warps * a_warp)) * warps * a_warp for warps in (4, 2, 1)}
    return next(warps for warps in padded if 10 * padded[warps] <= 11 * min(padded.values()))


def _rows_a_program(n_rows: int) -> int:
    """Returns the rows that share a thread's inputs, if that leaves enough programs."""
    most = 4
    while most > 1 and n_rows < PROGRAMS * most:
        most //= 2
    return most


def _tiling(n_unit: int, n_fields: int, n_values: int) -> tuple[int, int]:
    """Returns the rows of a step of a program and its warps; a thread has two units of a row.

    n_values: sums of a unit and row that a thread holds at once. They limit the rows.
    """
    units = triton.next_power_of_2(n_unit)
    rows = 4 if units * n_fields <= 1024 and n_values < 4 else 2
    return rows, min(16, max(1, units // 64))


class PairChoice(NamedTuple):
    """The matrices that pairs are multiplied by, of several matrices one after another in W.

    chosen: int32 (pairs,), each pair's matrix. n_choice: the pairs of a vector: pair i has vector
    i // n_choice. n_matrix: the number of matrices in W.
    """

    chosen: torch.Tensor
    n_choice: int
    n_matrix: int


def matvec(
    w: PackedMatrix, x: torch.Tensor, out: torch.Tensor, choice: PairChoice | None = None
) -> None:
    """``multiply`` of weights/dot.py for one or two vectors, or for pairs of a ``choice``."""
    n_batch, n_rows, chosen, n_choice, n_pair = x.shape[0], w.n_rows, None, 1, 1
    if choice is not None:
        chosen, n_choice, n_pair = choice.chosen, choice.n_choice, len(choice.chosen)
        n_batch, n_rows = 1, w.n_rows // choice.n_matrix
    batch = triton.next_power_of_2(n_batch)
    if w.name in FLOATS:
        rows = _rows_a_program(n_rows * n_pair)
        a_thread = 16 // w.low.itemsize
        warps = _warps_along(w.n_columns, 32 * a_thread)
        _matvec_float_kernel[(triton.cdiv(n_rows, rows), n_pair)](
            w.low, x, out, chosen, n_batch, n_rows, w.n_columns, w.low.stride(0), x.stride(0),
            out.stride(0), n_choice, BATCH=batch, ROWS=rows, COLUMNS=32 * a_thread * warps,
            CHOSEN=choice is not None, num_warps=warps,
        )  # fmt: skip
        return
    n_unit, constants = w.low.shape[1] // 4, constants_of(w)
    rows, warps = _tiling(n_unit, 32 // constants["LOW_BITS"], batch * constants["HALVES"])
    n_program = min(triton.cdiv(n_rows, rows), triton.cdiv(PROGRAMS, n_pair))
    _matvec_kernel[(n_program, n_pair)](
        *planes_of(w), x, out, chosen, n_batch, n_rows, n_unit, n_program * rows, x.stride(0),
        out.stride(0), n_choice, BATCH=batch, ROWS=rows, UNITS=triton.next_power_of_2(n_unit),
        LARGEST=LARGEST, **constants, CHOSEN=choice is not None, num_warps=warps,
    )  # fmt: skip


def matvec_pair(w: PackedMatrix, w_2: PackedMatrix, x: torch.Tensor, out: torch.Tensor) -> None:
    """``multiply_pair`` of weights/dot.py for one or two vectors."""
    n_batch, n_unit = x.shape[0], w.low.shape[1] // 4
    batch = triton.next_power_of_2(n_batch)
    all_constants = [constants_of(w), constants_of(w_2)]
    n_fields = 32 // all_constants[0]["LOW_BITS"]
    tilings = [_tiling(n_unit, n_fields, batch * c["HALVES"]) for c in all_constants]
    rows, rows_2 = (rows for rows, _ in tilings)
    # The programs of a multiprocessor end together if each matrix has its share of all programs.
    share = round(PROGRAMS * w.nbytes / (w.nbytes + w_2.nbytes))
    n_program = min(triton.cdiv(w.n_rows, rows), max(1, share))
    n_program_2 = min(triton.cdiv(w_2.n_rows, rows_2), max(1, PROGRAMS - share))
    constants, second = all_constants
    second = {f"{name}_2": value for name, value in second.items() if name != "LOW_BITS"}
    _matvec_pair_kernel[(n_program + n_program_2,)](
        *planes_of(w), *planes_of(w_2), x, out, out[:, w.n_rows :], n_batch, w.n_rows, w_2.n_rows,
        n_unit, n_program, n_program * rows, n_program_2 * rows_2, x.stride(0), out.stride(0),
        BATCH=batch, UNITS=triton.next_power_of_2(n_unit), LARGEST=LARGEST, ROWS=rows,
        ROWS_2=rows_2, **constants, **second, num_warps=tilings[0][1],
    )  # fmt: skip
