"""The GGUF weight formats, one record each: how a block becomes small integers and scales.

``decode`` of a quantised format writes LLVM IR that turns one block into its integers, sixteen at a
time (<16 x i8>), and a vector of scales (and, for the asymmetric formats, of offsets), one for each
16 or 32 elements: an element is q * scale + offset. All dot products and the dequantisation come
from that one description. The layouts are llama.cpp's (the block structs of ggml-common.h); values
equal ``gguf.quants.dequantize`` bit for bit (tests/cpu/weights/test_formats.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from llvmlite import binding, ir

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
from sparsekv_cli.cpu.weights.types import GGMLType

# Element values of the non-linear 4-bit formats (ggml-common.h: kvalues_iq4nl, kvalues_mxfp4).
IQ4_NL_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
MXFP4_VALUES = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)


class Block(NamedTuple):
    """One decoded block; all members but ``signed`` are IR values."""

    q: list[ir.Value]  # <16 x i8> each (of four blocks: <64 x i8>), in order of the elements
    signed: bool  # whether q is signed
    scales: ir.Value  # <k x float>, each for 1/k of the elements
    offsets: ir.Value | None = None  # <k x float>; None: 0

    def floats(self, b: ir.IRBuilder) -> Iterator[ir.Value]:
        """<16 x float> vectors. q * scale is exact in f32 for every format: this rounds once."""
        a_scale = len(self.q) // self.scales.type.count
        for i, q in enumerate(self.q):
            values = b.sitofp(q, VF) if self.signed else b.uitofp(q, VF)
            lanes = [i // a_scale] * LANES
            scale = shuffle(b, self.scales, self.scales, lanes)
            if self.offsets is None:
                yield b.fmul(values, scale)
            else:
                yield llvm.fma(b, values, scale, shuffle(b, self.offsets, self.offsets, lanes))


Decode = Callable[[ir.IRBuilder, ir.Value], Block]


@dataclass(frozen=True)
class BlockFormat:
    """One weight format: all that the CPU's kernels know about it.

    type: ggml's, with number and sizes. decode: None for plain floats. decode_four: four blocks at
    once with whole 64-byte vectors, where that is faster; it reads nothing behind them. largest,
    zero: for a block's integers q, q + zero is 0 to ``largest``. interleaves: whether interleaved
    rows (weights/interleaved.py) make decode faster. word_order: for each word of four bytes of an
    interleaved block its number in the file's block, scales not counted, if the order changes.
    """

    type: GGMLType
    decode: Decode | None = None
    decode_four: Decode | None = None
    largest: int = 0
    zero: int = 0
    interleaves: bool = False
    word_order: tuple[int, ...] = ()

    @property
    def name(self) -> str:
        return self.type.name

    @property
    def code(self) -> int:
        return int(self.type)

    @property
    def n_elements(self) -> int:
        """Elements of a block. Plain floats are read as blocks of 16, with a scalar tail."""
        return LANES if self.decode is None else self.type.block

    @property
    def n_bytes(self) -> int:
        return self.type.row_bytes(self.n_elements)

    def floats(self, b: ir.IRBuilder, p: ir.Value) -> Iterator[ir.Value]:
        """The block at address p as <16 x float> vectors, in order."""
        if self.decode is not None:
            yield from self.decode(b, p).floats(b)
        elif self.type is GGMLType.F32:
            yield load(b, VF, p)
        elif self.type is GGMLType.F16:
            yield llvm.load_half_lanes(b, p)
        else:
            yield b.bitcast(b.shl(b.zext(load(b, vec(I16), p), VI), const(I32, 16)), VF)


def _nibbles(b: ir.IRBuilder, bytes_: ir.Value) -> tuple[ir.Value, ir.Value]:
    """Low and high four bits of <16 x i8>."""
    return b.and_(bytes_, const(I8, 15)), b.lshr(bytes_, const(I8, 4))


def _bits_of_i16(b: ir.IRBuilder, mask: ir.Value, value: int) -> ir.Value:
    """<16 x i8> holding ``value`` in the lanes whose bit is set in the i16 ``mask``."""
    lanes = b.bitcast(mask, vec(ir.IntType(1)))
    return b.select(lanes, const(I8, value), const(I8, 0))


def lookup16(b: ir.IRBuilder, table: tuple[int, ...], idx: ir.Value) -> ir.Value:
    """table[idx] for i8 indices 0..15, by the byte shuffle of the CPU where it has one."""
    n = idx.type.count
    if n > LANES:
        if n == 64 and llvm.has_feature("avx512bw"):
            wide = ir.Constant(vec(I8, n), [value & 255 for value in table] * (n // LANES))
            return llvm.call_named(b, "llvm.x86.avx512.pshuf.b.512", idx.type, wide, idx)
        halves = (shuffle(b, idx, idx, lanes) for lanes in (range(n // 2), range(n // 2, n)))
        low, high = (lookup16(b, table, half) for half in halves)
        return shuffle(b, low, high, range(n))
    table_vec = ir.Constant(vec(I8), [value & 255 for value in table])
    machine = binding.get_default_triple().split("-")[0].replace("arm64", "aarch64")
    names = {"x86_64": "llvm.x86.ssse3.pshuf.b.128", "aarch64": "llvm.aarch64.neon.tbl1.v16i8"}
    name = names.get(machine)
    if name is not None:
        return llvm.call_named(b, name, vec(I8), table_vec, idx)
    result = const(I8, table[0] & 255)
    for position in range(1, 16):
        hit = b.icmp_unsigned("==", idx, const(I8, position))
        result = b.select(hit, const(I8, table[position] & 255), result)
    return result


def _halves(b: ir.IRBuilder, p: ir.Value, at: int, count: int = 1) -> tuple[ir.Value, ...]:
    """``count`` consecutive f16 scales as <1 x float> each."""
    floats = b.fpext(load(b, vec(F16, count), p, at), vec(F32, count))
    if count == 1:
        return (floats,)
    return tuple(shuffle(b, floats, floats, [i]) for i in range(count))


def _times(b: ir.IRBuilder, d: ir.Value, integers: ir.Value) -> ir.Value:
    """<k x float> d * integers, for d <1 x float> and integers already <k x float>."""
    return b.fmul(shuffle(b, d, d, [0] * integers.type.count), integers)


def _q4_0(b: ir.IRBuilder, p: ir.Value) -> Block:
    (d,) = _halves(b, p, 0)
    q = [b.sub(q, const(I8, 8)) for q in _nibbles(b, load(b, vec(I8), p, 2))]
    return Block(q, True, d)


def _q4_1(b: ir.IRBuilder, p: ir.Value) -> Block:
    d, m = _halves(b, p, 0, 2)
    return Block(list(_nibbles(b, load(b, vec(I8), p, 4))), False, d, m)


def _words_of_four(b: ir.IRBuilder, p: ir.Value, n_bytes: int, words: list[int]) -> ir.Value:
    """The listed 16-bit words of four blocks of n_bytes at p, as one vector of i16.

    Two overlapping 64-byte loads hold all four blocks, and a shuffle of two registers picks.
    """
    second = (4 * n_bytes - 64) // 2  # first word of the second load
    lanes = [w if w < 32 else 32 + w - second for w in words]
    return shuffle(b, load(b, vec(I16, 32), p), load(b, vec(I16, 32), p, 2 * second), lanes)


def _four_nibbles(b: ir.IRBuilder, p: ir.Value, n_bytes: int) -> list[ir.Value]:
    """<64 x i8> of blocks 0, 1 and of 2, 3, whose nibbles are the last 16 of n_bytes."""
    shifts = ir.Constant(vec(I16, 32), ([0] * 8 + [4] * 8) * 2)
    q = []
    for pair in (0, 2):
        ends = [(pair + block + 1) * n_bytes // 2 for block in range(2)]
        words = [w for end in ends for _nibble in range(2) for w in range(end - 8, end)]
        bytes_ = b.lshr(_words_of_four(b, p, n_bytes, words), shifts)
        q.append(b.and_(b.bitcast(bytes_, vec(I8, 64)), const(I8, 15, 64)))
    return q


def _four_halves(b: ir.IRBuilder, p: ir.Value, n_bytes: int, count: int) -> list[ir.Value]:
    """The ``count`` f16 scales that blocks begin with, <4 x float> each."""
    words = [block * n_bytes // 2 + i for i in range(count) for block in range(4)]
    halves = b.bitcast(_words_of_four(b, p, n_bytes, words), vec(F16, 4 * count))
    floats = b.fpext(halves, vec(F32, 4 * count))
    return [shuffle(b, floats, floats, range(4 * i, 4 * i + 4)) for i in range(count)]


def _four_fifth_bits(
    b: ir.IRBuilder, p: ir.Value, n_bytes: int, qh_at: int, q: list[ir.Value]
) -> list[ir.Value]:
    """q with 16 added where the bit of the element is set in its block's 32 bits at qh_at."""
    out = []
    for pair, part in enumerate(q):
        low, high = (
            b.zext(load(b, I32, p, (2 * pair + block) * n_bytes + qh_at), I64) for block in range(2)
        )
        mask = b.bitcast(b.or_(low, b.shl(high, I64(32))), vec(ir.IntType(1), 64))
        out.append(b.or_(part, b.select(mask, const(I8, 16, 64), const(I8, 0, 64))))
    return out


def _four_q4_0(b: ir.IRBuilder, p: ir.Value) -> Block:
    q = [b.sub(part, const(I8, 8, 64)) for part in _four_nibbles(b, p, 18)]
    return Block(q, True, *_four_halves(b, p, 18, 1))


def _four_q4_1(b: ir.IRBuilder, p: ir.Value) -> Block:
    return Block(_four_nibbles(b, p, 20), False, *_four_halves(b, p, 20, 2))


def _four_q5_0(b: ir.IRBuilder, p: ir.Value) -> Block:
    q = _four_fifth_bits(b, p, 22, 2, _four_nibbles(b, p, 22))
    return Block([b.sub(part, const(I8, 16, 64)) for part in q], True, *_four_halves(b, p, 22, 1))


def _four_q5_1(b: ir.IRBuilder, p: ir.Value) -> Block:
    q = _four_fifth_bits(b, p, 24, 4, _four_nibbles(b, p, 24))
    return Block(q, False, *_four_halves(b, p, 24, 2))


def _four_iq4_nl(b: ir.IRBuilder, p: ir.Value) -> Block:
    q = [lookup16(b, IQ4_NL_VALUES, part) for part in _four_nibbles(b, p, 18)]
    return Block(q, True, *_four_halves(b, p, 18, 1))


def _five_bits(b: ir.IRBuilder, p: ir.Value, qh_at: int, qs_at: int) -> Iterator[ir.Value]:
    for half, q in enumerate(_nibbles(b, load(b, vec(I8), p, qs_at))):
        high = _bits_of_i16(b, load(b, I16, p, qh_at + 2 * half), 16)
        yield b.or_(q, high)


def _q5_0(b: ir.IRBuilder, p: ir.Value) -> Block:
    (d,) = _halves(b, p, 0)
    return Block([b.sub(q, const(I8, 16)) for q in _five_bits(b, p, 2, 6)], True, d)


def _q5_1(b: ir.IRBuilder, p: ir.Value) -> Block:
    d, m = _halves(b, p, 0, 2)
    return Block(list(_five_bits(b, p, 4, 8)), False, d, m)


def _q8_0(b: ir.IRBuilder, p: ir.Value) -> Block:
    (d,) = _halves(b, p, 0)
    return Block([load(b, vec(I8), p, 2 + 16 * half) for half in range(2)], True, d)


def _q2_k(b: ir.IRBuilder, p: ir.Value) -> Block:
    d, dmin = _halves(b, p, 80, 2)
    scales, minimums = _nibbles(b, load(b, vec(I8), p))
    q = []
    for group in range(16):
        n, shift, half = group // 8, group // 2 % 4, group % 2
        bits = load(b, vec(I8), p, 16 + 32 * n + 16 * half)
        q.append(b.and_(b.lshr(bits, const(I8, 2 * shift)), const(I8, 3)))
    offsets = b.fneg(_times(b, dmin, b.uitofp(minimums, VF)))
    return Block(q, False, _times(b, d, b.uitofp(scales, VF)), offsets)


def _q3_k(b: ir.IRBuilder, p: ir.Value) -> Block:
    (d,) = _halves(b, p, 108)
    eight, four = load(b, vec(I8, 8), p, 96), load(b, vec(I8, 4), p, 104)
    low = shuffle(b, b.and_(eight, const(I8, 15, 8)), b.lshr(eight, const(I8, 4, 8)), range(LANES))
    shifts = ir.Constant(vec(I8), [2 * (i // 4) for i in range(LANES)])
    high = b.lshr(shuffle(b, four, four, [i % 4 for i in range(LANES)]), shifts)
    high = b.shl(b.and_(high, const(I8, 3)), const(I8, 4))
    scales = b.sub(b.or_(low, high), const(I8, 32))
    q = []
    for group in range(16):
        n, shift, half = group // 8, group // 2 % 4, group % 2
        bits = load(b, vec(I8), p, 32 + 32 * n + 16 * half)
        bits = b.and_(b.lshr(bits, const(I8, 2 * shift)), const(I8, 3))
        mask = b.and_(load(b, vec(I8), p, 16 * half), const(I8, 1 << (4 * n + shift)))
        is_set = b.icmp_unsigned("!=", mask, const(I8, 0))
        q.append(b.sub(bits, b.select(is_set, const(I8, 0), const(I8, 4))))
    return Block(q, True, _times(b, d, b.sitofp(scales, VF)))


def _k_affine(b: ir.IRBuilder, p: ir.Value) -> tuple[ir.Value, ir.Value]:
    """Scales and offsets <8 x float> of Q4_K and Q5_K: 6-bit pairs in 12 bytes at offset 4."""
    d, dmin = _halves(b, p, 0, 2)
    first, second, third = (load(b, vec(I8, 4), p, at) for at in (4, 8, 12))

    def six_bits(low: ir.Value, nibble: ir.Value) -> ir.Value:
        top = b.shl(b.lshr(low, const(I8, 6, 4)), const(I8, 4, 4))
        parts = b.and_(low, const(I8, 63, 4)), b.or_(nibble, top)
        return b.uitofp(shuffle(b, *parts, range(8)), vec(F32, 8))

    scales = six_bits(first, b.and_(third, const(I8, 15, 4)))
    minimums = six_bits(second, b.lshr(third, const(I8, 4, 4)))
    return _times(b, d, scales), b.fneg(_times(b, dmin, minimums))


def _q4_k(b: ir.IRBuilder, p: ir.Value) -> Block:
    q = []
    for pair in range(4):
        halves = [_nibbles(b, load(b, vec(I8), p, 16 + 32 * pair + 16 * h)) for h in range(2)]
        q += [halves[h][nibble] for nibble in range(2) for h in range(2)]
    return Block(q, False, *_k_affine(b, p))


def _q5_k(b: ir.IRBuilder, p: ir.Value) -> Block:
    high = [load(b, vec(I8), p, 16 + 16 * half) for half in range(2)]
    q = []
    for group in range(8):
        for half in range(2):
            bytes_ = load(b, vec(I8), p, 48 + 32 * (group // 2) + 16 * half)
            bit = b.and_(b.lshr(high[half], const(I8, group)), const(I8, 1))
            q.append(b.or_(_nibbles(b, bytes_)[group % 2], b.shl(bit, const(I8, 4))))
    return Block(q, False, *_k_affine(b, p))


def _q6_k(b: ir.IRBuilder, p: ir.Value) -> Block:
    (d,) = _halves(b, p, 208)
    q = []
    for group in range(16):
        n, quarter, half = group // 8, group // 2 % 4, group % 2
        low_at = 64 * n + 32 * (quarter % 2) + 16 * half
        low = _nibbles(b, load(b, vec(I8), p, low_at))[quarter // 2]
        high = b.lshr(load(b, vec(I8), p, 128 + 32 * n + 16 * half), const(I8, 2 * quarter))
        q.append(b.sub(b.or_(low, b.shl(b.and_(high, const(I8, 3)), const(I8, 4))), const(I8, 32)))
    return Block(q, True, _times(b, d, b.sitofp(load(b, vec(I8), p, 192), VF)))


def _iq4_nl(b: ir.IRBuilder, p: ir.Value) -> Block:
    (d,) = _halves(b, p, 0)
    q = [lookup16(b, IQ4_NL_VALUES, q) for q in _nibbles(b, load(b, vec(I8), p, 2))]
    return Block(q, True, d)


def _iq4_xs(b: ir.IRBuilder, p: ir.Value) -> Block:
    (d,) = _halves(b, p, 0)
    four = load(b, vec(I8, 4), p, 4)
    low = shuffle(
        b, b.and_(four, const(I8, 15, 4)), b.lshr(four, const(I8, 4, 4)), [0, 4, 1, 5, 2, 6, 3, 7]
    )
    shifts = ir.Constant(vec(I16, 8), [2 * i for i in range(8)])
    high = b.lshr(llvm.splat(b, load(b, I16, p, 2), 8), shifts)
    high = b.shl(b.and_(b.trunc(high, vec(I8, 8)), const(I8, 3, 8)), const(I8, 4, 8))
    scales = b.sub(b.or_(low, high), const(I8, 32, 8))
    q = []
    for group in range(8):
        for bits in _nibbles(b, load(b, vec(I8), p, 8 + 16 * group)):
            q.append(lookup16(b, IQ4_NL_VALUES, bits))
    return Block(q, True, _times(b, d, b.sitofp(scales, vec(F32, 8))))


def power_of_two(b: ir.IRBuilder, exponents: ir.Value) -> ir.Value:
    """Half of the E8M0 scales 2^(e - 127), <n x float>: MXFP4_VALUES are doubled."""
    n = exponents.type.count
    e = b.zext(exponents, vec(I32, n))
    normal = b.shl(b.sub(e, const(I32, 1, n)), const(I32, 23, n))
    subnormal = b.shl(const(I32, 0x00200000, n), e)
    bits = b.select(b.icmp_unsigned("<", e, const(I32, 2, n)), subnormal, normal)
    return b.bitcast(bits, vec(F32, n))


def _mxfp4(b: ir.IRBuilder, p: ir.Value) -> Block:
    q = [lookup16(b, MXFP4_VALUES, q) for q in _nibbles(b, load(b, vec(I8), p, 1))]
    return Block(q, True, power_of_two(b, load(b, vec(I8, 1), p)))


# Words of a block of Q6_K in the file: 32 of low halves, 16 of high bits, 4 of scales. As they are
# used: the scales, then of each half of the elements 8 of high bits and 16 of low halves.
Q6_K_ORDER = (*range(48, 52), *range(32, 40), *range(16), *range(40, 48), *range(16, 32))

FORMATS = {
    format_.name: format_
    for format_ in (  # type, decode, decode_four, largest, zero, interleaves, word_order
        BlockFormat(GGMLType.F32),
        BlockFormat(GGMLType.F16),
        BlockFormat(GGMLType.Q4_0, _q4_0, _four_q4_0, 15, 8, True),
        BlockFormat(GGMLType.Q4_1, _q4_1, _four_q4_1, 15, 0, True),
        BlockFormat(GGMLType.Q5_0, _q5_0, _four_q5_0, 31, 16, True),
        BlockFormat(GGMLType.Q5_1, _q5_1, _four_q5_1, 31, 0, True),
        BlockFormat(GGMLType.Q8_0, _q8_0, None, 255, 128),
        BlockFormat(GGMLType.Q2_K, _q2_k, None, 3, 0, True),
        BlockFormat(GGMLType.Q3_K, _q3_k, None, 7, 4, True),
        BlockFormat(GGMLType.Q4_K, _q4_k, None, 15, 0, True),
        BlockFormat(GGMLType.Q5_K, _q5_k, None, 31, 0, True),
        BlockFormat(GGMLType.Q6_K, _q6_k, None, 63, 32, True, Q6_K_ORDER),
        BlockFormat(GGMLType.IQ4_NL, _iq4_nl, _four_iq4_nl, 241, 128, True),
        BlockFormat(GGMLType.IQ4_XS, _iq4_xs, None, 241, 128, True),
        BlockFormat(GGMLType.BF16),
        BlockFormat(GGMLType.MXFP4, _mxfp4, None, 24, 12, True),
    )
}
FORMAT_OF_CODE = {format_.code: format_ for format_ in FORMATS.values()}
