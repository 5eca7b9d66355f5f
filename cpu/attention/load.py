"""Loads rows of K and V (attention/rows.py) in vector IR and widens them to f32."""

from __future__ import annotations

from llvmlite import ir

from sparsekv_cli.cpu.attention.rows import F16 as F16_ROWS
from sparsekv_cli.cpu.attention.rows import HIGH_BITS, KIND, NIBBLES, Q4_0, Q5_1, Q8_0, QUANT_BLOCK
from sparsekv_cli.cpu.jit import llvm
from sparsekv_cli.cpu.jit.emitter import emitter
from sparsekv_cli.cpu.jit.llvm import F16, F32, I8, I32, I64, LANES, const, load, splat, vec

VECTOR_LANES = LANES if llvm.has_feature("avx512f") else 8
VW = vec(F32, VECTOR_LANES)
VWI = vec(I32, VECTOR_LANES)
BITS = {F16_ROWS: 16, Q8_0: 8, Q5_1: 4, Q4_0: 4}  # bits of an element, without a fifth bit


class RowReader:
    """Writes the code that reads rows of d elements of one kind.

    mode: a kind, + GATHER. d: i64, a multiple of 16. Elements are read VECTOR_LANES at a time, from
    a multiple of VECTOR_LANES on. Call ``scale`` once for the elements of a block.
    """

    def __init__(self, b: ir.IRBuilder, mode: int, d: ir.Value) -> None:
        self.kind = mode & KIND
        self.bits = BITS[self.kind]
        self.has_scales = self.kind != F16_ROWS
        self._b, self._d = b, d

    def bytes_to(self, c: ir.Value) -> ir.Value:
        """Returns the bytes from the start of a row to element c, or to its quant."""
        return self._b.lshr(self._b.mul(c, I64(self.bits)), I64(3))

    def after_quants(self, row: ir.Value) -> ir.Value:
        """Returns the address after a row's quants, or elements."""
        b = self._b
        if self.bits != 4:
            return b.add(row, self.bytes_to(self._d))
        return b.add(row, b.mul(self._blocks(), I64(NIBBLES)))

    def _blocks(self) -> ir.Value:
        return self._b.udiv(self._b.add(self._d, I64(QUANT_BLOCK - 1)), I64(QUANT_BLOCK))

    def scale(self, row: ir.Value, c: ir.Value) -> list[ir.Value]:
        """Returns as vectors the scale, and in q5_1 the minimum, of the block of element c."""
        if not self.has_scales:
            return []
        b = self._b
        n, at = (2 if self.kind == Q5_1 else 1), self.after_quants(row)
        if self.kind == Q5_1:
            at = b.add(at, b.mul(self._blocks(), I64(HIGH_BITS)))
        at = b.add(at, b.mul(b.udiv(c, I64(QUANT_BLOCK)), I64(2 * n)))
        numbers = [b.fpext(load(b, F16, at, 2 * i), F32) for i in range(n)]
        return [splat(b, number, VECTOR_LANES) for number in numbers]

    def vector(self, row: ir.Value, c: ir.Value, scale: list[ir.Value]) -> ir.Value:
        """Returns elements c .. c + VECTOR_LANES of a row. row: address. scale: their block's."""
        b, at = self._b, self._b.add(row, self.bytes_to(c))
        if self.kind == F16_ROWS:
            return llvm.load_half_lanes(b, at, 0, VECTOR_LANES)
        if self.kind == Q8_0:
            quants = b.sext(load(b, vec(I8, VECTOR_LANES), at), VWI)
            return b.fmul(b.sitofp(quants, VW), scale[0])
        within = b.and_(c, I64(QUANT_BLOCK - 1))
        first = b.add(b.lshr(b.sub(c, within), I64(1)), b.and_(within, I64(NIBBLES - 1)))
        both = b.zext(load(b, vec(I8, VECTOR_LANES), b.add(row, first)), VWI)
        shift = b.trunc(b.lshr(b.and_(within, I64(NIBBLES)), I64(2)), I32)  # 0 or 4
        low = b.and_(b.lshr(both, splat(b, shift, VECTOR_LANES)), const(I32, 15, VECTOR_LANES))
        if self.kind != Q5_1:
            quants = b.sub(low, const(I32, 8, VECTOR_LANES))
            return b.fmul(b.sitofp(quants, VW), scale[0])
        bits = load(b, ir.IntType(VECTOR_LANES), self.after_quants(row), b.lshr(c, I64(3)))
        fifth = b.bitcast(bits, vec(ir.IntType(1), VECTOR_LANES))
        high = const(I32, 16, VECTOR_LANES)
        quants = b.select(fifth, b.or_(low, high), low)
        return llvm.fma(b, b.uitofp(quants, VW), *scale)


@emitter
def widen_halves(b, source, count, target):
    """target[i] = f32 of the f16 source[i], i < count rounded up to 16; addresses."""

    @llvm.every(b, count, LANES)
    def body(j):
        lanes = llvm.load_half_lanes(b, b.add(source, b.mul(j, I64(2))))
        llvm.store(b, lanes, b.add(target, b.mul(j, I64(4))))
