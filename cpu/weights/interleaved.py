"""Repacked weights: sixteen rows of a matrix are interleaved, so that each has a lane of its own.

As weights lie in a file, a row's dot product ends with a sum over lanes, scales have to be spread
over lanes, and vectors straddle cache lines; in rows of a few hundred columns that takes most of
the time. None of it is left when each lane is a row. The price is a copy of the weights of the same
size. Formats are repacked where it pays: not Q8_0 and Q5_K, whose products are as slow as memory,
and Q4_K and Q6_K only where the CPU has no byte products.

Layout: the blocks i of a group's 16 rows lie together, behind the blocks i - 1. First come the f16
scales, 16 of a kind (32 bytes), then the block's other bytes in the order of their use, four of
each row (64 bytes). They are multiplied with four activations of 16 bits, as two bytes each: by
vpdpbusd (weights/vnni.py), else by vpmaddubsw, whose sums of two products are i16; some of these
can be added ahead of widening them. IQ4_NL's integers are too large for that and become i16 first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
from llvmlite import ir
from numba import njit, prange, types
from numba.extending import intrinsic

from sparsekv_cli.cpu.jit import llvm
from sparsekv_cli.cpu.jit.llvm import (
    F16,
    F32,
    I8,
    I16,
    I32,
    I64,
    LANES,
    VF,
    VI,
    const,
    load,
    shuffle,
    vec,
)
from sparsekv_cli.cpu.jit.threads import PRANGE_ONLY
from sparsekv_cli.cpu.weights import vnni
from sparsekv_cli.cpu.weights.formats import (
    ALWAYS,
    FORMAT_OF_CODE,
    FORMATS,
    IQ4_NL_VALUES,
    BlockFormat,
    lookup16,
)
from sparsekv_cli.cpu.weights.integer import byte_products, pair_products
from sparsekv_cli.cpu.weights.vnni import BLOCK, BYTES, LINE, ByteInputs

GROUP = LANES  # rows side by side
AHEAD = 8192 if llvm.ON_AMD else 16384  # bytes by which weights are fetched before their use


class InterleavedBlock(NamedTuple):
    """32 or 16 elements of each of 16 rows; an element is q * scale + offset."""

    q: list[ir.Value]  # 8 or 4 <16 x i32>: four elements of every row, unsigned bytes
    scale: ir.Value  # <16 x float>
    offset: ir.Value


def _scale(b: ir.IRBuilder, p: ir.Value, i: int) -> ir.Value:
    """f16 number i of every row's block, <16 x float>."""
    return b.fpext(load(b, vec(F16), p, 2 * LANES * i), VF)


def _word(b: ir.IRBuilder, p: ir.Value, n_scales: int, i: int) -> ir.Value:
    """Word i of four bytes of every row behind the scales, <16 x i32>."""
    return load(b, VI, p, 2 * LANES * n_scales + 4 * LANES * i)


def _words(b: ir.IRBuilder, p: ir.Value, n_scales: int, count: int) -> list[ir.Value]:
    return [_word(b, p, n_scales, i) for i in range(count)]


def _half_bytes(b: ir.IRBuilder, words: Sequence[ir.Value], high: bool) -> list[ir.Value]:
    """The low or high four bits of every byte."""
    shifted = [b.lshr(word, const(I32, 4)) for word in words] if high else words
    return [b.and_(word, const(I32, 0x0F0F0F0F)) for word in shifted]


def _nibbles(b: ir.IRBuilder, words: Sequence[ir.Value]) -> list[ir.Value]:
    """32 four-bit integers, whose low halves come first."""
    return _half_bytes(b, words, False) + _half_bytes(b, words, True)


def _with_fifth(b: ir.IRBuilder, q: Sequence[ir.Value], bits: ir.Value) -> list[ir.Value]:
    """q with bit i of ``bits`` as the fifth of element i."""
    result = []
    for i, nibble in enumerate(q):
        four = b.and_(b.lshr(bits, const(I32, 4 * i)), const(I32, 15))
        # Bit j of four goes to bit 0 of byte j (and elsewhere).
        spread = b.mul(four, const(I32, sum(1 << 7 * j for j in range(4))))
        fifth = b.shl(b.and_(spread, const(I32, 0x01010101)), const(I32, 4))
        result.append(b.or_(nibble, fifth))
    return result


def _around(b: ir.IRBuilder, q: list[ir.Value], scale: ir.Value, name: str) -> InterleavedBlock:
    """Integers q - zero of the format ``name``."""
    return InterleavedBlock(q, scale, b.fmul(scale, const(F32, -float(FORMATS[name].zero))))


def _q4_0(b: ir.IRBuilder, p: ir.Value) -> Iterator[InterleavedBlock]:
    yield _around(b, _nibbles(b, _words(b, p, 1, 4)), _scale(b, p, 0), "Q4_0")


def _q4_1(b: ir.IRBuilder, p: ir.Value) -> Iterator[InterleavedBlock]:
    yield InterleavedBlock(_nibbles(b, _words(b, p, 2, 4)), _scale(b, p, 0), _scale(b, p, 1))


def _q5_0(b: ir.IRBuilder, p: ir.Value) -> Iterator[InterleavedBlock]:
    bits, *words = _words(b, p, 1, 5)
    yield _around(b, _with_fifth(b, _nibbles(b, words), bits), _scale(b, p, 0), "Q5_0")


def _q5_1(b: ir.IRBuilder, p: ir.Value) -> Iterator[InterleavedBlock]:
    bits, *words = _words(b, p, 2, 5)
    yield InterleavedBlock(
        _with_fifth(b, _nibbles(b, words), bits), _scale(b, p, 0), _scale(b, p, 1)
    )


def _iq4_nl(b: ir.IRBuilder, p: ir.Value) -> Iterator[InterleavedBlock]:
    table = tuple(value + FORMATS["IQ4_NL"].zero for value in IQ4_NL_VALUES)
    nibbles = (b.bitcast(word, vec(I8, BYTES)) for word in _nibbles(b, _words(b, p, 1, 4)))
    q = [b.bitcast(lookup16(b, table, part), VI) for part in nibbles]
    yield _around(b, q, _scale(b, p, 0), "IQ4_NL")


def _byte(b: ir.IRBuilder, words: Sequence[ir.Value], i: int) -> ir.Value:
    """Byte i of the bytes in ``words``, unsigned <16 x i32>."""
    shifted = b.lshr(words[i // 4], const(I32, 8 * (i % 4)))
    return b.and_(shifted, const(I32, 255))


def _k_affine(b: ir.IRBuilder, p: ir.Value) -> Iterator[tuple[ir.Value, ir.Value]]:
    """Scale and offset of the eight parts of a block of Q4_K (see weights/formats.py)."""
    d, dmin = _scale(b, p, 0), b.fneg(_scale(b, p, 1))
    words = _words(b, p, 2, 3)
    for i in range(8):
        low, high = (_byte(b, words, at) for at in (i % 4, 4 + i % 4))
        if i < 4:
            scale, minimum = (b.and_(each, const(I32, 63)) for each in (low, high))
        else:
            rest = _byte(b, words, 4 + i)
            tops = (b.shl(b.lshr(each, const(I32, 6)), const(I32, 4)) for each in (low, high))
            nibbles = b.and_(rest, const(I32, 15)), b.lshr(rest, const(I32, 4))
            scale, minimum = (b.or_(*pair) for pair in zip(nibbles, tops, strict=True))
        yield b.fmul(d, b.sitofp(scale, VF)), b.fmul(dmin, b.sitofp(minimum, VF))


def _with_bits(
    b: ir.IRBuilder, q: Sequence[ir.Value], words: Sequence[ir.Value], first: int, count: int
) -> list[ir.Value]:
    """q with ``count`` bits of every byte of ``words``, from bit ``first`` on, above its four."""
    shift = b.shl if first <= 4 else b.lshr
    every = const(I32, 0x10101010 * ((1 << count) - 1))
    tops = (b.and_(shift(word, const(I32, abs(4 - first))), every) for word in words)
    return [b.or_(low, top) for low, top in zip(q, tops, strict=True)]


def _q4_k(b: ir.IRBuilder, p: ir.Value) -> Iterator[InterleavedBlock]:
    for i, (scale, offset) in enumerate(_k_affine(b, p)):
        words = [_word(b, p, 2, 3 + 8 * (i // 2) + j) for j in range(8)]
        yield InterleavedBlock(_half_bytes(b, words, i % 2 == 1), scale, offset)


def _q6_k(b: ir.IRBuilder, p: ir.Value) -> Iterator[InterleavedBlock]:
    d = _scale(b, p, 0)
    for i in range(16):  # 16 elements each
        half, part, j = i // 8, i % 8 // 2, i % 2
        start = 4 + 24 * half + 4 * j
        bits = [_word(b, p, 1, start + k) for k in range(4)]
        words = [_word(b, p, 1, start + 8 + 8 * (part % 2) + k) for k in range(4)]
        q = _with_bits(b, _half_bytes(b, words, part >= 2), bits, 2 * part, 2)
        left = const(I32, 24 - 8 * (i % 4))
        signed = b.ashr(b.shl(_word(b, p, 1, i // 4), left), const(I32, 24))
        yield _around(b, q, b.fmul(d, b.sitofp(signed, VF)), "Q6_K")


# How the blocks of a group are decoded: the parts of a block in turn.
DECODERS: dict[str, Callable[[ir.IRBuilder, ir.Value], Iterator[InterleavedBlock]]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "IQ4_NL": _iq4_nl,
    "Q4_K": _q4_k,
    "Q6_K": _q6_k,
}


def scales_of(format_: BlockFormat) -> tuple[int, int]:
    """Where the f16 scales of a block are, the start or the end of it, in bytes; how many."""
    ((at, count),) = format_.type.scales
    return at, count


def word_order(format_: BlockFormat) -> tuple[int, ...]:
    """For each word of a repacked block, its number in the file's block; scales are not counted."""
    n_words = (format_.n_bytes - 2 * scales_of(format_)[1]) // 4
    return format_.word_order or tuple(range(n_words))


def can_repack(code: int, n_rows: int) -> bool:
    """Whether this CPU gains by repacking a matrix of ggml type ``code``."""
    interleaves = FORMAT_OF_CODE[code].interleaves
    if not interleaves or n_rows % GROUP != 0:
        return False
    return interleaves == ALWAYS if vnni.is_available() else llvm.has_feature("avx2")


# --- repacking ------------------------------------------------------------------------------------


@njit(cache=True, nogil=True, parallel=PRANGE_ONLY)
def _repack(rows, n_scales, scales_at, order, out):
    """rows uint16 (n, units a row) in blocks -> out uint16 (n / GROUP, GROUP * ...).

    A block has n_scales units at ``scales_at``, the start or the end, and words of two, which take
    the ``order``.
    """
    n_units, rest_at = n_scales + 2 * len(order), 0 if scales_at > 0 else n_scales
    for group in prange(out.shape[0]):
        for i in range(rows.shape[1] // n_units):
            for r in range(GROUP):
                row = rows[group * GROUP + r, i * n_units : (i + 1) * n_units]
                at = i * GROUP * n_units
                for unit in range(n_scales):
                    out[group, at + r] = row[scales_at + unit]
                    at += GROUP
                for word in order:
                    out[group, at + 2 * r] = row[rest_at + 2 * word]
                    out[group, at + 2 * r + 1] = row[rest_at + 2 * word + 1]
                    at += 2 * GROUP


def repack(code: int, w: np.ndarray, out: np.ndarray) -> None:
    """Repacks w, uint8 (rows, row bytes) in format ``code``, to ``out`` of the same shape."""
    scales_at, n_scales = scales_of(FORMAT_OF_CODE[code])
    units = out.reshape(len(w) // GROUP, -1).view(np.uint16)
    order = np.array(word_order(FORMAT_OF_CODE[code]))
    _repack(w.view(np.uint16), n_scales, scales_at // 2, order, units)


def repack_ref(code: int, w: np.ndarray) -> np.ndarray:
    """numpy reference of ``repack``: the layout above, written as reshapes."""
    format_ = FORMAT_OF_CODE[code]
    start, n_scales = scales_of(format_)
    end = start + 2 * n_scales
    blocks = w.reshape(len(w) // GROUP, GROUP, -1, format_.n_bytes)

    def planes(part: np.ndarray, size: int) -> np.ndarray:
        units = part.reshape(*blocks.shape[:3], -1, size)  # group, row, block, unit, byte
        moved = units.transpose(0, 2, 3, 1, 4)
        return moved.reshape(len(blocks), blocks.shape[2], -1)

    rest = np.concatenate([blocks[..., :start], blocks[..., end:]], -1)
    places = [4 * word + byte for word in word_order(format_) for byte in range(4)]
    parts = planes(blocks[..., start:end], 2), planes(rest[..., places], 4)
    return np.concatenate(parts, -1).reshape(w.shape)


# --- dot products ---------------------------------------------------------------------------------


def _dots(
    b: ir.IRBuilder, qs: list[ir.Value], inputs: ByteInputs, at: ir.Value, lines: llvm.Prefetches
) -> ir.Value:
    """<16 x i32>: a row's integers times the activations from ``at`` on."""
    sums = []
    for plane in (inputs.high, inputs.low):
        dots = const(I32, 0)
        for i, q in enumerate(qs):
            lines.step(b)
            four = llvm.splat(b, load(b, I32, b.add(plane, at), 4 * i))
            dots = vnni.dot_bytes(b, dots, q, four)
        sums.append(dots)
    return b.add(b.shl(sums[0], const(I32, 8)), sums[1])


def _short_dots(
    b: ir.IRBuilder,
    qs: list[ir.Value],
    inputs: ByteInputs,
    at: ir.Value,
    lines: llvm.Prefetches,
    room: int,
) -> ir.Value:
    """The same with AVX2, of integers so small that ``room`` sums of two products fit i16."""
    planes = ((inputs.high, 256), (inputs.low, 1))
    dots = [const(I32, 0, 8)] * 2
    for first in range(0, len(qs), room):
        sums = [[const(I16, 0)] * 2 for _ in planes]
        for i, q in enumerate(qs[first : first + room], first):
            for (plane, _), of_plane in zip(planes, sums, strict=True):
                lines.step(b)
                four = llvm.splat(b, load(b, I32, b.add(plane, at), 4 * i), 8)
                for half, part in enumerate(_halves(b, q)):
                    products = byte_products(b, part, b.bitcast(four, part.type))
                    of_plane[half] = llvm.add_in_order(b, of_plane[half], products)
        for (_, unit), of_plane in zip(planes, sums, strict=True):
            for half, total in enumerate(of_plane):
                dots[half] = b.add(dots[half], pair_products(b, total, const(I16, unit)))
    low, high = dots
    return shuffle(b, low, high, range(LANES))


def _pair_dots(
    b: ir.IRBuilder, qs: list[ir.Value], inputs: ByteInputs, at: ir.Value, lines: llvm.Prefetches
) -> ir.Value:
    """The same with AVX2, of any bytes."""
    values = b.add(inputs.values, b.mul(at, I64(2)))
    zeros = const(I8, 0, 32)
    # Of each half of the rows, what punpcklbw and punpckhbw make 16 bits of: rows 0, 1, 4 and 5,
    # and the others, of each the sum of the first two products and that of the last two.
    sums = [const(I32, 0, 8)] * 4
    places = [[start + i for start in (first, first + 16) for i in range(8)] for first in (0, 8)]
    for i, q in enumerate(qs):
        four = b.bitcast(llvm.splat(b, load(b, I64, values, 8 * i), 4), vec(I16))
        wide = [
            shuffle(b, half, zeros, [lane for place in each for lane in (place, 32)])
            for half in _halves(b, q)
            for each in places
        ]
        for part, pairs in enumerate(wide):
            products = pair_products(b, b.bitcast(pairs, vec(I16)), four)
            sums[part] = llvm.add_in_order(b, sums[part], products)
        lines.step(b)
        lines.step(b)
    even = [0, 2, 8, 10, 4, 6, 12, 14]
    odd = [lane + 1 for lane in even]
    low, high = (
        b.add(shuffle(b, first, second, even), shuffle(b, first, second, odd))
        for first, second in (sums[:2], sums[2:])
    )
    return shuffle(b, low, high, range(LANES))


def _halves(b: ir.IRBuilder, word: ir.Value) -> list[ir.Value]:
    """The bytes of a word's first 8 rows and of the others, <32 x i8>."""
    bytes_ = b.bitcast(word, vec(I8, BYTES))
    return [shuffle(b, bytes_, bytes_, range(start, start + 32)) for start in (0, 32)]


def _add_block(
    b: ir.IRBuilder,
    block: InterleavedBlock,
    largest: int,
    inputs: ByteInputs,
    at: ir.Value,
    total: ir.Value,
    lines: llvm.Prefetches,
) -> ir.Value:
    """total <16 x float> + the products of the block with the activations from ``at`` on."""
    room = np.iinfo(np.int16).max // (2 * 128 * largest)
    if vnni.is_available():
        dots = _dots(b, block.q, inputs, at, lines)
    elif room > 0:
        dots = _short_dots(b, block.q, inputs, at, lines, room)
    else:
        dots = _pair_dots(b, block.q, inputs, at, lines)
    dots = b.sitofp(dots, VF)
    n = 4 * len(block.q)
    sums = inputs.sums32 if n == BLOCK else inputs.sums16
    scale, known = (
        llvm.splat(b, load(b, F32, b.add(part, b.mul(b.udiv(at, I64(size)), I64(4)))))
        for part, size in ((inputs.scales, BLOCK), (sums, n))
    )
    total = llvm.fma(b, dots, b.fmul(block.scale, scale), total)
    return llvm.fma(b, block.offset, known, total)


@intrinsic
def _group_dots(typingctx, code, count, w, x, x_row, n, out, out_row):
    """The dot products of 16 rows with each of ``count`` inputs, f32 (16,) at out, out_row apart.

    code, count: literals. Addresses of the group, of quantised activations (weights/integer.py)
    x_row bytes apart, and of the results; each is the same bits whatever the others are.
    """
    if not all(isinstance(literal, types.IntegerLiteral) for literal in (code, count)):
        return None

    def codegen(context, b, signature, args):
        code_, count_ = (type_.literal_value for type_ in signature.args[:2])
        w, x, x_row, n, out, out_row = args[2:]
        format_ = FORMAT_OF_CODE[code_]
        block_bytes = GROUP * format_.n_bytes
        rows = [vnni.inputs_at(b, b.add(x, b.mul(I64(j), x_row)), n) for j in range(count_)]

        def body(i, totals):
            p = b.add(w, b.mul(i, I64(block_bytes)))
            at = b.mul(i, I64(format_.n_elements))
            ahead = []
            if format_.n_elements == BLOCK:  # the K formats' products are slower than the memory
                ahead = [b.add(p, I64(AHEAD + line)) for line in range(0, block_bytes, LINE)]
            lines = llvm.Prefetches(ahead, 2 * BLOCK // 4, once=True)
            for block in DECODERS[format_.name](b, p):
                totals = [
                    _add_block(b, block, format_.largest, inputs, at, total, lines)
                    for inputs, total in zip(rows, totals, strict=True)
                ]
                at = b.add(at, I64(4 * len(block.q)))
            return totals

        zeros = [const(F32, 0.0)] * count_
        totals = llvm.loop(b, I64(0), b.sdiv(n, I64(format_.n_elements)), 1, zeros, body)
        for j, total in enumerate(totals):
            llvm.store(b, total, b.add(out, b.mul(I64(j), out_row)))
        return context.get_dummy_value()

    return types.void(code, count, *[types.int64] * 6), codegen


@njit(cache=True, nogil=True)
def groups_dot(
    code, integer, w, row_bytes, n_columns, x, x_row, n_inputs, out, out_row, first, last
):  # fmt: skip
    """``rows_dot`` (weights/dot.py) over repacked weights; first, last: multiples of GROUP."""
    for r in range(first, last, GROUP):
        at = w + r * row_bytes
        for i in range(0, n_inputs, 4):
            source, to, count = x + i * x_row, out + i * out_row + 4 * r, n_inputs - i
            if count == 1:
                _group_dots(code, 1, at, source, x_row, n_columns, to, out_row)
            elif count == 2:
                _group_dots(code, 2, at, source, x_row, n_columns, to, out_row)
            elif count == 3:
                _group_dots(code, 3, at, source, x_row, n_columns, to, out_row)
            else:
                _group_dots(code, 4, at, source, x_row, n_columns, to, out_row)
