"""The formats with blocks of 256 elements that are stored as integers: K, IQ4_XS and ternary."""

from __future__ import annotations

from llvmlite import ir

from sparsekv_cli.cpu.jit.value import F32, I8, I16, LANES, VF, Value, const, load, select, vec
from sparsekv_cli.cpu.weights.block import (
    IQ4_NL_VALUES,
    Block,
    BlockFormat,
    halves,
    lookup16,
    nibbles,
    times,
)
from sparsekv_cli.cpu.weights.types import GGMLType


def _q2_k(p: Value) -> Block:
    d, dmin = halves(p, 80, 2)
    scales, minimums = nibbles(load(vec(I8), p))
    q = []
    for group in range(16):
        n, shift, half = group // 8, group // 2 % 4, group % 2
        q.append(load(vec(I8), p, 16 + 32 * n + 16 * half) >> 2 * shift & 3)
    offsets = -times(dmin, minimums.unsigned_to(VF))
    return Block(q, False, times(d, scales.unsigned_to(VF)), offsets)


def _q3_k(p: Value) -> Block:
    (d,) = halves(p, 108)
    eight, four = load(vec(I8, 8), p, 96), load(vec(I8, 4), p, 104)
    low = (eight & 15).shuffle(range(LANES), eight >> 4)
    shifts = ir.Constant(vec(I8), [2 * (i // 4) for i in range(LANES)])
    high = four.shuffle([i % 4 for i in range(LANES)]) >> shifts
    high = (high & 3) << 4
    scales = (low | high) - 32
    q = []
    for group in range(16):
        n, shift, half = group // 8, group // 2 % 4, group % 2
        bits = load(vec(I8), p, 32 + 32 * n + 16 * half)
        bits = bits >> 2 * shift & 3
        mask = load(vec(I8), p, 16 * half) & 1 << 4 * n + shift
        is_set = mask != 0
        q.append(bits - select(is_set, const(I8, 0), const(I8, 4)))
    return Block(q, True, times(d, scales.to(VF)))


def _k_affine(p: Value) -> tuple[Value, Value]:
    """Returns scales and offsets, <8 x float>, of the block of Q4_K or Q5_K at address p.

    Each is for 32 weights. The block begins with d and dmin, two f16. Then 12 bytes hold eight
    6-bit scales s and eight 6-bit minimums m. A scale is d s and an offset is -dmin m:

        bytes 4 to 7    low six bits: s[0] to s[3]; high two bits: the high bits of s[4] to s[7]
        bytes 8 to 11   the same of m
        bytes 12 to 15  low four bits of s[4] to s[7], then (high nibble) of m[4] to m[7]
    """
    d, dmin = halves(p, 0, 2)
    first, second, third = (load(vec(I8, 4), p, at) for at in (4, 8, 12))

    def six_bits(low: Value, nibble: Value) -> Value:
        top = low >> 6 << 4
        return (low & 63).shuffle(range(8), nibble | top).unsigned_to(vec(F32, 8))

    scales = six_bits(first, third & 15)
    minimums = six_bits(second, third >> 4)
    return times(d, scales), -times(dmin, minimums)


def _q4_k(p: Value) -> Block:
    q = []
    for pair in range(4):
        halves = [nibbles(load(vec(I8), p, 16 + 32 * pair + 16 * h)) for h in range(2)]
        q += [halves[h][nibble] for nibble in range(2) for h in range(2)]
    return Block(q, False, *_k_affine(p))


def _q5_k(p: Value) -> Block:
    high = [load(vec(I8), p, 16 + 16 * half) for half in range(2)]
    q = []
    for group in range(8):
        for half in range(2):
            bytes_ = load(vec(I8), p, 48 + 32 * (group // 2) + 16 * half)
            bit = high[half] >> group & 1
            q.append(nibbles(bytes_)[group % 2] | bit << 4)
    return Block(q, False, *_k_affine(p))


def _q6_k(p: Value) -> Block:
    (d,) = halves(p, 208)
    q = []
    for group in range(16):
        n, quarter, half = group // 8, group // 2 % 4, group % 2
        low_at = 64 * n + 32 * (quarter % 2) + 16 * half
        low = (nibbles(load(vec(I8), p, low_at)))[quarter // 2]
        high = load(vec(I8), p, 128 + 32 * n + 16 * half) >> 2 * quarter
        q.append((low | (high & 3) << 4) - 32)
    return Block(q, True, times(d, load(vec(I8), p, 192).to(VF)))


def _iq4_xs(p: Value) -> Block:
    (d,) = halves(p, 0)
    four = load(vec(I8, 4), p, 4)
    low = (four & 15).shuffle([0, 4, 1, 5, 2, 6, 3, 7], four >> 4)
    shifts = ir.Constant(vec(I16, 8), [2 * i for i in range(8)])
    high = load(I16, p, 2).splat(8) >> shifts
    high = (high.to(vec(I8, 8)) & 3) << 4
    scales = (low | high) - 32
    groups = (nibbles(load(vec(I8), p, 8 + 16 * group)) for group in range(8))
    q = [lookup16(IQ4_NL_VALUES, bits) for group in groups for bits in group]
    return Block(q, True, times(d, scales.to(vec(F32, 8))))


def _tq1_0(p: Value) -> Block:
    """A byte has five elements of -1, 0 and 1: the base-3 digits of the byte divided by 256."""
    (d,) = halves(p, 52)
    last = load(vec(I8, 4), p, 48)
    four = last.shuffle([i % 4 for i in range(LANES)])
    powers = ir.Constant(vec(I8), [3 ** (i // 4) for i in range(LANES)])
    bytes_ = [load(vec(I8), p, 16 * i) for i in range(3)]
    first = [bytes_[i] * 3**n for n in range(5) for i in range(2)]
    second = [bytes_[2] * 3**n for n in range(5)]
    digits = [*first, *second, four * powers]
    q = [((each.unsigned_to(vec(I16)) * 3) >> 8).to(vec(I8)) - 1 for each in digits]
    return Block(q, True, d.shuffle([0] * 8))


def _tq2_0(p: Value) -> Block:
    """Two bits an element."""
    (d,) = halves(p, 64)
    q = []
    for group in range(16):
        n, shift, half = group // 8, group // 2 % 4, group % 2
        q.append(((load(vec(I8), p, 32 * n + 16 * half) >> 2 * shift) & 3) - 1)
    return Block(q, True, d.shuffle([0] * 8))


# Words of a block of Q6_K in the file: 32 of low halves, 16 of high bits, 4 of scales. The order of
# their use is: the scales, then for each half of the elements 8 of high bits and 16 of low halves.
Q6_K_ORDER = (*range(48, 52), *range(32, 40), *range(16), *range(40, 48), *range(16, 32))

LARGE = (  # type, decode, decode_four, largest, zero, interleaves, word_order
    BlockFormat(GGMLType.Q2_K, _q2_k, None, 3, 0, True),
    BlockFormat(GGMLType.Q3_K, _q3_k, None, 7, 4, True),
    BlockFormat(GGMLType.Q4_K, _q4_k, None, 15, 0, True),
    BlockFormat(GGMLType.Q5_K, _q5_k, None, 31, 0, True),
    BlockFormat(GGMLType.Q6_K, _q6_k, None, 63, 32, True, Q6_K_ORDER),
    BlockFormat(GGMLType.IQ4_XS, _iq4_xs, None, 241, 128, True),
    BlockFormat(GGMLType.TQ1_0, _tq1_0, None, 2, 1),
    BlockFormat(GGMLType.TQ2_0, _tq2_0, None, 3, 1, True),
)
