"""Fields of packed words as floats, in few GPU instructions (layout: weights/packed.py).

An integer becomes a float by writing it into the mantissa of 2^23, one logic operation, and
subtracting 2^23 and the zero point, one addition. Fields are not shifted down; the factor that they
are multiplied by is scaled instead.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from sparsekv_cli.kernels.weights.packed import PACKINGS, PackedMatrix

EXPONENT = 0x4B000000  # bits of 2^23 as f32


@triton.jit
def times_field(
    low, high, x, exponent,
    K: tl.constexpr, LOW_BITS: tl.constexpr, HIGH_BITS: tl.constexpr, ZERO: tl.constexpr,
):  # fmt: skip
    """(q - ZERO) x, f32, for field K of the words ``low`` and ``high``, u32.

    exponent: the bits of 2^23, as a value that the compiler does not know: two constants in one
    operation would cost another one.
    """
    # Fields stay below bit 23, where the mantissa ends; a field at bit 0 is not shifted there, as
    # that takes an instruction more.
    last: tl.constexpr = 4 if LOW_BITS == 4 else 1
    shift: tl.constexpr = 0 if last >= K else (16 if LOW_BITS == 4 else 8 * K - 8)
    at: tl.constexpr = LOW_BITS * K - shift
    q = (low >> shift) & ((2**LOW_BITS - 1) << at)
    if HIGH_BITS > 0:
        left: tl.constexpr = at + 4 - HIGH_BITS * K
        moved = high << left if left >= 0 else high >> -left
        q |= moved & ((2**HIGH_BITS - 1) << (at + 4))
    value = (q | exponent).to(tl.float32, bitcast=True) - (8388608.0 + ZERO * 2**at)
    return value * (x * (1.0 / 2**at))


@triton.jit
def group_values(scale_ptr, super_ptr, row, group, half, n_group, mask, SUPER: tl.constexpr,
                  HALVES: tl.constexpr):  # fmt: skip
    """Scales (or minima) f32 of the groups of 32, or of their first or second 16 elements."""
    at = row * (n_group * HALVES) + half * n_group + group
    value = tl.load(scale_ptr + at, mask=mask, other=0).to(tl.float32)
    if SUPER:
        at = row * (n_group // 8) + group // 8
        value *= tl.load(super_ptr + at, mask=mask, other=0).to(tl.float32)
    return value


def planes_of(w: PackedMatrix) -> tuple[torch.Tensor, ...]:
    """The kernels' first six arguments; a plane that is absent is not read."""
    planes = (w.low, w.high, w.scale, w.minimum, w.super_scale, w.super_minimum)
    return tuple(w.low if plane is None else plane for plane in planes)


def constants_of(w: PackedMatrix) -> dict[str, Any]:
    packing = PACKINGS[w.name]
    return {
        "LOW_BITS": packing.low_bits, "HIGH_BITS": packing.high_bits, "ZERO": packing.zero,
        "HALVES": 2 if w.scale is not None and w.scale.dim() == 3 else 1,
        "MINIMUM": w.minimum is not None, "SUPER": w.super_scale is not None,
    }  # fmt: skip
