"""Loads rows of K and V (attention/rows.py) in vector IR and widens them to f32."""

from __future__ import annotations

from llvmlite import ir

from sparsekv_cli.cpu.attention.rows import F16 as F16_ROWS
from sparsekv_cli.cpu.attention.rows import HIGH_BITS, KIND, NIBBLES, Q4_0, Q5_1, Q8_0, QUANT_BLOCK
from sparsekv_cli.cpu.jit import llvm
from sparsekv_cli.cpu.jit.emitter import emitter
from sparsekv_cli.cpu.jit.value import F16, F32, I1, I8, I32, LANES, Value, load, select, store, vec

VECTOR_LANES = LANES if llvm.has_feature("avx512f") else 8
VW = vec(F32, VECTOR_LANES)
VWI = vec(I32, VECTOR_LANES)
BITS = {F16_ROWS: 16, Q8_0: 8, Q5_1: 4, Q4_0: 4}  # bits of an element, without a fifth bit


class RowReader:
    """Writes the code that reads rows of d elements of one kind.

    mode: a kind, + GATHER. d: i64, a multiple of 16. Elements are read VECTOR_LANES at a time, from
    a multiple of VECTOR_LANES on. Call ``scale`` once for the elements of a block.
    """

    def __init__(self, mode: int, d: Value) -> None:
        self.kind = mode & KIND
        self.bits = BITS[self.kind]
        self.has_scales = self.kind != F16_ROWS
        self._d = d

    def bytes_to(self, c: Value) -> Value:
        """Returns the bytes from the start of a row to element c, or to its quant."""
        return c * self.bits >> 3

    def after_quants(self, row: Value) -> Value:
        """Returns the address after a row's quants, or elements."""
        if self.bits != 4:
            return row + self.bytes_to(self._d)
        return row + self._blocks() * NIBBLES

    def _blocks(self) -> Value:
        return (self._d + (QUANT_BLOCK - 1)).unsigned_div(QUANT_BLOCK)

    def scale(self, row: Value, c: Value) -> list[Value]:
        """Returns as vectors the scale, and in q5_1 the minimum, of the block of element c."""
        if not self.has_scales:
            return []
        n, at = (2 if self.kind == Q5_1 else 1), self.after_quants(row)
        if self.kind == Q5_1:
            at = at + self._blocks() * HIGH_BITS
        at = at + c.unsigned_div(QUANT_BLOCK) * (2 * n)
        numbers = [load(F16, at, 2 * i).to(F32) for i in range(n)]
        return [number.splat(VECTOR_LANES) for number in numbers]

    def vector(self, row: Value, c: Value, scale: list[Value]) -> Value:
        """Returns elements c .. c + VECTOR_LANES of a row. row: address. scale: their block's."""
        at = row + self.bytes_to(c)
        if self.kind == F16_ROWS:
            return llvm.load_half_lanes(at, 0, VECTOR_LANES)
        if self.kind == Q8_0:
            return load(vec(I8, VECTOR_LANES), at).to(VWI).to(VW) * scale[0]
        within = c & (QUANT_BLOCK - 1)
        first = ((c - within) >> 1) + (within & (NIBBLES - 1))
        both = load(vec(I8, VECTOR_LANES), row + first).unsigned_to(VWI)
        shift = ((within & NIBBLES) >> 2).to(I32)  # 0 or 4
        low = both >> shift.splat(VECTOR_LANES) & 15
        if self.kind != Q5_1:
            return (low - 8).to(VW) * scale[0]
        bits = load(ir.IntType(VECTOR_LANES), self.after_quants(row), c >> 3)
        quants = select(bits.bitcast(vec(I1, VECTOR_LANES)), low | 16, low)
        return quants.unsigned_to(VW).fma(*scale)


@emitter
def widen_halves(source, count, target):
    """target[i] = f32 of the f16 source[i], i < count rounded up to 16; addresses."""

    @llvm.every(count, LANES)
    def body(j):
        store(llvm.load_half_lanes(source + j * 2), target + j * 4)
