"""Decoders of interleaved blocks (weights/interleaved.py) to integers, scales and offsets.

A word is four bytes of each of 16 rows, <16 x i32>. Scales come first in a block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from sparsekv_cli.cpu.jit.value import F16, I8, I16, I32, LANES, VF, VI, Value, const, load, vec
from sparsekv_cli.cpu.weights import vnni
from sparsekv_cli.cpu.weights.block import IQ4_NL_VALUES, MXFP4_VALUES, lookup16
from sparsekv_cli.cpu.weights.blocks_small import power_of_two, unsigned_e4m3
from sparsekv_cli.cpu.weights.formats import FORMATS
from sparsekv_cli.cpu.weights.vnni import BYTES


class InterleavedBlock(NamedTuple):
    """32 or 16 elements of each of 16 rows; an element is q * scale + offset."""

    q: list[Value]  # 8 or 4 <16 x i32>: four elements of every row, for ``add_dots``
    scale: Value  # <16 x float>
    offset: Value


def _scale(p: Value, i: int) -> Value:
    """Returns f16 number i of every row's block, <16 x float>."""
    return load(vec(F16), p, 2 * LANES * i).to(VF)


def _word(p: Value, n_scales: int, i: int) -> Value:
    """Returns word i after the scales of every row's block, <16 x i32>."""
    return load(VI, p, 2 * LANES * n_scales + 4 * LANES * i)


def _words(p: Value, n_scales: int, count: int) -> list[Value]:
    return [_word(p, n_scales, i) for i in range(count)]


def _half_bytes(words: Sequence[Value], high: bool) -> list[Value]:
    """Returns the low or high four bits of every byte."""
    shifted = [word >> 4 for word in words] if high else words
    return [word & 0x0F0F0F0F for word in shifted]


def _nibbles(words: Sequence[Value]) -> list[Value]:
    """Returns 32 four-bit integers: first all low halves of bytes, then all high halves."""
    return _half_bytes(words, False) + _half_bytes(words, True)


def _single_bits(bits: Value) -> list[Value]:
    """Returns 32 elements; element i is bit i of ``bits``."""
    result = []
    for i in range(8):
        four = bits >> 4 * i & 15
        # Bit j of four goes to bit 0 of byte j (and elsewhere).
        spread = four * sum(1 << 7 * j for j in range(4))
        result.append(spread & 0x01010101)
    return result


def _with_fifth(q: Sequence[Value], bits: Value) -> list[Value]:
    """Returns q with bit i of ``bits`` as the fifth bit of element i."""
    fifths = (bit << 4 for bit in _single_bits(bits))
    return [nibble | fifth for nibble, fifth in zip(q, fifths, strict=True)]


def _zero(name: str) -> int:
    """Returns the number added to integers of the format ``name``; 0 for large ones on ARM."""
    is_large = FORMATS[name].largest > 127
    return 0 if is_large and vnni.takes_signed() else FORMATS[name].zero


def _around(q: list[Value], scale: Value, name: str) -> InterleavedBlock:
    """Returns a block of integers q - zero of the format ``name``."""
    return InterleavedBlock(q, scale, scale * -float(_zero(name)))


def _looked_up(values: tuple[int, ...], nibbles: Sequence[Value], name: str) -> list[Value]:
    """Returns the integers of the format ``name`` for indices of four bits."""
    table = tuple(value + _zero(name) for value in values)
    bytes_ = (word.bitcast(vec(I8, BYTES)) for word in nibbles)
    return [lookup16(table, each).bitcast(VI) for each in bytes_]


def _q4_0(p: Value) -> Iterator[InterleavedBlock]:
    yield _around(_nibbles(_words(p, 1, 4)), _scale(p, 0), "Q4_0")


def _q4_1(p: Value) -> Iterator[InterleavedBlock]:
    yield InterleavedBlock(_nibbles(_words(p, 2, 4)), _scale(p, 0), _scale(p, 1))


def _q5_0(p: Value) -> Iterator[InterleavedBlock]:
    bits, *words = _words(p, 1, 5)
    yield _around(_with_fifth(_nibbles(words), bits), _scale(p, 0), "Q5_0")


def _q5_1(p: Value) -> Iterator[InterleavedBlock]:
    bits, *words = _words(p, 2, 5)
    yield InterleavedBlock(_with_fifth(_nibbles(words), bits), _scale(p, 0), _scale(p, 1))


def _iq4_nl(p: Value) -> Iterator[InterleavedBlock]:
    q = _looked_up(IQ4_NL_VALUES, _nibbles(_words(p, 1, 4)), "IQ4_NL")
    yield _around(q, _scale(p, 0), "IQ4_NL")


def _iq4_xs(p: Value) -> Iterator[InterleavedBlock]:
    d, tops = _scale(p, 0), load(vec(I16), p, 2 * LANES).unsigned_to(VI)
    lows = _word(p, 2, 0)
    for i in range(8):
        low = lows >> 4 * i & 15
        top = tops >> 2 * i & 3
        scale = (low | top << 4) - 32
        nibbles = _nibbles([_word(p, 2, 1 + 4 * i + k) for k in range(4)])
        q = _looked_up(IQ4_NL_VALUES, nibbles, "IQ4_XS")
        yield _around(q, d * scale.to(VF), "IQ4_XS")


def _mxfp4(p: Value) -> Iterator[InterleavedBlock]:
    words = [load(VI, p, LANES + 4 * LANES * i) for i in range(4)]
    q = _looked_up(MXFP4_VALUES, _nibbles(words), "MXFP4")
    yield _around(q, power_of_two(load(vec(I8), p)), "MXFP4")


def _nvfp4(p: Value) -> Iterator[InterleavedBlock]:
    scales, *words = _words(p, 0, 9)
    for i in range(4):  # 16 elements each
        q = _looked_up(MXFP4_VALUES, _nibbles(words[2 * i : 2 * i + 2]), "NVFP4")
        scale = unsigned_e4m3(_byte([scales], i).to(vec(I8)))
        yield _around(q, scale, "NVFP4")


def _q1_0(p: Value) -> Iterator[InterleavedBlock]:
    for bits in _words(p, 1, 4):
        q = [bit << 1 for bit in _single_bits(bits)]
        yield _around(q, _scale(p, 0), "Q1_0")


def _q2_0(p: Value) -> Iterator[InterleavedBlock]:
    words = _words(p, 1, 4)
    for half in (words[:2], words[2:]):
        q = []
        for i in range(8):
            byte, spread = _byte(half, i), const(I32, 0)
            for j in range(4):  # bits 2 j and 2 j + 1 go to byte j
                field = byte << 6 * j & 3 << 8 * j
                spread = spread | field
            q.append(spread)
        yield _around(q, _scale(p, 0), "Q2_0")


def _tq2_0(p: Value) -> Iterator[InterleavedBlock]:
    for i in range(8):
        words = [_word(p, 1, 8 * (i // 4) + k) for k in range(8)]
        shifted = (word >> 2 * (i % 4) for word in words)
        q = [word & 0x03030303 for word in shifted]
        yield _around(q, _scale(p, 0), "TQ2_0")


def _byte(words: Sequence[Value], i: int) -> Value:
    """Returns byte i of the bytes in ``words``, unsigned <16 x i32>."""
    shifted = words[i // 4] >> 8 * (i % 4)
    return shifted & 255


def _k_affine(p: Value) -> Iterator[tuple[Value, Value]]:
    """Yields scale and offset of the eight parts of a block of Q4_K (see blocks_large.py)."""
    d, dmin = _scale(p, 0), -_scale(p, 1)
    words = _words(p, 2, 3)
    for i in range(8):
        low, high = (_byte(words, at) for at in (i % 4, 4 + i % 4))
        if i < 4:
            scale, minimum = (each & 63 for each in (low, high))
        else:
            rest = _byte(words, 4 + i)
            tops = (each >> 6 << 4 for each in (low, high))
            nibbles = rest & 15, rest >> 4
            scale, minimum = (nibble | top for nibble, top in zip(nibbles, tops, strict=True))
        yield d * scale.to(VF), dmin * minimum.to(VF)


def _with_bits(
    q: Sequence[Value], words: Sequence[Value], first: int, count: int, above: int = 4
) -> list[Value]:
    """Adds ``count`` bits of each byte of ``words``, from ``first`` on, to q at bit ``above``."""
    every = const(I32, (0x01010101 << above) * ((1 << count) - 1))
    tops = (
        (word << (above - first) if first <= above else word >> (first - above)) & every
        for word in words
    )
    return [low | top for low, top in zip(q, tops, strict=True)]


def _two_bits(p: Value, n_scales: int, at: int, i: int) -> list[Value]:
    """Returns part i of 16 of the two-bit integers of Q2_K and Q3_K, which start at word ``at``."""
    words = [_word(p, n_scales, at + 8 * (i // 8) + 4 * (i % 2) + k) for k in range(4)]
    shifted = (word >> i % 8 // 2 * 2 for word in words)
    return [word & 0x03030303 for word in shifted]


def _q4_k(p: Value) -> Iterator[InterleavedBlock]:
    for i, (scale, offset) in enumerate(_k_affine(p)):
        if i % 2 == 0:
            words = [_word(p, 2, 3 + 4 * i + j) for j in range(8)]
        yield InterleavedBlock(_half_bytes(words, i % 2 == 1), scale, offset)


def _q5_k(p: Value) -> Iterator[InterleavedBlock]:
    bits = [_word(p, 2, 3 + k) for k in range(8)]
    for i, (scale, offset) in enumerate(_k_affine(p)):
        words = [_word(p, 2, 11 + 8 * (i // 2) + k) for k in range(8)]
        q = _with_bits(_half_bytes(words, i % 2 == 1), bits, i, 1)
        yield InterleavedBlock(q, scale, offset)


def _q2_k(p: Value) -> Iterator[InterleavedBlock]:
    d, dmin = _scale(p, 0), -_scale(p, 1)
    words = _words(p, 2, 4)
    for i in range(16):  # 16 elements each
        q = _two_bits(p, 2, 4, i)
        both = _byte(words, i)
        scale, minimum = both & 15, both >> 4
        parts = d * scale.to(VF), dmin * minimum.to(VF)
        yield InterleavedBlock(q, *parts)


def _q3_k(p: Value) -> Iterator[InterleavedBlock]:
    d = _scale(p, 0)
    bits = [_word(p, 1, k) for k in range(8)]
    words = [_word(p, 1, 24 + k) for k in range(3)]
    for i in range(16):  # 16 elements each
        low = _byte(words, i % 8) >> i // 8 * 4 & 15
        top = _byte(words, 8 + i % 4) >> i // 4 * 2 & 3
        scale = (low | top << 4) - 32
        mine = bits[4 * (i % 2) : 4 * (i % 2) + 4]
        q = _with_bits(_two_bits(p, 1, 8, i), mine, i // 2, 1, above=2)
        yield _around(q, d * scale.to(VF), "Q3_K")


def _q6_k(p: Value) -> Iterator[InterleavedBlock]:
    d = _scale(p, 0)
    for i in range(16):  # 16 elements each
        half, part, j = i // 8, i % 8 // 2, i % 2
        start = 4 + 24 * half + 4 * j
        bits = [_word(p, 1, start + k) for k in range(4)]
        words = [_word(p, 1, start + 8 + 8 * (part % 2) + k) for k in range(4)]
        q = _with_bits(_half_bytes(words, part >= 2), bits, 2 * part, 2)
        left = const(I32, 24 - 8 * (i % 4))
        signed = (_word(p, 1, i // 4) << left).signed_shift(24)
        yield _around(q, d * signed.to(VF), "Q6_K")


# A decoder yields the parts of a group's blocks, in order.
DECODERS: dict[str, Callable[[Value], Iterator[InterleavedBlock]]] = {
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
