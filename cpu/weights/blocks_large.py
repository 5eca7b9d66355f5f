"""The formats with blocks of 256 elements that are stored as integers: K, IQ4_XS and ternary."""

from __future__ import annotations

from llvmlite import ir

from sparsekv_cli.cpu.jit import llvm
from sparsekv_cli.cpu.jit.llvm import F32, I8, I16, LANES, VF, const, load, shuffle, vec
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


def _q2_k(b: ir.IRBuilder, p: ir.Value) -> Block:
    d, dmin = halves(b, p, 80, 2)
    scales, minimums = nibbles(b, load(b, vec(I8), p))
    q = []
    for group in range(16):
        n, shift, half = group // 8, group // 2 % 4, group % 2
        bits = load(b, vec(I8), p, 16 + 32 * n + 16 * half)
        q.append(b.and_(b.lshr(bits, const(I8, 2 * shift)), const(I8, 3)))
    offsets = b.fneg(times(b, dmin, b.uitofp(minimums, VF)))
    return Block(q, False, times(b, d, b.uitofp(scales, VF)), offsets)


def _q3_k(b: ir.IRBuilder, p: ir.Value) -> Block:
    (d,) = halves(b, p, 108)
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
    return Block(q, True, times(b, d, b.sitofp(scales, VF)))


def _k_affine(b: ir.IRBuilder, p: ir.Value) -> tuple[ir.Value, ir.Value]:
    """Returns scales and offsets, <8 x float>, of the block of Q4_K or Q5_K at address p.

    Each is for 32 weights. The block begins with d and dmin, two f16. Then 12 bytes hold eight
    6-bit scales s and eight 6-bit minimums m. A scale is d s and an offset is -dmin m:

        bytes 4 to 7    low six bits: s[0] to s[3]; high two bits: the high bits of s[4] to s[7]
        bytes 8 to 11   the same of m
        bytes 12 to 15  low four bits of s[4] to s[7], then (high nibble) of m[4] to m[7]
    """
    d, dmin = halves(b, p, 0, 2)
    first, second, third = (load(b, vec(I8, 4), p, at) for at in (4, 8, 12))

    def six_bits(low: ir.Value, nibble: ir.Value) -> ir.Value:
        top = b.shl(b.lshr(low, const(I8, 6, 4)), const(I8, 4, 4))
        parts = b.and_(low, const(I8, 63, 4)), b.or_(nibble, top)
        return b.uitofp(shuffle(b, *parts, range(8)), vec(F32, 8))

    scales = six_bits(first, b.and_(third, const(I8, 15, 4)))
    minimums = six_bits(second, b.lshr(third, const(I8, 4, 4)))
    return times(b, d, scales), b.fneg(times(b, dmin, minimums))


def _q4_k(b: ir.IRBuilder, p: ir.Value) -> Block:
    q = []
    for pair in range(4):
        halves = [nibbles(b, load(b, vec(I8), p, 16 + 32 * pair + 16 * h)) for h in range(2)]
        q += [halves[h][nibble] for nibble in range(2) for h in range(2)]
    return Block(q, False, *_k_affine(b, p))


def _q5_k(b: ir.IRBuilder, p: ir.Value) -> Block:
    high = [load(b, vec(I8), p, 16 + 16 * half) for half in range(2)]
    q = []
    for group in range(8):
        for half in range(2):
            bytes_ = load(b, vec(I8), p, 48 + 32 * (group // 2) + 16 * half)
            bit = b.and_(b.lshr(high[half], const(I8, group)), const(I8, 1))
            q.append(b.or_(nibbles(b, bytes_)[group % 2], b.shl(bit, const(I8, 4))))
    return Block(q, False, *_k_affine(b, p))


def _q6_k(b: ir.IRBuilder, p: ir.Value) -> Block:
    (d,) = halves(b, p, 208)
    q = []
    for group in range(16):
        n, quarter, half = group // 8, group // 2 % 4, group % 2
        low_at = 64 * n + 32 * (quarter % 2) + 16 * half
        low = nibbles(b, load(b, vec(I8), p, low_at))[quarter // 2]
        high = b.lshr(load(b, vec(I8), p, 128 + 32 * n + 16 * half), const(I8, 2 * quarter))
        q.append(b.sub(b.or_(low, b.shl(b.and_(high, const(I8, 3)), const(I8, 4))), const(I8, 32)))
    return Block(q, True, times(b, d, b.sitofp(load(b, vec(I8), p, 192), VF)))


def _iq4_xs(b: ir.IRBuilder, p: ir.Value) -> Block:
    (d,) = halves(b, p, 0)
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
        for bits in nibbles(b, load(b, vec(I8), p, 8 + 16 * group)):
            q.append(lookup16(b, IQ4_NL_VALUES, bits))
    return Block(q, True, times(b, d, b.sitofp(scales, vec(F32, 8))))


def _tq1_0(b: ir.IRBuilder, p: ir.Value) -> Block:
    """A byte has five elements of -1, 0 and 1: the base-3 digits of the byte divided by 256."""
    (d,) = halves(b, p, 52)
    last = load(b, vec(I8, 4), p, 48)
    four = shuffle(b, last, last, [i % 4 for i in range(LANES)])
    powers = ir.Constant(vec(I8), [3 ** (i // 4) for i in range(LANES)])
    bytes_ = [load(b, vec(I8), p, 16 * i) for i in range(3)]
    first = [b.mul(bytes_[i], const(I8, 3**n)) for n in range(5) for i in range(2)]
    second = [b.mul(bytes_[2], const(I8, 3**n)) for n in range(5)]
    q = []
    for digits in [*first, *second, b.mul(four, powers)]:
        wide = b.mul(b.zext(digits, vec(I16)), const(I16, 3))
        q.append(b.sub(b.trunc(b.lshr(wide, const(I16, 8)), vec(I8)), const(I8, 1)))
    return Block(q, True, shuffle(b, d, d, [0] * 8))


def _tq2_0(b: ir.IRBuilder, p: ir.Value) -> Block:
    """Two bits an element."""
    (d,) = halves(b, p, 64)
    q = []
    for group in range(16):
        n, shift, half = group // 8, group // 2 % 4, group % 2
        bits = b.lshr(load(b, vec(I8), p, 32 * n + 16 * half), const(I8, 2 * shift))
        q.append(b.sub(b.and_(bits, const(I8, 3)), const(I8, 1)))
    return Block(q, True, shuffle(b, d, d, [0] * 8))


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
