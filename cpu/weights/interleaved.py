"""Repacked weights: sixteen rows of a matrix are interleaved, so that each row has its own lane.

In the file's layout a row's dot product ends with a sum over lanes. Scales must be spread over
lanes, and vectors straddle cache lines. In rows of a few hundred columns this takes most of the
time. One lane per row avoids it. The cost is a copy of the weights of the same size.
Block formats are repacked, with three exceptions. Q8_0's products already run at the speed of
memory. The others are formats whose elements are looked up in grids or are base-3 digits.

Layout: the blocks i of a group's 16 rows lie together, after the blocks i - 1. First come the
scales, 16 of a kind (32 bytes). Then come the block's other bytes in the order of their use, four
of each row (64 bytes). vpdpbusd or sdot (weights/vnni.py) multiplies these by four activations of
one or two bytes. Other CPUs use vpmaddubsw, whose sums of two products are i16. Some of these are
added before they are widened. The integers of IQ4_NL and IQ4_XS are too large for that and are
widened to i16 first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numba import prange

from sparsekv_cli.cpu.jit import llvm
from sparsekv_cli.cpu.jit.emitter import LITERAL, emitter
from sparsekv_cli.cpu.jit.kernel import njit
from sparsekv_cli.cpu.jit.threads import PRANGE_ONLY
from sparsekv_cli.cpu.jit.value import (
    F32,
    I8,
    I16,
    I32,
    I64,
    LANES,
    VF,
    Value,
    const,
    load,
    store,
    vec,
)
from sparsekv_cli.cpu.weights import vnni
from sparsekv_cli.cpu.weights.block import BlockFormat
from sparsekv_cli.cpu.weights.formats import FORMAT_OF_CODE
from sparsekv_cli.cpu.weights.integer import byte_products, pair_products
from sparsekv_cli.cpu.weights.interleaved_blocks import DECODERS, InterleavedBlock
from sparsekv_cli.cpu.weights.vnni import BLOCK, BYTES, LINE, ByteInputs

GROUP = LANES  # rows that are interleaved
ROWS_AT_ONCE = 4  # rows of bytes whose sums AVX2's registers hold
MOST_INPUTS = 8 if llvm.has_feature("avx512vnni") else 4  # inputs that share the unpacked weights
INPUTS = tuple(sorted({1, 2, 3, 4, MOST_INPUTS}))  # numbers of inputs that have their own code
AHEAD = 7168 if llvm.ON_AMD else 16384  # bytes from the weights in use to those prefetched


class Scales(NamedTuple):
    """The scales at a block's start or end, which are no words of four bytes."""

    at: int  # offset in bytes
    n: int
    size: int  # bytes of one scale


def scales_of(format_: BlockFormat) -> Scales:
    """Returns the f16 scales of a format, or MXFP4's exponent of one byte.

    IQ4_XS has 16 more bits next to its scale; they count as a scale. NVFP4's four scales of a byte
    are a word, so its n is 0.
    """
    if not format_.type.scales:
        return Scales(0, format_.n_bytes % 4, 1)
    ((at, count),) = format_.type.scales
    return Scales(at, count + (format_.n_bytes - 2 * count) % 4 // 2, 2)


def word_order(format_: BlockFormat) -> tuple[int, ...]:
    """Returns for each word of a repacked block its number in the file's block, without scales."""
    _, count, size = scales_of(format_)
    return format_.word_order or tuple(range((format_.n_bytes - size * count) // 4))


def can_repack(code: int, n_rows: int) -> bool:
    """Returns whether a repacked matrix of ggml type ``code`` is faster on this CPU."""
    has_products = vnni.is_available() or llvm.has_feature("avx2")
    return FORMAT_OF_CODE[code].interleaves and n_rows % GROUP == 0 and has_products


# --- repacking ------------------------------------------------------------------------------------


@njit(cache=True, nogil=True)
def _word(row, at):
    """Returns the four bytes from unit ``at`` of a row of uint8 or uint16, as a number."""
    if row.itemsize == 2:
        return np.uint32(row[at]) | np.uint32(row[at + 1]) << np.uint32(16)
    low = np.uint32(row[at]) | np.uint32(row[at + 1]) << np.uint32(8)
    return low | np.uint32(row[at + 2]) << np.uint32(16) | np.uint32(row[at + 3]) << np.uint32(24)


@njit(cache=True, nogil=True, parallel=PRANGE_ONLY)
def _repack(rows, n_scales, scales_at, order, out, words):
    """Repacks rows (n, units a row) to out (n / GROUP, GROUP * ...). A unit is uint16 or uint8.

    words: ``out`` as uint32. A block has n_scales units of scales at ``scales_at``, its start or
    end. Its words of four bytes are written in ``order``, each for all rows. So the writes are in a
    row, which is six times as fast as reads in a row.
    """
    a_word = 4 // rows.itemsize  # units
    n_units, rest_at = n_scales + a_word * len(order), 0 if scales_at > 0 else n_scales
    for group in prange(out.shape[0]):
        of_group = rows[group * GROUP : (group + 1) * GROUP]
        for start in range(0, rows.shape[1], n_units):
            at = GROUP * start
            for unit in range(start + scales_at, start + scales_at + n_scales):
                for r in range(GROUP):
                    out[group, at + r] = of_group[r, unit]
                at += GROUP
            at //= a_word
            for word in order:
                for r in range(GROUP):
                    words[group, at + r] = _word(of_group[r], start + rest_at + a_word * word)
                at += GROUP


def repack(code: int, w: np.ndarray, out: np.ndarray) -> None:
    """Repacks w, uint8 (rows, row bytes) in format ``code``, to ``out`` of the same shape.

    ``out`` begins at a multiple of four bytes.
    """
    at, count, size = scales_of(FORMAT_OF_CODE[code])
    unit = np.uint16 if size == 2 else np.uint8
    groups = out.reshape(len(w) // GROUP, -1)
    order = np.array(word_order(FORMAT_OF_CODE[code]))
    units, words = groups.view(unit), groups.view(np.uint32)
    _repack(w.view(unit), count, at // size, order, units, words)


def repack_ref(code: int, w: np.ndarray) -> np.ndarray:
    """numpy reference of ``repack``: the layout above, written as reshapes."""
    format_ = FORMAT_OF_CODE[code]
    start, count, scale_size = scales_of(format_)
    end = start + scale_size * count
    blocks = w.reshape(len(w) // GROUP, GROUP, -1, format_.n_bytes)

    def planes(part: np.ndarray, size: int) -> np.ndarray:
        units = part.reshape(*blocks.shape[:3], -1, size)  # group, row, block, unit, byte
        moved = units.transpose(0, 2, 3, 1, 4)
        return moved.reshape(len(blocks), blocks.shape[2], -1)

    rest = np.concatenate([blocks[..., :start], blocks[..., end:]], -1)
    places = [4 * word + byte for word in word_order(format_) for byte in range(4)]
    parts = planes(blocks[..., start:end], scale_size), planes(rest[..., places], 4)
    return np.concatenate(parts, -1).reshape(w.shape)


# --- dot products ---------------------------------------------------------------------------------


def _dots(
    qs: list[Value], rows: Sequence[ByteInputs], at: Value, lines: llvm.Prefetches
) -> list[Value]:
    """Returns <16 x i32> for each of ``rows``: the integers times the activations from ``at`` on.

    A word is multiplied by all rows before the next word, so that sums do not wait for each other.
    """
    sums = [[const(I32, 0)] * len(inputs.planes) for inputs in rows]
    for i, q in enumerate(qs):
        for inputs, of_row in zip(rows, sums, strict=True):
            for j, plane in enumerate(inputs.planes):
                lines.step()
                four = load(I32, plane + at, 4 * i).splat()
                of_row[j] = vnni.dot_bytes(of_row[j], q, four)
    return [of_row[0] if len(of_row) == 1 else (of_row[0] << 8) + of_row[1] for of_row in sums]


def _short_dots(
    qs: list[Value], rows: Sequence[ByteInputs], at: Value, lines: llvm.Prefetches, room: int
) -> list[Value]:
    """``_dots`` with AVX2, for integers so small that ``room`` sums of two products fit an i16.

    A word is multiplied by all ``rows`` while it is in registers.
    """
    units = (256, 1) if len(rows[0].planes) == 2 else (1,)
    dots = [[const(I32, 0, 8)] * 2 for _ in rows]
    for first in range(0, len(qs), room):
        sums = [[[const(I16, 0)] * 2 for _ in units] for _ in rows]
        for i, q in enumerate(qs[first : first + room], first):
            for j, inputs in enumerate(rows):
                for plane, of_plane in zip(inputs.planes, sums[j], strict=True):
                    lines.step()
                    four = load(I32, plane + at, 4 * i).splat(8)
                    for half, part in enumerate(_halves(q)):
                        products = byte_products(part, four.bitcast(part.type))
                        of_plane[half] = llvm.add_in_order(of_plane[half], products)
            if len(rows) > 1:
                flat = llvm.together([total for row in sums for part in row for total in part])
                sums = [[[flat.pop(0) for _ in part] for part in row] for row in sums]
        for of_row, of_planes in zip(dots, sums, strict=True):
            for unit, of_plane in zip(units, of_planes, strict=True):
                for half, total in enumerate(of_plane):
                    products = pair_products(total, const(I16, unit))
                    of_row[half] = of_row[half] + products
    return [low.shuffle(range(LANES), high) for low, high in dots]


def _pair_dots(qs: list[Value], inputs: ByteInputs, at: Value, lines: llvm.Prefetches) -> Value:
    """``_dots`` with AVX2, for any bytes and one row of activations."""
    values = inputs.values + at * 2
    zeros = const(I8, 0, 32)
    # punpcklbw and punpckhbw widen each half of the rows to 16 bits: rows 0, 1, 4 and 5, and the
    # others. Each row has the sum of the first two products and the sum of the last two.
    sums = [const(I32, 0, 8)] * 4
    places = [[start + i for start in (first, first + 16) for i in range(8)] for first in (0, 8)]
    for i, q in enumerate(qs):
        four = load(I64, values, 8 * i).splat(4).bitcast(vec(I16))
        wide = [
            half.shuffle([lane for place in each for lane in (place, 32)], zeros)
            for half in _halves(q)
            for each in places
        ]
        for part, pairs in enumerate(wide):
            products = pair_products(pairs.bitcast(vec(I16)), four)
            sums[part] = llvm.add_in_order(sums[part], products)
        for _ in inputs.planes:
            lines.step()
    even = [0, 2, 8, 10, 4, 6, 12, 14]
    odd = [lane + 1 for lane in even]
    low, high = (
        first.shuffle(even, second) + first.shuffle(odd, second)
        for first, second in (sums[:2], sums[2:])
    )
    return low.shuffle(range(LANES), high)


def _halves(word: Value) -> list[Value]:
    """Returns the bytes of a word's first 8 rows and of the others, <32 x i8>."""
    bytes_ = word.bitcast(vec(I8, BYTES))
    return [bytes_.shuffle(range(start, start + 32)) for start in (0, 32)]


def _add_block(
    block: InterleavedBlock,
    largest: int,
    rows: Sequence[ByteInputs],
    at: Value,
    totals: Sequence[Value],
    lines: llvm.Prefetches,
) -> list[Value]:
    """Returns totals + the products of the block with each row's activations from ``at`` on."""
    room = np.iinfo(np.int16).max // (2 * 128 * largest)
    if room > 0 and not vnni.is_available():
        dots, step = [], ROWS_AT_ONCE // len(rows[0].planes)
        for i in range(0, len(rows), step):
            dots += _short_dots(block.q, rows[i : i + step], at, lines, room)
    elif vnni.is_available():
        dots = _dots(block.q, rows, at, lines)
    else:
        dots = [_pair_dots(block.q, inputs, at, lines) for inputs in rows]
    n, new = 4 * len(block.q), []
    for products, inputs, total in zip(dots, rows, totals, strict=True):
        sums = inputs.sums32 if n == BLOCK else inputs.sums16
        scale, known = (
            load(F32, part + at.unsigned_div(size) * 4).splat()
            for part, size in ((inputs.scales, BLOCK), (sums, n))
        )
        total = products.to(VF).fma(block.scale * scale, total)
        new.append(block.offset.fma(known, total))
    return new


@emitter(code=LITERAL, n_planes=LITERAL, count=INPUTS)
def _group_dots(code, n_planes, count, w, x, x_row, n, out, out_row):
    """Writes the dot products of 16 rows with each of ``count`` inputs, f32 (16,), to ``out``.

    code, n_planes: literals. w, x, out: addresses of the group, of quantised activations
    (weights/integer.py) x_row bytes apart, and of results out_row bytes apart. A result's bits do
    not depend on the other inputs.
    """
    format_ = FORMAT_OF_CODE[code]
    block_bytes = GROUP * format_.n_bytes
    xs = [x + j * x_row for j in range(count)]
    rows = [vnni.inputs_at(at, n, n_planes) for at in xs]

    def body(i, totals):
        p = w + i * block_bytes
        at = i * format_.n_elements
        ahead = [p + (AHEAD + line) for line in range(0, block_bytes, LINE)]
        n_steps = n_planes * format_.n_elements // 4 * count
        is_short = vnni.is_available() or n_planes == 1
        lines = llvm.Prefetches(ahead, n_steps, fixed=is_short)
        for block in DECODERS[format_.name](p):
            totals = _add_block(block, format_.largest, rows, at, totals, lines)
            at = at + 4 * len(block.q)
        return totals

    zeros = [const(F32, 0.0)] * count
    totals = llvm.loop(0, n // format_.n_elements, 1, zeros, body)
    for j, total in enumerate(totals):
        store(total, out + j * out_row)


@njit(cache=True, nogil=True)
def groups_dot(
    code, n_planes, w, row_bytes, n_columns, x, x_row, n_inputs, out, out_row, first, last
):
    """``rows_dot`` (weights/dot.py) over repacked weights; first, last: multiples of GROUP."""
    for r in range(first, last, GROUP):
        at, i = w + r * row_bytes, 0
        while i < n_inputs:
            source, to, count = x + i * x_row, out + i * out_row + 4 * r, n_inputs - i
            count = MOST_INPUTS if count >= MOST_INPUTS else min(count, 4)
            _group_dots(code, n_planes, count, at, source, x_row, n_columns, to, out_row)
            i += count
