"""Integer dot products with the CPU's byte products: vpdpbusd of x86 (VNNI), or sdot of ARM.

An activation of 8 bits is one byte. An activation of 16 bits is two signed bytes, x = 256 hi + lo.
One or two instructions multiply 64 weights. The pairs of i16 in weights/integer.py take four, and
four to widen. The integers are the same. vpdpbusd takes unsigned weights: a format's ``zero`` is
added to signed weights, and the offsets subtract it again. sdot takes signed weights, and all
unsigned weights are below 128.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from sparsekv_cli.cpu.jit import llvm
from sparsekv_cli.cpu.jit.value import (
    F32,
    I8,
    I32,
    I64,
    LANES,
    VF,
    VI,
    Value,
    call_named,
    const,
    load,
    vec,
)
from sparsekv_cli.cpu.weights.block import Block, BlockFormat

BLOCK = 32  # activations under one scale
BYTES = 64  # weights an instruction
LINE = 64
# Bytes between weights in use and their prefetch: more than a page, where the CPU's own prefetcher
# stops.
AHEAD = 8192
ACCUMULATORS = 2  # independent sums of a row of activations; four rows' sums fit the registers


def is_available() -> bool:
    """Returns whether the CPU has vpdpbusd (AVX-512 or AVX-VNNI) or sdot."""
    return llvm.has_feature("avx512vnni") or llvm.has_feature("avxvnni") or takes_signed()


def takes_signed() -> bool:
    """Returns whether the products are ARM's sdot, which multiplies signed bytes only."""
    return llvm.has_feature("dotprod")


def has_both_forms() -> bool:
    """Returns whether activations are stored as i16 and bytes (CPUs with only vpmaddubsw)."""
    return llvm.has_feature("avx2") and not is_available()


def _arm_dots(total: Value, w: Value, x: Value, unsigned: bool) -> Value:
    """``add_dots`` on ARM, four sums at a time."""
    bytes_, high = vec(I8, 16), const(I8, -128, 16)

    def dots(name: str, *args: Value) -> Value:
        name = f"llvm.aarch64.neon.{name}.v4i32.v16i8"
        return call_named(name, vec(I32, 4), *args)

    parts = []
    for at in range(0, total.type.count, 4):
        four, *of_four = (part.shuffle(range(at, at + 4)) for part in (total, w, x))
        w4, x4 = (part.bitcast(bytes_) for part in of_four)
        if not unsigned:
            parts.append(dots("sdot", four, w4, x4))
        elif llvm.has_feature("i8mm"):
            parts.append(dots("usdot", four, w4, x4))
        else:  # w - 128, and the sum of 128 x
            excess = dots("sdot", const(I32, 0, 4), high, x4)
            parts.append(dots("sdot", four, w4 ^ high, x4) - excess)
    return _concatenated(parts)


def add_dots(total: Value, w: Value, x: Value, *, unsigned: bool = False) -> Value:
    """Returns total <n x i32> + sums of four products of w <4n x u8> and x <4n x i8>, n 8 or 16.

    On ARM w is signed, unless ``unsigned``: then some bytes are above 127.
    """
    type_ = total.type
    w, x = w.bitcast(type_), x.bitcast(type_)
    if takes_signed():
        return _arm_dots(total, w, x, unsigned)
    name = f"llvm.x86.avx512.vpdpbusd.{32 * type_.count}"
    return call_named(name, type_, total, w, x)


def dot_bytes(total: Value, w: Value, x: Value, *, unsigned: bool = False) -> Value:
    """``add_dots`` of w <64 x u8> and x <64 x i8>."""
    if llvm.has_feature("avx512vnni") or takes_signed():
        return add_dots(total, w, x, unsigned=unsigned)
    w, x = w.bitcast(VI), x.bitcast(VI)
    eights = range(8), range(8, 16)
    halves = [add_dots(*(part.shuffle(lanes) for part in (total, w, x))) for lanes in eights]
    return halves[0].shuffle(range(LANES), halves[1])


def _concatenated(parts: list[Value]) -> Value:
    while len(parts) > 1:
        pairs = zip(parts[::2], parts[1::2], strict=True)
        parts = [low.shuffle(range(2 * low.type.count), high) for low, high in pairs]
    return parts[0]


def _decode(format_: BlockFormat, p: Value, n_blocks: int) -> Block:
    """Decodes n_blocks (1, 2 or 4) neighbouring blocks from address p on as one Block.

    Its q are vectors of 64 bytes, as ``add_dots`` takes them. A single block of 32 weights is
    padded with 32 zeros, which have the block's scale. Four blocks of 32 give two vectors.
    """
    assert format_.decode is not None
    if n_blocks == 4 and format_.decode_four is not None:
        block = format_.decode_four(p)
        q, offsets = block.q, block.offsets
    else:
        addresses = [p + i * format_.n_bytes for i in range(n_blocks)]
        blocks = [format_.decode(address) for address in addresses]
        parts = [part for block in blocks for part in block.q]
        if n_blocks * format_.n_elements < BYTES:
            parts += [const(I8, 0)] * 2
        each = BYTES // parts[0].type.count
        q = [_concatenated(parts[i : i + each]) for i in range(0, len(parts), each)]
        scales = _concatenated([block.scales for block in blocks])
        given = [block.offsets for block in blocks if block.offsets is not None]
        offsets = _concatenated(given) if given else None
        block = Block(q, blocks[0].signed, scales, offsets)
    if block.signed and not takes_signed():
        q = [part + format_.zero for part in q]
        zeros = const(F32, -float(format_.zero), block.scales.type.count)
        offsets = block.scales * zeros
    return Block(q, False, block.scales, offsets)


class ByteInputs(NamedTuple):
    """Addresses of one row of quantised activations (``quantized_bytes`` of weights/integer.py)."""

    values: Value  # i16 (n,), if the CPU has no byte products
    planes: list[Value]  # i8 (n,) each: the high and low bytes, or values of 8 bits
    scales: Value
    sums16: Value
    sums32: Value


def inputs_at(x: Value, n: Value, n_planes: int) -> ByteInputs:
    """Returns the parts of n quantised activations at x, of ``n_planes`` bytes each."""
    small = n // BLOCK * 4
    scales = x + n * 2
    sums16 = scales + small
    sums32 = sums16 + small * 2
    high = sums32 + small if has_both_forms() else x
    planes = [high, high + n][:n_planes]
    return ByteInputs(x, planes, scales, sums16, sums32)


def _add_products(
    block: Block,
    n_elements: int,
    inputs: ByteInputs,
    at: Value,
    carried: list[Value],
    lines: llvm.Prefetches,
) -> list[Value]:
    """Adds the products of ``n_elements`` decoded weights with the activations from ``at`` on.

    carried: ACCUMULATORS sums and the sum of the offsets, <16 x float> each.
    """
    *totals, offset = carried
    n_scales = block.scales.type.count
    n_small = n_elements // BLOCK
    scales = load(vec(F32, n_small), inputs.scales + at // (BLOCK // 4))
    lanes = [j * n_small // n_scales for j in range(n_scales)]
    scales = block.scales * scales.shuffle(lanes)
    a_scale = n_elements // n_scales
    for c, q in enumerate(block.q):
        x_type = vec(I8, min(BYTES, n_elements))
        dots = const(I32, 0)
        for i, plane in enumerate(inputs.planes):
            x = load(x_type, plane + at, BYTES * c)
            if n_elements < BYTES:
                x = x.shuffle(range(BYTES), const(I8, 0, n_elements))
            lines.step()
            dots = dot_bytes(dots << 8 if i else dots, q, x)
        dots = dots.to(VF)
        lanes = [min((BYTES * c + 4 * i) // a_scale, n_scales - 1) for i in range(LANES)]
        slot = c % ACCUMULATORS
        totals[slot] = dots.fma(scales.shuffle(lanes), totals[slot])
    if block.offsets is not None:
        sums = inputs.sums32 if a_scale == BLOCK else inputs.sums16
        sums = load(vec(F32, n_scales), sums + at // (a_scale // 4))
        offset = _add_lanes(offset, block.offsets * sums)
    if len(block.q) < ACCUMULATORS:  # the next block adds to the other sums
        totals = totals[len(block.q) :] + totals[: len(block.q)]
    return [*totals, offset]


def emit_row(
    format_: BlockFormat, n_planes: int, w: Value, xs: Sequence[Value], n: Value
) -> list[Value]:
    """Returns the dot products, floats, of one row at w with each of ``xs``.

    xs: addresses of n quantised activations each, of ``n_planes`` bytes. A block is decoded once
    for all inputs. A product's bits do not depend on the other inputs.
    """
    n_blocks = n // format_.n_elements
    rows = [inputs_at(x, n, n_planes) for x in xs]
    width = ACCUMULATORS + 1

    def add_blocks(i: Value, count: int, carried: list[Value]) -> list[Value]:
        """Returns the sums ``carried`` with the products of blocks i .. i + count - 1 added."""
        p = w + i * format_.n_bytes
        block = _decode(format_, p, count)
        ahead = range(AHEAD, AHEAD + count * format_.n_bytes, LINE)
        lines = llvm.Prefetches([p + n for n in ahead], n_planes * len(block.q))
        at = i * format_.n_elements  # element
        sums = []
        for j, inputs in enumerate(rows):
            mine = carried[width * j : width * (j + 1)]
            sums += _add_products(block, count * format_.n_elements, inputs, at, mine, lines)
        return sums

    carried = [const(F32, 0.0)] * (width * len(rows))
    done: Value = I64(0)
    for size in (4, 2, 1) if format_.n_elements == BLOCK else (1,):
        end = n_blocks - (n_blocks - done) % size

        def body(i: Value, now: list[Value], size: int = size) -> list[Value]:
            return add_blocks(i, size, now)

        carried = llvm.loop(done, end, size, carried, body)
        done = end
    dots = []
    for j in range(len(rows)):
        first, second, offset = carried[width * j : width * (j + 1)]
        dots.append(llvm.sum_lanes(first + second + offset))
    return dots


def _add_lanes(total: Value, part: Value) -> Value:
    """Returns total <16 x float> + part of up to 16 lanes, padded with zeros."""
    n = part.type.count
    if n < LANES:
        zeros = const(F32, 0.0, n)
        part = part.shuffle([min(i, n) for i in range(LANES)], zeros)
    return total + part
