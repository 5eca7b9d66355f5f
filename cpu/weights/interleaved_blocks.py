"""Decoders of interleaved blocks (weights/interleaved.py) to integers, scales and offsets.

A word is four bytes of each of 16 rows, <16 x i32>. Scales come first in a block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from llvmlite import ir

from sparsekv_cli.cpu.jit.llvm import F16, F32, I8, I16, I32, LANES, VF, VI, const, load, vec
from sparsekv_cli.cpu.weights import vnni
from sparsekv_cli.cpu.weights.block import IQ4_NL_VALUES, MXFP4_VALUES, lookup16
from sparsekv_cli.cpu.weights.blocks_small import power_of_two, unsigned_e4m3
from sparsekv_cli.cpu.weights.formats import FORMATS
from sparsekv_cli.cpu.weights.vnni import BYTES


class InterleavedBlock(NamedTuple):
    """32 or 16 elements of each of 16 rows; an element is q * scale + offset."""

    q: list[ir.Value]  # 8 or 4 <16 x i32>: four elements of every row, for ``add_dots``
    scale: ir.Value  # <16 x float>
    offset: ir.Value


def _scale(b: ir.IRBuilder, p: ir.Value, i: int) -> ir.Value:
    """Returns f16 number i of every row's block, <16 x float>."""
    return b.fpext(load(b, vec(F16), p, 2 * LANES * i), VF)


def _word(b: ir.IRBuilder, p: ir.Value, n_scales: int, i: int) -> ir.Value:
    """Returns word i after the scales of every row's block, <16 x i32>."""
    return load(b, VI, p, 2 * LANES * n_scales + 4 * LANES * i)


def _words(b: ir.IRBuilder, p: ir.Value, n_scales: int, count: int) -> list[ir.Value]:
    return [_word(b, p, n_scales, i) for i in range(count)]


def _half_bytes(b: ir.IRBuilder, words: Sequence[ir.Value], high: bool) -> list[ir.Value]:
    """Returns the low or high four bits of every byte."""
    shifted = [b.lshr(word, const(I32, 4)) for word in words] if high else words
    return [b.and_(word, const(I32, 0x0F0F0F0F)) for word in shifted]


def _nibbles(b: ir.IRBuilder, words: Sequence[ir.Value]) -> list[ir.Value]:
    """Returns 32 four-bit integers: first all low halves of bytes, then all high halves."""
    return _half_bytes(b, words, False) + _half_bytes(b, words, True)


def _single_bits(b: ir.IRBuilder, bits: ir.Value) -> list[ir.Value]:
    """Returns 32 elements; element i is bit i of ``bits``."""
    result = []
    for i in range(8):
        four = b.and_(b.lshr(bits, const(I32, 4 * i)), const(I32, 15))
        # Bit j of four goes to bit 0 of byte j (and elsewhere).
        spread = b.mul(four, const(I32, sum(1 << 7 * j for j in range(4))))
        result.append(b.and_(spread, const(I32, 0x01010101)))
    return result


def _with_fifth(b: ir.IRBuilder, q: Sequence[ir.Value], bits: ir.Value) -> list[ir.Value]:
    """Returns q with bit i of ``bits`` as the fifth bit of element i."""
    fifths = (b.shl(bit, const(I32, 4)) for bit in _single_bits(b, bits))
    return [b.or_(nibble, fifth) for nibble, fifth in zip(q, fifths, strict=True)]


def _zero(name: str) -> int:
    """Returns the number added to integers of the format ``name``; 0 for large ones on ARM."""
    is_large = FORMATS[name].largest > 127
    return 0 if is_large and vnni.takes_signed() else FORMATS[name].zero


def _around(b: ir.IRBuilder, q: list[ir.Value], scale: ir.Value, name: str) -> InterleavedBlock:
    """Returns a block of integers q - zero of the format ``name``."""
    return InterleavedBlock(q, scale, b.fmul(scale, const(F32, -float(_zero(name)))))


def _looked_up(
    b: ir.IRBuilder, values: tuple[int, ...], nibbles: Sequence[ir.Value], name: str
) -> list[ir.Value]:
    """Returns the integers of the format ``name`` for indices of four bits."""
    table = tuple(value + _zero(name) for value in values)
    bytes_ = (b.bitcast(word, vec(I8, BYTES)) for word in nibbles)
    return [b.bitcast(lookup16(b, table, each), VI) for each in bytes_]


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
    q = _looked_up(b, IQ4_NL_VALUES, _nibbles(b, _words(b, p, 1, 4)), "IQ4_NL")
    yield _around(b, q, _scale(b, p, 0), "IQ4_NL")


def _iq4_xs(b: ir.IRBuilder, p: ir.Value) -> Iterator[InterleavedBlock]:
    d, tops = _scale(b, p, 0), b.zext(load(b, vec(I16), p, 2 * LANES), VI)
    lows = _word(b, p, 2, 0)
    for i in range(8):
        low = b.and_(b.lshr(lows, const(I32, 4 * i)), const(I32, 15))
        top = b.and_(b.lshr(tops, const(I32, 2 * i)), const(I32, 3))
        scale = b.sub(b.or_(low, b.shl(top, const(I32, 4))), const(I32, 32))
        nibbles = _nibbles(b, [_word(b, p, 2, 1 + 4 * i + k) for k in range(4)])
        q = _looked_up(b, IQ4_NL_VALUES, nibbles, "IQ4_XS")
        yield _around(b, q, b.fmul(d, b.sitofp(scale, VF)), "IQ4_XS")


def _mxfp4(b: ir.IRBuilder, p: ir.Value) -> Iterator[InterleavedBlock]:
    words = [load(b, VI, p, LANES + 4 * LANES * i) for i in range(4)]
    q = _looked_up(b, MXFP4_VALUES, _nibbles(b, words), "MXFP4")
    yield _around(b, q, power_of_two(b, load(b, vec(I8), p)), "MXFP4")


def _nvfp4(b: ir.IRBuilder, p: ir.Value) -> Iterator[InterleavedBlock]:
    scales, *words = _words(b, p, 0, 9)
    for i in range(4):  # 16 elements each
        q = _looked_up(b, MXFP4_VALUES, _nibbles(b, words[2 * i : 2 * i + 2]), "NVFP4")
        scale = unsigned_e4m3(b, b.trunc(_byte(b, [scales], i), vec(I8)))
        yield _around(b, q, scale, "NVFP4")


def _q1_0(b: ir.IRBuilder, p: ir.Value) -> Iterator[InterleavedBlock]:
    for bits in _words(b, p, 1, 4):
        q = [b.shl(bit, const(I32, 1)) for bit in _single_bits(b, bits)]
        yield _around(b, q, _scale(b, p, 0), "Q1_0")


def _q2_0(b: ir.IRBuilder, p: ir.Value) -> Iterator[InterleavedBlock]:
    words = _words(b, p, 1, 4)
    for half in (words[:2], words[2:]):
        q = []
        for i in range(8):
            byte, spread = _byte(b, half, i), const(I32, 0)
            for j in range(4):  # bits 2 j and 2 j + 1 go to byte j
                field = b.and_(b.shl(byte, const(I32, 6 * j)), const(I32, 3 << 8 * j))
                spread = b.or_(spread, field)
            q.append(spread)
        yield _around(b, q, _scale(b, p, 0), "Q2_0")


def _tq2_0(b: ir.IRBuilder, p: ir.Value) -> Iterator[InterleavedBlock]:
    for i in range(8):
        words = [_word(b, p, 1, 8 * (i // 4) + k) for k in range(8)]
        shifted = (b.lshr(word, const(I32, 2 * (i % 4))) for word in words)
        q = [b.and_(word, const(I32, 0x03030303)) for word in shifted]
        yield _around(b, q, _scale(b, p, 0), "TQ2_0")


def _byte(b: ir.IRBuilder, words: Sequence[ir.Value], i: int) -> ir.Value:
    """Returns byte i of the bytes in ``words``, unsigned <16 x i32>."""
    shifted = b.lshr(words[i // 4], const(I32, 8 * (i % 4)))
    return b.and_(shifted, const(I32, 255))


def _k_affine(b: ir.IRBuilder, p: ir.Value) -> Iterator[tuple[ir.Value, ir.Value]]:
    """Yields scale and offset of the eight parts of a block of Q4_K (see blocks_large.py)."""
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
    b: ir.IRBuilder,
    q: Sequence[ir.Value],
    words: Sequence[ir.Value],
    first: int,
    count: int,
    above: int = 4,
) -> list[ir.Value]:
    """Adds ``count`` bits of each byte of ``words``, from ``first`` on, to q at bit ``above``."""
    shift = b.shl if first <= above else b.lshr
    every = const(I32, (0x01010101 << above) * ((1 << count) - 1))
    tops = (b.and_(shift(word, const(I32, abs(above - first))), every) for word in words)
    return [b.or_(low, top) for low, top in zip(q, tops, strict=True)]


def _two_bits(b: ir.IRBuilder, p: ir.Value, n_scales: int, at: int, i: int) -> list[ir.Value]:
    """Returns part i of 16 of the two-bit integers of Q2_K and Q3_K, which start at word ``at``."""
    words = [_word(b, p, n_scales, at + 8 * (i // 8) + 4 * (i % 2) + k) for k in range(4)]
    shifted = (b.lshr(word, const(I32, i % 8 // 2 * 2)) for word in words)
    return [b.and_(word, const(I32, 0x03030303)) for word in shifted]


def _q4_k(b: ir.IRBuilder, p: ir.Value) -> Iterator[InterleavedBlock]:
    for i, (scale, offset) in enumerate(_k_affine(b, p)):
        if i % 2 == 0:
            words = [_word(b, p, 2, 3 + 4 * i + j) for j in range(8)]
        yield InterleavedBlock(_half_bytes(b, words, i % 2 == 1), scale, offset)


def _q5_k(b: ir.IRBuilder, p: ir.Value) -> Iterator[InterleavedBlock]:
    bits = [_word(b, p, 2, 3 + k) for k in range(8)]
    for i, (scale, offset) in enumerate(_k_affine(b, p)):
        words = [_word(b, p, 2, 11 + 8 * (i // 2) + k) for k in range(8)]
        q = _with_bits(b, _half_bytes(b, words, i % 2 == 1), bits, i, 1)
        yield InterleavedBlock(q, scale, offset)


def _q2_k(b: ir.IRBuilder, p: ir.Value) -> Iterator[InterleavedBlock]:
    d, dmin = _scale(b, p, 0), b.fneg(_scale(b, p, 1))
    words = _words(b, p, 2, 4)
    for i in range(16):  # 16 elements each
        q = _two_bits(b, p, 2, 4, i)
        both = _byte(b, words, i)
        scale, minimum = b.and_(both, const(I32, 15)), b.lshr(both, const(I32, 4))
        parts = b.fmul(d, b.sitofp(scale, VF)), b.fmul(dmin, b.sitofp(minimum, VF))
        yield InterleavedBlock(q, *parts)


def _q3_k(b: ir.IRBuilder, p: ir.Value) -> Iterator[InterleavedBlock]:
    d = _scale(b, p, 0)
    bits = [_word(b, p, 1, k) for k in range(8)]
    words = [_word(b, p, 1, 24 + k) for k in range(3)]
    for i in range(16):  # 16 elements each
        low = b.and_(b.lshr(_byte(b, words, i % 8), const(I32, i // 8 * 4)), const(I32, 15))
        top = b.and_(b.lshr(_byte(b, words, 8 + i % 4), const(I32, i // 4 * 2)), const(I32, 3))
        scale = b.sub(b.or_(low, b.shl(top, const(I32, 4))), const(I32, 32))
        mine = bits[4 * (i % 2) : 4 * (i % 2) + 4]
        q = _with_bits(b, _two_bits(b, p, 1, 8, i), mine, i // 2, 1, above=2)
        yield _around(b, q, b.fmul(d, b.sitofp(scale, VF)), "Q3_K")


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


# A decoder yields the parts of a group's blocks, in order.
DECODERS: dict[str, Callable[[ir.IRBuilder, ir.Value], Iterator[InterleavedBlock]]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "IQ4_NL": _iq4_nl,
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "IQ4_XS": _iq4_xs,
    "MXFP4": _mxfp4,
    "NVFP4": _nvfp4,
    "Q1_0": _q1_0,
    "Q2_0": _q2_0,
    "TQ2_0": _tq2_0,
}
