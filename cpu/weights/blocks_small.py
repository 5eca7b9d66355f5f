"""The formats of small blocks: 32 to 128 elements, mostly under one scale."""

from __future__ import annotations

from collections.abc import Iterator

from llvmlite import ir

from sparsekv_cli.cpu.jit.value import (
    F16,
    F32,
    I1,
    I8,
    I16,
    I32,
    I64,
    Value,
    const,
    load,
    select,
    vec,
)
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


def _q4_0(p: Value) -> Block:
    (d,) = halves(p, 0)
    q = [q - 8 for q in nibbles(load(vec(I8), p, 2))]
    return Block(q, True, d)


def _q4_1(p: Value) -> Block:
    d, m = halves(p, 0, 2)
    return Block(list(nibbles(load(vec(I8), p, 4))), False, d, m)


def _words_of_four(p: Value, n_bytes: int, words: list[int]) -> Value:
    """Returns the listed 16-bit words of four blocks of n_bytes at p, as one vector of i16.

    Two overlapping 64-byte loads hold all four blocks. A shuffle of two registers picks the words.
    """
    second = (4 * n_bytes - 64) // 2  # first word of the second load
    lanes = [w if w < 32 else 32 + w - second for w in words]
    return load(vec(I16, 32), p).shuffle(lanes, load(vec(I16, 32), p, 2 * second))


def _four_nibbles(p: Value, n_bytes: int) -> list[Value]:
    """Returns the nibbles of blocks 0, 1 and of 2, 3, <64 x i8> each: a block's last 16 bytes."""
    shifts = ir.Constant(vec(I16, 32), ([0] * 8 + [4] * 8) * 2)
    q = []
    for pair in (0, 2):
        ends = [(pair + block + 1) * n_bytes // 2 for block in range(2)]
        words = [w for end in ends for _nibble in range(2) for w in range(end - 8, end)]
        bytes_ = _words_of_four(p, n_bytes, words) >> shifts
        q.append(bytes_.bitcast(vec(I8, 64)) & 15)
    return q


def _four_halves(p: Value, n_bytes: int, count: int) -> list[Value]:
    """Returns the ``count`` f16 scales at the start of four blocks, <4 x float> each."""
    words = [block * n_bytes // 2 + i for i in range(count) for block in range(4)]
    halves = _words_of_four(p, n_bytes, words).bitcast(vec(F16, 4 * count))
    floats = halves.to(vec(F32, 4 * count))
    return [floats.shuffle(range(4 * i, 4 * i + 4)) for i in range(count)]


def _four_fifth_bits(p: Value, n_bytes: int, qh_at: int, q: list[Value]) -> list[Value]:
    """Adds 16 to the elements of q whose bit is set in their block's 32 bits at qh_at."""
    out = []
    for pair, part in enumerate(q):
        places = (block * n_bytes + qh_at for block in (2 * pair, 2 * pair + 1))
        low, high = (load(I32, p, place).unsigned_to(I64) for place in places)
        mask = (low | high << 32).bitcast(vec(I1, 64))
        out.append(part | select(mask, const(I8, 16, 64), const(I8, 0, 64)))
    return out


def _four_q4_0(p: Value) -> Block:
    q = [part - 8 for part in _four_nibbles(p, 18)]
    return Block(q, True, *_four_halves(p, 18, 1))


def _four_q4_1(p: Value) -> Block:
    return Block(_four_nibbles(p, 20), False, *_four_halves(p, 20, 2))


def _four_q5_0(p: Value) -> Block:
    q = _four_fifth_bits(p, 22, 2, _four_nibbles(p, 22))
    return Block([part - 16 for part in q], True, *_four_halves(p, 22, 1))


def _four_q5_1(p: Value) -> Block:
    q = _four_fifth_bits(p, 24, 4, _four_nibbles(p, 24))
    return Block(q, False, *_four_halves(p, 24, 2))


def _four_iq4_nl(p: Value) -> Block:
    q = [lookup16(IQ4_NL_VALUES, part) for part in _four_nibbles(p, 18)]
    return Block(q, True, *_four_halves(p, 18, 1))


def _five_bits(p: Value, qh_at: int, qs_at: int) -> Iterator[Value]:
    for half, q in enumerate(nibbles(load(vec(I8), p, qs_at))):
        high = bits_of_i16(load(I16, p, qh_at + 2 * half), 16)
        yield q | high


def _q5_0(p: Value) -> Block:
    (d,) = halves(p, 0)
    return Block([q - 16 for q in _five_bits(p, 2, 6)], True, d)


def _q5_1(p: Value) -> Block:
    d, m = halves(p, 0, 2)
    return Block(list(_five_bits(p, 4, 8)), False, d, m)


def _q8_0(p: Value) -> Block:
    (d,) = halves(p, 0)
    return Block([load(vec(I8), p, 2 + 16 * half) for half in range(2)], True, d)


def _iq4_nl(p: Value) -> Block:
    (d,) = halves(p, 0)
    q = [lookup16(IQ4_NL_VALUES, q) for q in nibbles(load(vec(I8), p, 2))]
    return Block(q, True, d)


def power_of_two(exponents: Value) -> Value:
    """Returns half of the E8M0 scales 2^(e - 127), <n x float>: MXFP4_VALUES are doubled."""
    n = exponents.type.count
    e = exponents.unsigned_to(vec(I32, n))
    normal = e - 1 << 23
    subnormal = 0x00200000 << e
    return select(e.below(2), subnormal, normal).bitcast(vec(F32, n))


def _mxfp4(p: Value) -> Block:
    q = [lookup16(MXFP4_VALUES, q) for q in nibbles(load(vec(I8), p, 1))]
    return Block(q, True, power_of_two(load(vec(I8, 1), p)))


def _q1_0(p: Value) -> Block:
    """One bit an element, +-1; 128 elements under one scale."""
    (d,) = halves(p, 0)
    q = []
    for half in range(2):
        bits = load(I64, p, 2 + 8 * half).bitcast(vec(I1, 64))
        q.append(select(bits, const(I8, 1, 64), const(I8, -1, 64)))
    return Block(q, True, d.shuffle([0] * 4))


def _q2_0(p: Value) -> Block:
    """Two bits an element, four elements side by side in a byte, 64 elements under one scale."""
    (d,) = halves(p, 0)
    bytes_ = load(vec(I8), p, 2)
    shifts = ir.Constant(vec(I8, 64), [0, 2, 4, 6] * 16)
    q = ((bytes_.shuffle([i // 4 for i in range(64)]) >> shifts) & 3) - 1
    return Block([q], True, d.shuffle([0] * 2))


def unsigned_e4m3(bytes_: Value) -> Value:
    """Returns half of NVFP4's scales, <n x float>, because MXFP4_VALUES are doubled.

    The top bit is ignored, and 127 means zero. The result is 2^-10 times m, or (8 + m) 2^(e - 1).
    """
    n = bytes_.type.count
    bits = bytes_.unsigned_to(vec(I32, n)) & 127
    e, m = bits >> 3, bits & 7
    normal = (m | 8) << e - 1
    units = select(e != 0, normal, m)
    is_zero = bytes_ == 127
    units = select(is_zero, 0, units)
    return units.unsigned_to(vec(F32, n)) * 2.0 ** (-10)


def _nvfp4(p: Value) -> Block:
    """16 elements under a scale of one byte: the low halves of eight bytes, then the high ones."""
    q = []
    for part in range(4):
        bytes_ = load(vec(I8, 8), p, 4 + 8 * part)
        low, high = bytes_ & 15, bytes_ >> 4
        q.append(lookup16(MXFP4_VALUES, low.shuffle(range(16), high)))
    return Block(q, True, unsigned_e4m3(load(vec(I8, 4), p)))


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
