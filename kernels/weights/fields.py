"""Turns fields of packed words into numbers with few GPU instructions (layout: weights/packed.py).

A field of at most 10 bits becomes an f16 when it is written into the mantissa of 1024. Two fields
of a word, 16 bits apart, become two f16 at once. Four fields of at most 8 bits, one a byte, are
multiplied by four bytes of the inputs at once.
"""

import os
from typing import Any

import torch
import triton
import triton.language as tl

from sparsekv_cli.kernels.weights.packed import PACKINGS, PackedMatrix

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


@triton.jit
def halves(word):
    """Returns the low and the high f16 of words u32."""
    low = word.to(tl.uint16).to(tl.float16, bitcast=True)
    high = (word >> 16).to(tl.uint16).to(tl.float16, bitcast=True)
    return low, high


@triton.jit
def dot4_ref(a, b, c):
    """Returns c plus the sum of the products of four bytes: a unsigned, b signed; all int32."""
    for i in tl.static_range(4):
        c += ((a >> (8 * i)) & 255) * ((b << (24 - 8 * i)) >> 24)
    return c


@triton.jit
def _dot4_ptx(a, b, c):
    """``dot4_ref`` in one instruction."""
    return tl.inline_asm_elementwise(
        "dp4a.u32.s32 $0, $1, $2, $3;", "=r,r,r,r", [a, b, c], dtype=tl.int32, is_pure=True, pack=1
    )


dot4 = dot4_ref if INTERPRETED else _dot4_ptx


@triton.jit
def byte_fields(low, high, LOW_BITS: tl.constexpr, HIGH_BITS: tl.constexpr, HALVES: tl.constexpr):
    """Returns the fields of words as bytes: two int32 of four bytes.

    They are fields 0, 2, 4, 6 and 1, 3, 5, 7. If fields have 8 bits, only the first int32 is valid.
    With HALVES = 2 the first four fields have another scale than the last four. The fields are then
    0, 2, 1, 3 and 4, 6, 5, 7.
    """
    even = low
    odd = low
    if LOW_BITS == 4:
        even = low & 0x0F0F0F0F
        odd = (low >> 4) & 0x0F0F0F0F
    if HIGH_BITS == 1:  # bit k to bit 4 of its byte; the products carry into none of these
        even |= ((high & 0x55) * 0x00410410) & 0x10101010
        odd |= (((high >> 1) & 0x55) * 0x00410410) & 0x10101010
    if HIGH_BITS == 2:  # field k at bit 2 k
        even |= _spread(high)
        odd |= _spread(high >> 2)
    if HALVES == 2:
        first = (even & 0xFFFF) | (odd << 16)
        odd = (even >> 16) | (odd & 0xFFFF0000)
        even = first
    return even.to(tl.int32, bitcast=True), odd.to(tl.int32, bitcast=True)


@triton.jit
def wide_bits(high, HIGH_BITS: tl.constexpr):
    """Returns the words of the plane of high bits as u32."""
    if HIGH_BITS == 2:
        high = high.to(tl.uint16, bitcast=True)
    return high.to(tl.uint32)


@triton.jit
def _spread(high):
    """Moves the pairs of bits at 0, 4, 8 and 12 to bits 4 and 5 of the four bytes."""
    outer = ((high & 0x0303) * 0x1010) & 0x00300030
    inner = ((high & 0x3030) * 0x10100) & 0x30003000
    return outer | inner


@triton.jit
def field_pair(
    low, high, K: tl.constexpr, LOW_BITS: tl.constexpr, HIGH_BITS: tl.constexpr, ZERO: tl.constexpr
):  # fmt: skip
    """Returns two fields of each word minus ZERO, f16: K and K + 4, or K and K + 2 if of 8 bits."""
    first, second = halves(_field_word(low, high, K, LOW_BITS, HIGH_BITS) | 0x64006400)
    base = tl.full([], -1024.0 - ZERO, tl.float16)  # a half is 1024 + field
    return first + base, second + base


@triton.jit
def _field_word(low, high, K: tl.constexpr, LOW_BITS: tl.constexpr, HIGH_BITS: tl.constexpr):
    """Returns two fields of each word, in its two halves."""
    word = low
    if K > 0:
        word = low >> (LOW_BITS * K)
    word &= 0x000F000F if LOW_BITS == 4 else 0x00FF00FF
    if HIGH_BITS > 0:
        # The bits of field K + 4 are 4 HIGH_BITS above those of field K. In the copy they are 16.
        both = high | (high << (16 - 4 * HIGH_BITS))
        left: tl.constexpr = 4 - HIGH_BITS * K
        moved = both << left if left >= 0 else both >> -left
        word |= moved & (0x00100010 if HIGH_BITS == 1 else 0x00300030)
    return word


@triton.jit
def _subtract_scale_add_ref(x, base, scale, second):
    """Returns (x - base) scale + second of f16."""
    return (x - base) * scale + second


@triton.jit
def _subtract_scale_add_ptx(x, base, scale, second):
    """``_subtract_scale_add_ref`` of two f16 at once, with two instructions."""
    return tl.inline_asm_elementwise(
        "{ .reg .b32 t; sub.rn.f16x2 t, $1, $2; fma.rn.f16x2 $0, t, $3, $4; }", "=r,r,r,r,r",
        [x, base, scale, second], dtype=tl.float16, is_pure=True, pack=2,
    )  # fmt: skip


subtract_scale_add = _subtract_scale_add_ref if INTERPRETED else _subtract_scale_add_ptx


@triton.jit
def joined_fields(
    low, high, scale, second, K: tl.constexpr, LOW_BITS: tl.constexpr, HIGH_BITS: tl.constexpr,
    ZERO: tl.constexpr,
):  # fmt: skip
    """Returns weights f16 (rows, 2 words): both fields of ``field_pair`` of a word side by side.

    Tensor cores take two neighbours in one register, and a word has both of them in its halves.
    scale, second (rows, 2 words): a weight is (field - ZERO) scale + second.
    """
    first, other = halves(_field_word(low, high, K, LOW_BITS, HIGH_BITS) | 0x64006400)
    base = tl.full(scale.shape, 1024.0 + ZERO, tl.float16)
    return subtract_scale_add(tl.interleave(first, other), base, scale, second)


@triton.jit
def load_scales(scale_ptr, super_ptr, row, group, n_group, mask, SUPER: tl.constexpr):
    """Returns the words of a group's scales and of its super-block's (or the former twice)."""
    of_group = tl.load(scale_ptr + row * n_group + group, mask=mask, other=0)
    of_super = of_group
    if SUPER:
        at = row * (n_group // 8) + group // 8
        of_super = tl.load(super_ptr + at, mask=mask, other=0)
    return of_group, of_super


@triton.jit
def group_values(
    of_group, of_super, HALVES: tl.constexpr, MINIMUM: tl.constexpr, SUPER: tl.constexpr
):
    """Returns f32: the scale of a group, and its minimum (0 if it has none).

    With HALVES = 2 it returns the scales of the group's first and second 16 elements.
    """
    if HALVES == 2:
        scale = of_super.to(tl.float32)
        pair = of_group.to(tl.int32)
        first = ((pair << 24) >> 24).to(tl.float32) * scale
        second = (pair >> 8).to(tl.float32) * scale
    elif SUPER:
        scale, minimum = halves(of_super.to(tl.uint32, bitcast=True))
        pair = of_group.to(tl.uint16, bitcast=True).to(tl.uint32)
        first = (pair & 255).to(tl.float32) * scale.to(tl.float32)
        second = -((pair >> 8).to(tl.float32) * minimum.to(tl.float32))
    elif MINIMUM:
        scale, minimum = halves(of_group.to(tl.uint32, bitcast=True))
        first, second = scale.to(tl.float32), minimum.to(tl.float32)
    else:
        first = of_group.to(tl.float32)
        second = tl.zeros_like(first)
    return first, second


def planes_of(w: PackedMatrix) -> tuple[torch.Tensor, ...]:
    """Returns the kernels' first four arguments. A kernel does not read a plane that is missing."""
    planes = (w.low, w.high, w.scale, w.super_scale)
    return tuple(w.low if plane is None else plane for plane in planes)


def constants_of(w: PackedMatrix) -> dict[str, Any]:
    packing = PACKINGS[w.name]
    return {
        "LOW_BITS": packing.low_bits, "HIGH_BITS": packing.high_bits, "ZERO": packing.zero,
        "HALVES": packing.halves, "MINIMUM": packing.has_minimum,
        "SUPER": w.super_scale is not None,
    }  # fmt: skip
