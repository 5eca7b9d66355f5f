"""The formats of small blocks: 32 to 128 elements, mostly under one scale."""

from __future__ import annotations

from collections.abc import Iterator

from llvmlite import ir

from sparsekv_cli.cpu.jit.llvm import F16, F32, I8, I16, I32, I64, const, load, shuffle, vec
from sparsekv_cli.cpu.weights.block import (
    IQ4_NL_VALUES,
    MXFP4_VALUES,
    Block,
    BlockFormat,
    bits_of_i16,
    halves,
    lookup16,
    nibbles,
)
from sparsekv_cli.cpu.weights.types import GGMLType


def _q4_0(b: ir.IRBuilder, p: ir.Value) -> Block:
    (d,) = halves(b, p, 0)
    q = [b.sub(q, const(I8, 8)) for q in nibbles(b, load(b, vec(I8), p, 2))]
    return Block(q, True, d)


def _q4_1(b: ir.IRBuilder, p: ir.Value) -> Block:
    d, m = halves(b, p, 0, 2)
    return Block(list(nibbles(b, load(b, vec(I8), p, 4))), False, d, m)


def _words_of_four(b: ir.IRBuilder, p: ir.Value, n_bytes: int, words: list[int]) -> ir.Value:
    """Returns the listed 16-bit words of four blocks of n_bytes at p, as one vector of i16.

    Two overlapping 64-byte loads hold all four blocks. A shuffle of two registers picks the words.
    """
    second = (4 * n_bytes - 64) // 2  # first word of the second load
    lanes = [w if w < 32 else 32 + w - second for w in words]
    return shuffle(b, load(b, vec(I16, 32), p), load(b, vec(I16, 32), p, 2 * second), lanes)


def _four_nibbles(b: ir.IRBuilder, p: ir.Value, n_bytes: int) -> list[ir.Value]:
    """Returns the nibbles of blocks 0, 1 and of 2, 3, <64 x i8> each: a block's last 16 bytes."""
    shifts = ir.Constant(vec(I16, 32), ([0] * 8 + [4] * 8) * 2)
    q = []
    for pair in (0, 2):
        ends = [(pair + block + 1) * n_bytes // 2 for block in range(2)]
        words = [w for end in ends for _nibble in range(2) for w in range(end - 8, end)]
        bytes_ = b.lshr(_words_of_four(b, p, n_bytes, words), shifts)
        q.append(b.and_(b.bitcast(bytes_, vec(I8, 64)), const(I8, 15, 64)))
    return q


def _four_halves(b: ir.IRBuilder, p: ir.Value, n_bytes: int, count: int) -> list[ir.Value]:
    """Returns the ``count`` f16 scales at the start of four blocks, <4 x float> each."""
    words = [block * n_bytes // 2 + i for i in range(count) for block in range(4)]
    halves = b.bitcast(_words_of_four(b, p, n_bytes, words), vec(F16, 4 * count))
    floats = b.fpext(halves, vec(F32, 4 * count))
    return [shuffle(b, floats, floats, range(4 * i, 4 * i + 4)) for i in range(count)]


def _four_fifth_bits(
    b: ir.IRBuilder, p: ir.Value, n_bytes: int, qh_at: int, q: list[ir.Value]
) -> list[ir.Value]:
    """Adds 16 to the elements of q whose bit is set in their block's 32 bits at qh_at."""
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
    for half, q in enumerate(nibbles(b, load(b, vec(I8), p, qs_at))):
        high = bits_of_i16(b, load(b, I16, p, qh_at + 2 * half), 16)
        yield b.or_(q, high)


def _q5_0(b: ir.IRBuilder, p: ir.Value) -> Block:
    (d,) = halves(b, p, 0)
    return Block([b.sub(q, const(I8, 16)) for q in _five_bits(b, p, 2, 6)], True, d)


def _q5_1(b: ir.IRBuilder, p: ir.Value) -> Block:
    d, m = halves(b, p, 0, 2)
    return Block(list(_five_bits(b, p, 4, 8)), False, d, m)


def _q8_0(b: ir.IRBuilder, p: ir.Value) -> Block:
    (d,) = halves(b, p, 0)
    return Block([load(b, vec(I8), p, 2 + 16 * half) for half in range(2)], True, d)


def _iq4_nl(b: ir.IRBuilder, p: ir.Value) -> Block:
    (d,) = halves(b, p, 0)
    q = [lookup16(b, IQ4_NL_VALUES, q) for q in nibbles(b, load(b, vec(I8), p, 2))]
    return Block(q, True, d)


def power_of_two(b: ir.IRBuilder, exponents: ir.Value) -> ir.Value:
    """Returns half of the E8M0 scales 2^(e - 127), <n x float>: MXFP4_VALUES are doubled."""
    n = exponents.type.count
    e = b.zext(exponents, vec(I32, n))
    normal = b.shl(b.sub(e, const(I32, 1, n)), const(I32, 23, n))
    subnormal = b.shl(const(I32, 0x00200000, n), e)
    bits = b.select(b.icmp_unsigned("<", e, const(I32, 2, n)), subnormal, normal)
    return b.bitcast(bits, vec(F32, n))


def _mxfp4(b: ir.IRBuilder, p: ir.Value) -> Block:
    q = [lookup16(b, MXFP4_VALUES, q) for q in nibbles(b, load(b, vec(I8), p, 1))]
    return Block(q, True, power_of_two(b, load(b, vec(I8, 1), p)))


def _q1_0(b: ir.IRBuilder, p: ir.Value) -> Block:
    """One bit an element, +-1; 128 elements under one scale."""
    (d,) = halves(b, p, 0)
    q = []
    for half in range(2):
        bits = b.bitcast(load(b, I64, p, 2 + 8 * half), vec(ir.IntType(1), 64))
        q.append(b.select(bits, const(I8, 1, 64), const(I8, -1, 64)))
    return Block(q, True, shuffle(b, d, d, [0] * 4))


def _q2_0(b: ir.IRBuilder, p: ir.Value) -> Block:
    """Two bits an element, four elements side by side in a byte, 64 elements under one scale."""
    (d,) = halves(b, p, 0)
    bytes_ = load(b, vec(I8), p, 2)
    shifts = ir.Constant(vec(I8, 64), [0, 2, 4, 6] * 16)
    bits = b.lshr(shuffle(b, bytes_, bytes_, [i // 4 for i in range(64)]), shifts)
    q = b.sub(b.and_(bits, const(I8, 3, 64)), const(I8, 1, 64))
    return Block([q], True, shuffle(b, d, d, [0] * 2))


def unsigned_e4m3(b: ir.IRBuilder, bytes_: ir.Value) -> ir.Value:
    """Returns half of NVFP4's scales, <n x float>, because MXFP4_VALUES are doubled.

    The top bit is ignored, and 127 means zero. The result is 2^-10 times m, or (8 + m) 2^(e - 1).
    """
    n = bytes_.type.count
    bits = b.and_(b.zext(bytes_, vec(I32, n)), const(I32, 127, n))
    e, m = b.lshr(bits, const(I32, 3, n)), b.and_(bits, const(I32, 7, n))
    normal = b.shl(b.or_(m, const(I32, 8, n)), b.sub(e, const(I32, 1, n)))
    units = b.select(b.icmp_unsigned("!=", e, const(I32, 0, n)), normal, m)
    is_zero = b.icmp_unsigned("==", bytes_, const(I8, 127, n))
    units = b.select(is_zero, const(I32, 0, n), units)
    return b.fmul(b.uitofp(units, vec(F32, n)), const(F32, 2.0**-10, n))


def _nvfp4(b: ir.IRBuilder, p: ir.Value) -> Block:
    """16 elements under a scale of one byte: the low halves of eight bytes, then the high ones."""
    q = []
    for part in range(4):
        bytes_ = load(b, vec(I8, 8), p, 4 + 8 * part)
        low, high = b.and_(bytes_, const(I8, 15, 8)), b.lshr(bytes_, const(I8, 4, 8))
        q.append(lookup16(b, MXFP4_VALUES, shuffle(b, low, high, range(16))))
    return Block(q, True, unsigned_e4m3(b, load(b, vec(I8, 4), p)))


SMALL = (  # type, decode, decode_four, largest, zero, interleaves
    BlockFormat(GGMLType.Q4_0, _q4_0, _four_q4_0, 15, 8, True),
    BlockFormat(GGMLType.Q4_1, _q4_1, _four_q4_1, 15, 0, True),
    BlockFormat(GGMLType.Q5_0, _q5_0, _four_q5_0, 31, 16, True),
    BlockFormat(GGMLType.Q5_1, _q5_1, _four_q5_1, 31, 0, True),
    BlockFormat(GGMLType.Q8_0, _q8_0, None, 255, 128),
    BlockFormat(GGMLType.IQ4_NL, _iq4_nl, _four_iq4_nl, 241, 128, True),
    BlockFormat(GGMLType.MXFP4, _mxfp4, None, 24, 12, True),
    BlockFormat(GGMLType.Q1_0, _q1_0, None, 2, 1, True),
    BlockFormat(GGMLType.Q2_0, _q2_0, None, 3, 1, True),
    BlockFormat(GGMLType.NVFP4, _nvfp4, None, 24, 12, True),
)
