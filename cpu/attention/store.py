"""Stores f32 as rows of K and V (attention/rows.py), in vector IR."""

from __future__ import annotations

from sparsekv_cli.cpu.attention.rows import F16 as F16_ROWS
from sparsekv_cli.cpu.attention.rows import (
    HIGH_BITS,
    NIBBLES,
    Q4_0,
    Q5_1,
    Q8_0,
    QUANT_BLOCK,
)
from sparsekv_cli.cpu.jit import llvm
from sparsekv_cli.cpu.jit.emitter import LITERAL, emitter
from sparsekv_cli.cpu.jit.kernel import njit
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
    splat,
    vec,
)


@emitter
def store_halves(b, source, target, count):
    """target[i] = f16(source[i]), i < count (a multiple of 16); f32 source, addresses."""

    @llvm.every(b, count, LANES)
    def body(j):
        value = load(b, VF, b.add(source, b.mul(j, I64(4))))
        llvm.store(b, b.fptrunc(value, vec(F16)), b.add(target, b.mul(j, I64(2))))


@emitter
def store_quantized(b, source, target, count):
    """target = q8_0 of f32 source, count elements (a multiple of 16); see quantize_rows_ref."""

    def block(c, n_vectors):
        """Quantises 16 n_vectors elements from c on, which share a scale."""
        at = b.add(source, b.mul(c, I64(4)))
        x = [load(b, VF, at, 4 * LANES * i) for i in range(n_vectors)]
        peak = const(F32, 0.0)
        for each in x:
            size = llvm.call_named(b, "llvm.fabs.v16f32", VF, each)
            peak = llvm.call_named(b, "llvm.maxnum.v16f32", VF, peak, size)
        scale = _unless_nan(b, b.fdiv(llvm.max_lanes(b, peak), F32(127.0)), x)
        half = b.fptrunc(scale, F16)
        empty = b.fcmp_ordered("==", half, F16(0.0))
        inverse = b.select(empty, F32(0.0), b.fdiv(F32(1.0), scale))
        for i, each in enumerate(x):
            nearest = b.fmul(each, splat(b, inverse))
            nearest = llvm.call_named(b, "llvm.rint.v16f32", VF, nearest)
            quants = b.trunc(b.fptosi(nearest, VI), vec(I8))
            llvm.store(b, quants, b.add(target, c), LANES * i)
        scales = b.add(b.add(target, count), b.mul(b.udiv(c, I64(QUANT_BLOCK)), I64(2)))
        llvm.store(b, half, scales)

    whole = b.sub(count, b.urem(count, I64(QUANT_BLOCK)))
    llvm.loop(b, I64(0), whole, QUANT_BLOCK, [], lambda c, _: block(c, QUANT_BLOCK // LANES))
    llvm.loop(b, whole, count, LANES, [], lambda c, _: block(c, 1))


def _unless_nan(b, scale, x):
    """Returns ``scale``, or NaN if a vector of ``x`` has NaN, which maxnum and minnum drop."""
    total = F32(0.0)
    for each in x:
        total = b.fadd(total, llvm.sum_lanes(b, b.fmul(each, const(F32, 0.0))))
    return b.select(b.fcmp_unordered("uno", total, total), total, scale)


def _extreme(b, name, x):
    """Returns the largest (maxnum) or the least (minnum) of all lanes of the vectors ``x``."""
    one = x[0] if len(x) == 1 else llvm.call_named(b, f"llvm.{name}.v16f32", VF, *x)
    if name == "maxnum":
        return llvm.max_lanes(b, one)
    return b.fneg(llvm.max_lanes(b, b.fneg(one)))


def _inverse(b, scale):
    """Returns 1 / scale, or 0 for 0."""
    empty = b.fcmp_ordered("==", scale, F32(0.0))
    return b.select(empty, F32(0.0), b.fdiv(F32(1.0), scale))


def _four_bits(b, x):
    """Returns the scale of a q4_0 block, vectors ``x``, and its quants <16 x i32>, 0 to 15."""
    low, high = _extreme(b, "minnum", x), _extreme(b, "maxnum", x)
    positive = b.fcmp_ordered(">=", high, b.fneg(low))
    scale = b.fdiv(b.select(positive, high, low), F32(-8.0))
    scale = _unless_nan(b, scale, x)
    inverse, quants = splat(b, _inverse(b, scale)), []
    for each in x:
        q = b.fadd(b.fmul(each, inverse), const(F32, 8.5))
        q = llvm.call_named(b, "llvm.minnum.v16f32", VF, q, const(F32, 15.0))
        quants.append(b.fptosi(q, VI))
    return [scale], quants


def _five_bits(b, x):
    """Returns scale, minimum and quants <16 x i32>, 0 to 31, of a q5_1 block, vectors ``x``."""
    low, high = _extreme(b, "minnum", x), _extreme(b, "maxnum", x)
    scale = _unless_nan(b, b.fdiv(b.fsub(high, low), F32(31.0)), x)
    inverse, lows, quants = splat(b, _inverse(b, scale)), splat(b, low), []
    for each in x:
        q = b.fadd(b.fmul(b.fsub(each, lows), inverse), const(F32, 0.5))
        quants.append(b.fptosi(q, VI))
    return [scale, low], quants


@emitter(kind=LITERAL)
def store_nibbles(b, kind, source, target, count):
    """target = q5_1 or q4_0 of f32 source, count elements (a multiple of 16).

    kind: a literal. See quantize_rows_ref.
    """
    is_q5 = kind == Q5_1
    n_blocks = b.udiv(b.add(count, I64(QUANT_BLOCK - 1)), I64(QUANT_BLOCK))
    after_quants = b.add(target, b.mul(n_blocks, I64(NIBBLES)))
    small = b.add(after_quants, b.mul(n_blocks, I64(HIGH_BITS))) if is_q5 else after_quants

    def block(c, n_vectors):
        """Quantises 16 n_vectors elements from c on, which share a scale."""
        at = b.add(source, b.mul(c, I64(4)))
        x = [load(b, VF, at, 4 * LANES * i) for i in range(n_vectors)]
        numbers, quants = (_five_bits if is_q5 else _four_bits)(b, x)
        quants += [const(I32, 0)] * (2 - n_vectors)
        low, high = (b.and_(q, const(I32, 15)) for q in quants)
        both = b.trunc(b.or_(low, b.shl(high, const(I32, 4))), vec(I8))
        i = b.udiv(c, I64(QUANT_BLOCK))
        llvm.store(b, both, b.add(target, b.mul(i, I64(NIBBLES))))
        for j, q in enumerate(quants if is_q5 else ()):
            fifth = b.icmp_signed(">", q, const(I32, 15))
            to = b.add(after_quants, b.mul(i, I64(HIGH_BITS)))
            llvm.store(b, b.bitcast(fifth, I16), to, 2 * j)
        to = b.add(small, b.mul(i, I64(2 * len(numbers))))
        for j, number in enumerate(numbers):
            llvm.store(b, b.fptrunc(number, F16), to, 2 * j)

    whole = b.sub(count, b.urem(count, I64(QUANT_BLOCK)))
    llvm.loop(b, I64(0), whole, QUANT_BLOCK, [], lambda c, _: block(c, QUANT_BLOCK // LANES))
    llvm.loop(b, whole, count, LANES, [], lambda c, _: block(c, 1))


@njit(cache=True, nogil=True)
def store_row(kind, source, target, count):
    """Stores f32 at an address as a row of ``kind``; count elements, a multiple of 16."""
    if kind == F16_ROWS:
        store_halves(source, target, count)
    elif kind == Q8_0:
        store_quantized(source, target, count)
    elif kind == Q5_1:
        store_nibbles(Q5_1, source, target, count)
    else:
        store_nibbles(Q4_0, source, target, count)
