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
from sparsekv_cli.cpu.jit.value import (
    F16,
    F32,
    I1,
    I8,
    I16,
    I32,
    I64,
    Value,
    builder,
    call_named,
    const,
    load,
    select,
    vec,
)
from sparsekv_cli.cpu.weights.block import Block, BlockFormat, halves, lookup16, times
from sparsekv_cli.cpu.weights.grids import GRIDS, grid, packed_groups
from sparsekv_cli.cpu.weights.types import GGMLType

BYTES = 64  # elements of a vector
BITS = vec(I1, BYTES)
I16_32 = vec(I16, 32)
PERMUTE = "llvm.x86.avx512.vpermi2var.hi.512"
MULTISHIFT = "llvm.x86.avx512.pmultishift.qb.512"
LARGEST_PERMUTED = 1024  # most groups of a grid in registers; for 2048, loads are as fast


def _table(name: str) -> ir.GlobalVariable:
    """Returns the grid of the format ``name`` as a constant of the LLVM module.

    The constant is an array of integers. Each integer is a group: its 8 or 4 elements as bytes.
    """
    global_name = f"grid_{name}"
    module = builder().module
    found = module.globals.get(global_name)
    if found is not None:
        return found
    group = ir.IntType(8 * GRIDS[name].width)
    words = grid(name).view(f"<u{GRIDS[name].width}")[:, 0].tolist()
    type_ = ir.ArrayType(group, len(words))
    table = ir.GlobalVariable(module, type_, global_name)
    table.linkage, table.global_constant, table.align = "internal", True, 64
    table.initializer = ir.Constant(type_, words)
    return table


def _loaded(name: str, indices: Value) -> list[Value]:
    """``_groups`` with one load a group."""
    b, table = builder(), _table(name)
    group, n = table.type.pointee.element, BYTES // GRIDS[name].width
    parts = []
    for start in range(0, indices.type.count, n):
        found = Value(ir.Constant(vec(group, n), ir.Undefined))
        for i in range(n):
            index = indices.lane(start + i).unsigned_to(I64)
            one = b.load(b.gep(table, [I64(0), index.ir]))
            found = Value(b.insert_element(found.ir, one, I32(i)))
        parts.append(found.bitcast(vec(I8, BYTES)))
    return parts


def _codes(table: np.ndarray, indices: Value) -> Value:
    """Returns table[indices] <32 x i16>, for a table of 64, 128, 256 .. entries in registers.

    A permute looks up the low six bits of the 32 indices in 64 entries. The higher bits then select
    one of the permutes' results: index 130 is entry 2 of the third permute.
    """
    type_ = indices.type
    rows = [ir.Constant(type_, row.tolist()) for row in table.reshape(-1, 32)]
    found = [
        call_named(PERMUTE, type_, low, indices, high)
        for low, high in zip(rows[::2], rows[1::2], strict=True)
    ]
    bit = 64
    while len(found) > 1:
        is_set = indices & bit != 0
        pairs = zip(found[::2], found[1::2], strict=True)
        found = [select(is_set, high, low) for low, high in pairs]
        bit *= 2
    return found[0]


def _permuted(name: str, indices: Value) -> list[Value]:
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
        codes = _codes(table, indices.shuffle(range(first, first + 32)))
        for start in range(0, 32, n):
            some = codes.shuffle(range(start, start + n))
            wide = some.unsigned_to(vec(ir.IntType(8 * width), n)).bitcast(vec(I64, 8))
            bytes_ = wide.bitcast(vec(I8, BYTES))
            fields = call_named(MULTISHIFT, bytes_.type, control, bytes_)
            parts.append(lookup16(known, fields & every))
    return parts


def _groups(name: str, indices: Value) -> list[Value]:
    """Returns a block's groups, <64 x i8> each, of their indices <32 x i16> or <64 x i16>."""
    if llvm.has_feature("avx512vbmi") and len(packed_groups(name)) <= LARGEST_PERMUTED:
        return _permuted(name, indices)
    return _loaded(name, indices)


def _part(vector: Value, i: int) -> Value:
    """Returns the lanes of part i of 4."""
    n = vector.type.count // 4
    return vector.shuffle(range(n * i, n * (i + 1)))


def _signed(name: str, indices: Value, signs: Value) -> list[Value]:
    """Returns a block's groups, negated where an element's bit is set in ``signs``, <32 x i8>."""
    return [
        select(_part(signs, i).bitcast(BITS), -sizes, sizes)
        for i, sizes in enumerate(_groups(name, indices))
    ]


def _even_signs(seven: Value) -> Value:
    """Adds the eighth sign bit to each byte: it makes the number of set bits even."""
    type_ = seven.type
    count = call_named(f"llvm.ctpop.v{type_.count}i8", type_, seven)
    return seven | count << 7


def _seven_bits(words: Value) -> Value:
    """Returns the four lowest fields of seven bits of <8 x i32> as bytes, <32 x i8>."""
    n = words.type.count
    fields = words & 127
    for i in range(1, 4):
        field = words << i & 127 << 8 * i
        fields = fields | field
    return fields.bitcast(vec(I8, 4 * n))


def _scales(d: Value, integers: Value, unit: float) -> Value:
    """Returns <k x float> d * (2 integers + 1) * unit, for i32 or i8 ``integers``."""
    n = integers.type.count
    odd = (integers.unsigned_to(vec(I32, n)) << 1) + 1
    return times(d, odd.unsigned_to(vec(F32, n)) * unit)


def _both_nibbles(bytes_: Value) -> Value:
    """Returns <2n x i8> of <n x i8>: the low four bits of each byte, then its high four bits."""
    n = bytes_.type.count
    low, high = bytes_ & 15, bytes_ >> 4
    return low.shuffle([lane for i in range(n) for lane in (i, n + i)], high)


def _iq2_xxs(p: Value) -> Block:
    (d,) = halves(p, 0)
    words = load(vec(I32), p, 2)
    indices = words.shuffle(range(0, 16, 2)).bitcast(vec(I8, 32))
    rest = words.shuffle(range(1, 16, 2))
    q = _signed("IQ2_XXS", indices.unsigned_to(I16_32), _even_signs(_seven_bits(rest)))
    return Block(q, True, _scales(d, rest >> 28, 0.125))


def _iq2_xs(p: Value) -> Block:
    (d,) = halves(p, 0)
    words = load(I16_32, p, 2)
    signs = _even_signs((words >> 9).to(vec(I8, 32)))
    q = _signed("IQ2_XS", words & 511, signs)
    return Block(q, True, _scales(d, _both_nibbles(load(vec(I8, 8), p, 66)), 0.125))


def _iq2_s(p: Value) -> Block:
    (d,) = halves(p, 0)
    low, signs = (load(vec(I8, 32), p, at) for at in (2, 34))
    high = load(vec(I8, 8), p, 66).unsigned_to(vec(I16, 8))
    shifts = ir.Constant(I16_32, [8, 6, 4, 2] * 8)
    high = high.shuffle([i // 4 for i in range(32)]) << shifts
    indices = low.unsigned_to(I16_32) | high & 0x300
    q = _signed("IQ2_S", indices, signs)
    return Block(q, True, _scales(d, _both_nibbles(load(vec(I8, 8), p, 74)), 0.125))


def _iq3_xxs(p: Value) -> Block:
    (d,) = halves(p, 0)
    rest = load(vec(I32, 8), p, 66)
    indices = load(vec(I8, 64), p, 2).unsigned_to(vec(I16, 64))
    q = _signed("IQ3_XXS", indices, _even_signs(_seven_bits(rest)))
    return Block(q, True, _scales(d, rest >> 28, 0.25))


def _iq3_s(p: Value) -> Block:
    (d,) = halves(p, 0)
    high = load(vec(I8, 8), p, 66).bitcast(BITS)
    high = select(high, const(I16, 256, 64), const(I16, 0, 64))
    indices = load(vec(I8, 64), p, 2).unsigned_to(vec(I16, 64)) | high
    q = _signed("IQ3_S", indices, load(vec(I8, 32), p, 74))
    return Block(q, True, _scales(d, _both_nibbles(load(vec(I8, 4), p, 106)), 1.0))


def _shifted(low: Value, high: Value, is_less: Value) -> list[Value]:
    """Returns eight times the groups of IQ1 plus one, or minus one where ``is_less`` is set.

    low: <32 x i8>, the low bytes of the indices. high: <32 x i16>, whose lowest three bits are the
    high bits of the indices. is_less: <32 x i1>.
    """
    high = (high & 7) << 8
    one = select(is_less, const(I8, -1, 32), const(I8, 1, 32))
    lanes = [i // 8 for i in range(BYTES)]
    q = []
    for i, groups in enumerate(_groups("IQ1_S", low.unsigned_to(I16_32) | high)):
        q.append((groups << 3) + _part(one, i).shuffle(lanes))
    return q


def _iq1_s(p: Value) -> Block:
    (d,) = halves(p, 0)
    words = load(vec(I16, 8), p, 34)
    each = words.shuffle([i // 4 for i in range(32)])
    high = each >> [0, 3, 6, 9] * 8
    is_less = each < 0
    q = _shifted(load(vec(I8, 32), p, 2), high, is_less)
    scales = words >> 12 & 7
    return Block(q, True, _scales(d, scales, 0.125))


def _iq1_m(p: Value) -> Block:
    """The f16 scale is the highest four bits of each of the four last words."""
    words = load(vec(I16, 4), p, 48)
    tops = words >> 12 << [0, 4, 8, 12]
    first, second = (tops.shuffle(lanes) for lanes in ([0, 1], [2, 3]))
    pair = first | second
    d = (pair.shuffle([0]) | pair.shuffle([1])).bitcast(vec(F16, 1)).to(vec(F32, 1))
    scales = words.shuffle([i // 4 for i in range(16)])
    scales = scales >> [0, 3, 6, 9] * 4
    high = _both_nibbles(load(vec(I8, 16), p, 32)).unsigned_to(I16_32)
    is_less = const(I16, 7, 32).below(high)
    q = _shifted(load(vec(I8, 32), p), high, is_less)
    return Block(q, True, _scales(d, scales & 7, 0.125))


GRID = (  # type, decode, decode_four, largest, zero
    BlockFormat(GGMLType.IQ1_S, _iq1_s, None, 18, 9),
    BlockFormat(GGMLType.IQ1_M, _iq1_m, None, 18, 9),
    BlockFormat(GGMLType.IQ2_XXS, _iq2_xxs, None, 86, 43),
    BlockFormat(GGMLType.IQ2_XS, _iq2_xs, None, 86, 43),
    BlockFormat(GGMLType.IQ2_S, _iq2_s, None, 86, 43),
    BlockFormat(GGMLType.IQ3_XXS, _iq3_xxs, None, 124, 62),
    BlockFormat(GGMLType.IQ3_S, _iq3_s, None, 30, 15),
)
