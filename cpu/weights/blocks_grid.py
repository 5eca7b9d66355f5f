"""The formats IQ1, IQ2 and IQ3: groups of 8 or 4 elements are looked up in a grid.

In IQ2 and IQ3 a grid has the absolute values of elements, and each element has a sign bit. The
formats _XXS and _XS have seven sign bits for a group of eight: an even number of elements is
negative. With AVX-512 VBMI all 32 groups of a block are looked up at once in registers that hold
the grid. This takes half of the time of one load a group. Other CPUs load.
"""

from __future__ import annotations

import numpy as np
from llvmlite import ir

from sparsekv_cli.cpu.jit import llvm
from sparsekv_cli.cpu.jit.llvm import F16, F32, I8, I16, I32, I64, const, load, shuffle, vec
from sparsekv_cli.cpu.weights.block import Block, BlockFormat, halves, lookup16, times
from sparsekv_cli.cpu.weights.grids import GRIDS, grid, packed_groups
from sparsekv_cli.cpu.weights.types import GGMLType

BYTES = 64  # elements of a vector
BITS = vec(ir.IntType(1), BYTES)
I16_32 = vec(I16, 32)
PERMUTE = "llvm.x86.avx512.vpermi2var.hi.512"
MULTISHIFT = "llvm.x86.avx512.pmultishift.qb.512"
LARGEST_PERMUTED = 1024  # most groups of a grid in registers; for 2048, loads are as fast


def _table(b: ir.IRBuilder, name: str) -> ir.GlobalVariable:
    """Returns the grid of the format ``name`` as a constant of the LLVM module.

    The constant is an array of integers. Each integer is a group: its 8 or 4 elements as bytes.
    """
    global_name = f"grid_{name}"
    found = b.module.globals.get(global_name)
    if found is not None:
        return found
    group = ir.IntType(8 * GRIDS[name].width)
    words = grid(name).view(f"<u{GRIDS[name].width}")[:, 0].tolist()
    type_ = ir.ArrayType(group, len(words))
    table = ir.GlobalVariable(b.module, type_, global_name)
    table.linkage, table.global_constant, table.align = "internal", True, 64
    table.initializer = ir.Constant(type_, words)
    return table


def _loaded(b: ir.IRBuilder, name: str, indices: ir.Value) -> list[ir.Value]:
    """``_groups`` with one load a group."""
    table = _table(b, name)
    group, n = table.type.pointee.element, BYTES // GRIDS[name].width
    parts = []
    for start in range(0, indices.type.count, n):
        found = ir.Constant(vec(group, n), ir.Undefined)
        for i in range(n):
            index = b.zext(b.extract_element(indices, I32(start + i)), I64)
            one = b.load(b.gep(table, [I64(0), index]))
            found = b.insert_element(found, one, I32(i))
        parts.append(b.bitcast(found, vec(I8, BYTES)))
    return parts


def _codes(b: ir.IRBuilder, table: np.ndarray, indices: ir.Value) -> ir.Value:
    """Returns table[indices] <32 x i16>, for a table of 64, 128, 256 .. entries in registers.

    A permute looks up the low six bits of the 32 indices in 64 entries. The higher bits then select
    one of the permutes' results: index 130 is entry 2 of the third permute.
    """
    type_ = indices.type
    rows = [ir.Constant(type_, row.tolist()) for row in table.reshape(-1, 32)]
    found = [
        llvm.call_named(b, PERMUTE, type_, low, indices, high)
        for low, high in zip(rows[::2], rows[1::2], strict=True)
    ]
    bit = 64
    while len(found) > 1:
        is_set = b.icmp_unsigned("!=", b.and_(indices, const(I16, bit, 32)), const(I16, 0, 32))
        pairs = zip(found[::2], found[1::2], strict=True)
        found = [b.select(is_set, high, low) for low, high in pairs]
        bit *= 2
    return found[0]


def _permuted(b: ir.IRBuilder, name: str, indices: ir.Value) -> list[ir.Value]:
    """``_groups`` with permutes: the grid's packed groups of up to 16 bits lie in registers."""
    width, values, n_bits = GRIDS[name].width, GRIDS[name].values, GRIDS[name].n_bits
    table, n = packed_groups(name), BYTES // width
    known = values + (0,) * (16 - len(values))
    # First bit of each element in 64 bits, which hold 8 / width groups.
    starts = [8 * width * (i // width) + n_bits * (i % width) for i in range(8)]
    control = ir.Constant(vec(I8, BYTES), starts * 8)
    every = const(I8, (1 << n_bits) - 1, BYTES)
    parts = []
    for first in range(0, indices.type.count, 32):
        codes = _codes(b, table, shuffle(b, indices, indices, range(first, first + 32)))
        for start in range(0, 32, n):
            some = shuffle(b, codes, codes, range(start, start + n))
            wide = b.bitcast(b.zext(some, vec(ir.IntType(8 * width), n)), vec(I64, 8))
            bytes_ = b.bitcast(wide, vec(I8, BYTES))
            fields = llvm.call_named(b, MULTISHIFT, bytes_.type, control, bytes_)
            parts.append(lookup16(b, known, b.and_(fields, every)))
    return parts


def _groups(b: ir.IRBuilder, name: str, indices: ir.Value) -> list[ir.Value]:
    """Returns a block's groups, <64 x i8> each, of their indices <32 x i16> or <64 x i16>."""
    if llvm.has_feature("avx512vbmi") and len(packed_groups(name)) <= LARGEST_PERMUTED:
        return _permuted(b, name, indices)
    return _loaded(b, name, indices)


def _part(b: ir.IRBuilder, vector: ir.Value, i: int) -> ir.Value:
    """Returns the lanes of part i of 4."""
    n = vector.type.count // 4
    return shuffle(b, vector, vector, range(n * i, n * (i + 1)))


def _signed(b: ir.IRBuilder, name: str, indices: ir.Value, signs: ir.Value) -> list[ir.Value]:
    """Returns a block's groups, negated where an element's bit is set in ``signs``, <32 x i8>."""
    return [
        b.select(b.bitcast(_part(b, signs, i), BITS), b.neg(sizes), sizes)
        for i, sizes in enumerate(_groups(b, name, indices))
    ]


def _even_signs(b: ir.IRBuilder, seven: ir.Value) -> ir.Value:
    """Adds the eighth sign bit to each byte: it makes the number of set bits even."""
    type_ = seven.type
    count = llvm.call_named(b, f"llvm.ctpop.v{type_.count}i8", type_, seven)
    return b.or_(seven, b.shl(count, const(I8, 7, type_.count)))


def _seven_bits(b: ir.IRBuilder, words: ir.Value) -> ir.Value:
    """Returns the four lowest fields of seven bits of <8 x i32> as bytes, <32 x i8>."""
    n = words.type.count
    fields = b.and_(words, const(I32, 127, n))
    for i in range(1, 4):
        field = b.and_(b.shl(words, const(I32, i, n)), const(I32, 127 << 8 * i, n))
        fields = b.or_(fields, field)
    return b.bitcast(fields, vec(I8, 4 * n))


def _scales(b: ir.IRBuilder, d: ir.Value, integers: ir.Value, unit: float) -> ir.Value:
    """Returns <k x float> d * (2 integers + 1) * unit, for i32 or i8 ``integers``."""
    n = integers.type.count
    odd = b.add(b.shl(b.zext(integers, vec(I32, n)), const(I32, 1, n)), const(I32, 1, n))
    return times(b, d, b.fmul(b.uitofp(odd, vec(F32, n)), const(F32, unit, n)))


def _both_nibbles(b: ir.IRBuilder, bytes_: ir.Value) -> ir.Value:
    """Returns <2n x i8> of <n x i8>: the low four bits of each byte, then its high four bits."""
    n = bytes_.type.count
    low, high = b.and_(bytes_, const(I8, 15, n)), b.lshr(bytes_, const(I8, 4, n))
    return shuffle(b, low, high, [lane for i in range(n) for lane in (i, n + i)])


def _iq2_xxs(b: ir.IRBuilder, p: ir.Value) -> Block:
    (d,) = halves(b, p, 0)
    words = load(b, vec(I32), p, 2)
    indices = b.bitcast(shuffle(b, words, words, range(0, 16, 2)), vec(I8, 32))
    rest = shuffle(b, words, words, range(1, 16, 2))
    q = _signed(b, "IQ2_XXS", b.zext(indices, I16_32), _even_signs(b, _seven_bits(b, rest)))
    return Block(q, True, _scales(b, d, b.lshr(rest, const(I32, 28, 8)), 0.125))


def _iq2_xs(b: ir.IRBuilder, p: ir.Value) -> Block:
    (d,) = halves(b, p, 0)
    words = load(b, I16_32, p, 2)
    signs = _even_signs(b, b.trunc(b.lshr(words, const(I16, 9, 32)), vec(I8, 32)))
    q = _signed(b, "IQ2_XS", b.and_(words, const(I16, 511, 32)), signs)
    return Block(q, True, _scales(b, d, _both_nibbles(b, load(b, vec(I8, 8), p, 66)), 0.125))


def _iq2_s(b: ir.IRBuilder, p: ir.Value) -> Block:
    (d,) = halves(b, p, 0)
    low, signs = (load(b, vec(I8, 32), p, at) for at in (2, 34))
    high = b.zext(load(b, vec(I8, 8), p, 66), vec(I16, 8))
    shifts = ir.Constant(I16_32, [8, 6, 4, 2] * 8)
    high = b.shl(shuffle(b, high, high, [i // 4 for i in range(32)]), shifts)
    indices = b.or_(b.zext(low, I16_32), b.and_(high, const(I16, 0x300, 32)))
    q = _signed(b, "IQ2_S", indices, signs)
    return Block(q, True, _scales(b, d, _both_nibbles(b, load(b, vec(I8, 8), p, 74)), 0.125))


def _iq3_xxs(b: ir.IRBuilder, p: ir.Value) -> Block:
    (d,) = halves(b, p, 0)
    rest = load(b, vec(I32, 8), p, 66)
    indices = b.zext(load(b, vec(I8, 64), p, 2), vec(I16, 64))
    q = _signed(b, "IQ3_XXS", indices, _even_signs(b, _seven_bits(b, rest)))
    return Block(q, True, _scales(b, d, b.lshr(rest, const(I32, 28, 8)), 0.25))


def _iq3_s(b: ir.IRBuilder, p: ir.Value) -> Block:
    (d,) = halves(b, p, 0)
    high = b.bitcast(load(b, vec(I8, 8), p, 66), BITS)
    high = b.select(high, const(I16, 256, 64), const(I16, 0, 64))
    indices = b.or_(b.zext(load(b, vec(I8, 64), p, 2), vec(I16, 64)), high)
    q = _signed(b, "IQ3_S", indices, load(b, vec(I8, 32), p, 74))
    return Block(q, True, _scales(b, d, _both_nibbles(b, load(b, vec(I8, 4), p, 106)), 1.0))


def _shifted(b: ir.IRBuilder, low: ir.Value, high: ir.Value, is_less: ir.Value) -> list[ir.Value]:
    """Returns eight times the groups of IQ1 plus one, or minus one where ``is_less`` is set.

    low: <32 x i8>, the low bytes of the indices. high: <32 x i16>, whose lowest three bits are the
    high bits of the indices. is_less: <32 x i1>.
    """
    high = b.shl(b.and_(high, const(I16, 7, 32)), const(I16, 8, 32))
    one = b.select(is_less, const(I8, -1, 32), const(I8, 1, 32))
    lanes = [i // 8 for i in range(BYTES)]
    q = []
    for i, groups in enumerate(_groups(b, "IQ1_S", b.or_(b.zext(low, I16_32), high))):
        part = _part(b, one, i)
        q.append(b.add(b.shl(groups, const(I8, 3, BYTES)), shuffle(b, part, part, lanes)))
    return q


def _iq1_s(b: ir.IRBuilder, p: ir.Value) -> Block:
    (d,) = halves(b, p, 0)
    words = load(b, vec(I16, 8), p, 34)
    each = shuffle(b, words, words, [i // 4 for i in range(32)])
    high = b.lshr(each, ir.Constant(I16_32, [0, 3, 6, 9] * 8))
    is_less = b.icmp_signed("<", each, const(I16, 0, 32))
    q = _shifted(b, load(b, vec(I8, 32), p, 2), high, is_less)
    scales = b.and_(b.lshr(words, const(I16, 12, 8)), const(I16, 7, 8))
    return Block(q, True, _scales(b, d, scales, 0.125))


def _iq1_m(b: ir.IRBuilder, p: ir.Value) -> Block:
    """The f16 scale is the highest four bits of each of the four last words."""
    words = load(b, vec(I16, 4), p, 48)
    tops = b.shl(b.lshr(words, const(I16, 12, 4)), ir.Constant(vec(I16, 4), [0, 4, 8, 12]))
    first, second = (shuffle(b, tops, tops, lanes) for lanes in ([0, 1], [2, 3]))
    pair = b.or_(first, second)
    bits = b.or_(shuffle(b, pair, pair, [0]), shuffle(b, pair, pair, [1]))
    d = b.fpext(b.bitcast(bits, vec(F16, 1)), vec(F32, 1))
    scales = shuffle(b, words, words, [i // 4 for i in range(16)])
    scales = b.lshr(scales, ir.Constant(vec(I16), [0, 3, 6, 9] * 4))
    high = b.zext(_both_nibbles(b, load(b, vec(I8, 16), p, 32)), I16_32)
    is_less = b.icmp_unsigned(">", high, const(I16, 7, 32))
    q = _shifted(b, load(b, vec(I8, 32), p), high, is_less)
    return Block(q, True, _scales(b, d, b.and_(scales, const(I16, 7)), 0.125))


GRID = (  # type, decode, decode_four, largest, zero
    BlockFormat(GGMLType.IQ1_S, _iq1_s, None, 18, 9),
    BlockFormat(GGMLType.IQ1_M, _iq1_m, None, 18, 9),
    BlockFormat(GGMLType.IQ2_XXS, _iq2_xxs, None, 86, 43),
    BlockFormat(GGMLType.IQ2_XS, _iq2_xs, None, 86, 43),
    BlockFormat(GGMLType.IQ2_S, _iq2_s, None, 86, 43),
    BlockFormat(GGMLType.IQ3_XXS, _iq3_xxs, None, 124, 62),
    BlockFormat(GGMLType.IQ3_S, _iq3_s, None, 30, 15),
)
