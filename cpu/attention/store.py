"""Stores f32 as rows of K and V (attention/rows.py), in vector IR."""

from __future__ import annotations

from sparsekv_cli.cpu.attention.rows import F16 as F16_ROWS
from sparsekv_cli.cpu.attention.rows import HIGH_BITS, NIBBLES, Q4_0, Q5_1, Q8_0, QUANT_BLOCK
from sparsekv_cli.cpu.jit import llvm
from sparsekv_cli.cpu.jit.emitter import LITERAL, emitter
from sparsekv_cli.cpu.jit.kernel import njit
from sparsekv_cli.cpu.jit.value import (
    F16,
    F32,
    I8,
    I16,
    I32,
    LANES,
    VF,
    VI,
    call_named,
    const,
    load,
    select,
    store,
    vec,
)


@emitter
def store_halves(source, target, count):
    """target[i] = f16(source[i]), i < count (a multiple of 16); f32 source, addresses."""

    @llvm.every(count, LANES)
    def body(j):
        store(load(VF, source + j * 4).to(vec(F16)), target + j * 2)


@emitter
def store_quantized(source, target, count):
    """target = q8_0 of f32 source, count elements (a multiple of 16); see quantize_rows_ref."""

    def block(c, n_vectors):
        """Quantises 16 n_vectors elements from c on, which share a scale."""
        at = source + c * 4
        x = [load(VF, at, 4 * LANES * i) for i in range(n_vectors)]
        peak = const(F32, 0.0)
        for each in x:
            size = each.call("fabs")
            peak = peak.maxnum(size)
        scale = _unless_nan(llvm.max_lanes(peak) / 127.0, x)
        half = scale.to(F16)
        empty = half == 0.0
        inverse = select(empty, 0.0, 1.0 / scale)
        for i, each in enumerate(x):
            nearest = each * inverse.splat()
            nearest = nearest.call("rint")
            quants = nearest.to(VI).to(vec(I8))
            store(quants, target + c, LANES * i)
        scales = target + count + c.unsigned_div(QUANT_BLOCK) * 2
        store(half, scales)

    whole = count - count.unsigned_mod(QUANT_BLOCK)
    llvm.loop(0, whole, QUANT_BLOCK, [], lambda c, _: block(c, QUANT_BLOCK // LANES))
    llvm.loop(whole, count, LANES, [], lambda c, _: block(c, 1))


def _unless_nan(scale, x):
    """Returns ``scale``, or NaN if a vector of ``x`` has NaN, which maxnum and minnum drop."""
    total = F32(0.0)
    for each in x:
        total = total + llvm.sum_lanes(each * 0.0)
    return select(total != total, total, scale)


def _extreme(name, x):
    """Returns the largest (maxnum) or the least (minnum) of all lanes of the vectors ``x``."""
    one = x[0] if len(x) == 1 else call_named(f"llvm.{name}.v16f32", VF, *x)
    if name == "maxnum":
        return llvm.max_lanes(one)
    return -llvm.max_lanes(-one)


def _inverse(scale):
    """Returns 1 / scale, or 0 for 0."""
    empty = scale == 0.0
    return select(empty, 0.0, 1.0 / scale)


def _four_bits(x):
    """Returns the scale of a q4_0 block, vectors ``x``, and its quants <16 x i32>, 0 to 15."""
    low, high = _extreme("minnum", x), _extreme("maxnum", x)
    positive = high >= -low
    scale = select(positive, high, low) / -8.0
    scale = _unless_nan(scale, x)
    inverse, quants = _inverse(scale).splat(), []
    for each in x:
        q = each * inverse + 8.5
        q = q.minnum(15.0)
        quants.append(q.to(VI))
    return [scale], quants


def _five_bits(x):
    """Returns scale, minimum and quants <16 x i32>, 0 to 31, of a q5_1 block, vectors ``x``."""
    low, high = _extreme("minnum", x), _extreme("maxnum", x)
    scale = _unless_nan((high - low) / 31.0, x)
    inverse, lows, quants = _inverse(scale).splat(), low.splat(), []
    for each in x:
        q = (each - lows) * inverse + 0.5
        quants.append(q.to(VI))
    return [scale, low], quants


@emitter(kind=LITERAL)
def store_nibbles(kind, source, target, count):
    """target = q5_1 or q4_0 of f32 source, count elements (a multiple of 16).

    kind: a literal. See quantize_rows_ref.
    """
    is_q5 = kind == Q5_1
    n_blocks = (count + (QUANT_BLOCK - 1)).unsigned_div(QUANT_BLOCK)
    after_quants = target + n_blocks * NIBBLES
    small = after_quants + n_blocks * HIGH_BITS if is_q5 else after_quants

    def block(c, n_vectors):
        """Quantises 16 n_vectors elements from c on, which share a scale."""
        at = source + c * 4
        x = [load(VF, at, 4 * LANES * i) for i in range(n_vectors)]
        numbers, quants = (_five_bits if is_q5 else _four_bits)(x)
        quants += [const(I32, 0)] * (2 - n_vectors)
        low, high = (q & 15 for q in quants)
        both = (low | high << 4).to(vec(I8))
        i = c.unsigned_div(QUANT_BLOCK)
        store(both, target + i * NIBBLES)
        for j, q in enumerate(quants if is_q5 else ()):
            fifth = q > 15
            to = after_quants + i * HIGH_BITS
            store(fifth.bitcast(I16), to, 2 * j)
        to = small + i * (2 * len(numbers))
        for j, number in enumerate(numbers):
            store(number.to(F16), to, 2 * j)

    whole = count - count.unsigned_mod(QUANT_BLOCK)
    llvm.loop(0, whole, QUANT_BLOCK, [], lambda c, _: block(c, QUANT_BLOCK // LANES))
    llvm.loop(whole, count, LANES, [], lambda c, _: block(c, 1))


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
