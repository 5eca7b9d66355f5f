"""Parts that the decoders of all block formats share: decoded blocks, format records, helpers.

``decode`` of a quantised format writes LLVM IR that turns one block into integers, sixteen or 64 at
a time. It also makes a vector of scales (and, for asymmetric formats, of offsets), one for each 16
or 32 elements. An element is q * scale + offset. All dot products and the dequantisation use this
one description. The layouts are llama.cpp's (the block structs of ggml-common.h). Values equal
``gguf.quants.dequantize`` bit for bit (tests/cpu/weights/test_formats.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from llvmlite import ir

from sparsekv_cli.cpu.jit import features, llvm
from sparsekv_cli.cpu.jit.value import (
    F16,
    F32,
    I1,
    I8,
    I16,
    LANES,
    VF,
    VI,
    Value,
    call_named,
    const,
    load,
    select,
    vec,
)
from sparsekv_cli.cpu.weights.types import GGMLType

# Element values of the non-linear 4-bit formats (ggml-common.h: kvalues_iq4nl, kvalues_mxfp4).
IQ4_NL_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
MXFP4_VALUES = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)


class Block(NamedTuple):
    """One decoded block; all members but ``signed`` are IR values."""

    q: list[Value]  # <16 x i8> or <64 x i8> each, in order of the elements
    signed: bool  # whether q is signed
    scales: Value  # <k x float>, each for 1/k of the elements
    offsets: Value | None = None  # <k x float>; None: 0

    def sixteens(self) -> list[Value]:
        """Returns the integers as <16 x i8> each."""
        if self.q[0].type.count == LANES:
            return self.q
        starts = range(0, self.q[0].type.count, LANES)
        return [q.shuffle(range(at, at + LANES)) for q in self.q for at in starts]

    def floats(self) -> Iterator[Value]:
        """Yields elements, <16 x float>. q * scale is exact in f32, so an offset rounds once."""
        parts = self.sixteens()
        a_scale = len(parts) // self.scales.type.count
        for i, q in enumerate(parts):
            values = q.to(VF) if self.signed else q.unsigned_to(VF)
            lanes = [i // a_scale] * LANES
            scale = self.scales.shuffle(lanes)
            if self.offsets is None:
                yield values * scale
            else:
                yield values.fma(scale, self.offsets.shuffle(lanes))


Decode = Callable[[Value], Block]


@dataclass(frozen=True)
class BlockFormat:
    """One weight format: everything that the CPU's kernels know about it.

    type: ggml's type, with number and sizes. decode: None for plain floats. decode_four: decodes
    four blocks at once with whole 64-byte vectors, if this is faster. It reads nothing after them.
    largest, zero: for a block's integers q, q + zero is 0 to ``largest``. interleaves: whether
    interleaved rows (weights/interleaved.py) make decode faster. word_order: for each word of four
    bytes of an interleaved block, its number in the file's block without the scales. If it is
    empty, the order is the same.
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

    def floats(self, p: Value) -> Iterator[Value]:
        """Yields the block at address p as <16 x float> vectors, in order."""
        if self.decode is not None:
            yield from self.decode(p).floats()
        elif self.type is GGMLType.F32:
            yield load(VF, p)
        elif self.type is GGMLType.F16:
            yield llvm.load_half_lanes(p)
        else:
            yield (load(vec(I16), p).unsigned_to(VI) << 16).bitcast(VF)


def nibbles(bytes_: Value) -> tuple[Value, Value]:
    """Returns the low and the high four bits of <16 x i8>."""
    return bytes_ & 15, bytes_ >> 4


def bits_of_i16(mask: Value, value: int) -> Value:
    """Returns <16 x i8> with ``value`` in the lanes whose bit is set in the i16 ``mask``."""
    return select(mask.bitcast(vec(I1)), const(I8, value), const(I8, 0))


def lookup16(table: tuple[int, ...], idx: Value) -> Value:
    """Returns table[idx] for i8 indices 0..15, by the CPU's byte shuffle if it has one."""
    n = idx.type.count
    if n > LANES:
        if n == 64 and llvm.has_feature("avx512bw"):
            wide = ir.Constant(vec(I8, n), [value & 255 for value in table] * (n // LANES))
            return call_named("llvm.x86.avx512.pshuf.b.512", idx.type, wide, idx)
        halves = (idx.shuffle(lanes) for lanes in (range(n // 2), range(n // 2, n)))
        low, high = (lookup16(table, half) for half in halves)
        return low.shuffle(range(n), high)
    table_vec = ir.Constant(vec(I8), [value & 255 for value in table])
    names = {"x86_64": "llvm.x86.ssse3.pshuf.b.128", "aarch64": "llvm.aarch64.neon.tbl1.v16i8"}
    name = names.get(features.architecture())
    if name is not None:
        return call_named(name, vec(I8), table_vec, idx)
    result = const(I8, table[0] & 255)
    for position in range(1, 16):
        hit = idx == position
        result = select(hit, table[position] & 255, result)
    return result


def halves(p: Value, at: int, count: int = 1) -> tuple[Value, ...]:
    """Returns ``count`` consecutive f16 scales as <1 x float> each."""
    floats = load(vec(F16, count), p, at).to(vec(F32, count))
    if count == 1:
        return (floats,)
    return tuple(floats.shuffle([i]) for i in range(count))


def times(d: Value, integers: Value) -> Value:
    """Returns <k x float> d * integers, for d <1 x float> and integers <k x float>."""
    return d.shuffle([0] * integers.type.count) * integers
