"""Causal attention of a prefilled chunk in bf16, for CPUs that multiply bf16 but have no AMX.

Flash attention on two small matrix products: a tile of ROWS query rows against panels of 64 keys,
an online softmax, and the tile's weights (rounded to bf16) against the values. The operand that a
tile shares is packed once a chunk into pairs, as the CPU's bf16 product (vdpbf16ps: two products a
lane, summed in f32) reads them. On two Zen 5 cores, 512 queries of 9 heads of 64 over 4096 keys
took torch's kernel 50 ms and this one 8 to 10. With AMX, torch's is the better one.
"""

from __future__ import annotations

import numpy as np
from llvmlite import binding, ir
from numba import njit, prange, types
from numba.extending import intrinsic

from sparsekv_cli.cpu import emit
from sparsekv_cli.cpu.emit import (
    F32,
    I16,
    I32,
    I64,
    LANES,
    VF,
    VI,
    const,
    load,
    next_task,
    splat,
    vec,
)
from sparsekv_cli.cpu.parallel import PRANGE_ONLY
from sparsekv_cli.cpu.tiles import NEGATIVE_INFINITY

ROWS = 6  # query rows of a product: with 4 vectors of columns, 24 sums in 32 registers
PANEL = 64  # keys packed together: 4 vectors
BLOCK = 4 * PANEL  # keys between two updates of the running softmax
TASK_ROWS = 16 * ROWS
DOT = "llvm.x86.avx512bf16.dpbf16ps.512"


def is_available() -> bool:
    """Whether this CPU is one for which this kernel is the faster one.

    LLVM's name for the product takes what it takes now since LLVM 16.
    """
    has = emit.has_feature("avx512bf16") and not emit.has_feature("amx-bf16")
    return has and binding.llvm_version_info >= (16, 0, 0)


class _BFloat(ir.Type):
    """LLVM's bfloat, which llvmlite does not know."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BFloat)

    def __hash__(self) -> int:
        return hash(_BFloat)


BF16 = _BFloat()


@intrinsic
def _multiply(typingctx, n_vectors, a, a_row, b, b_row, n_pairs, c, c_row, add):
    """c (ROWS, 16 n_vectors) f32 = a b, plus the old c where ``add``; addresses, rows in bytes.

    a: bf16 rows of n_pairs pairs. b: n_pairs rows of 16 n_vectors pairs, a pair (2i, 2i + 1) of the
    summed index in one 32-bit lane. n_vectors, add: literals.
    """
    if not isinstance(n_vectors, types.IntegerLiteral) or not isinstance(add, types.IntegerLiteral):
        return None

    def codegen(context, builder, signature, args):
        n, adding = signature.args[0].literal_value, signature.args[8].literal_value
        _, a, a_row, b, b_row, n_pairs, c, c_row, _ = args
        pairs = vec(BF16, 2 * LANES)
        a_rows = [builder.add(a, builder.mul(a_row, I64(i))) for i in range(ROWS)]
        c_rows = [builder.add(c, builder.mul(c_row, I64(i))) for i in range(ROWS)]

        def step(k, sums):
            at = builder.add(b, builder.mul(k, b_row))
            columns = [load(builder, pairs, at, 4 * LANES * j) for j in range(n)]
            new = []
            for i in range(ROWS):
                word = load(builder, I32, builder.add(a_rows[i], builder.mul(k, I64(4))))
                row = builder.bitcast(splat(builder, word), pairs)
                new += [
                    emit.call_named(builder, DOT, VF, sums[i * n + j], row, column)
                    for j, column in enumerate(columns)
                ]
            return new

        zero = const(F32, 0.0)
        start = [
            load(builder, VF, at, 4 * LANES * j) if adding else zero
            for at in c_rows
            for j in range(n)
        ]
        sums = emit.loop(builder, I64(0), n_pairs, 1, start, step)
        for i, at in enumerate(c_rows):
            for j in range(n):
                emit.store(builder, sums[i * n + j], at, 4 * LANES * j)
        return context.get_dummy_value()

    i64 = types.int64
    return types.void(n_vectors, i64, i64, i64, i64, i64, i64, i64, add), codegen


LOG2_E = np.float32(1.4426950408889634)
# 2^r on [-1/2, 1/2], relative error 7e-6: coefficients of a Chebyshev fit
EXP2 = (1.00000005, 0.693127263, 0.240222117, 0.0558755351, 0.00967076788)


def larger(b: ir.IRBuilder, x: ir.Value, y: ir.Value) -> ir.Value:
    """The larger of two numbers, or y if one is NaN: one instruction, where maxnum takes more."""
    return b.select(b.fcmp_ordered(">", x, y), x, y)


@intrinsic
def _panel_max(typingctx, scores, count):
    """The largest of scores[0 .. count) (f32); count a multiple of PANEL."""

    def codegen(context, builder, signature, args):
        scores, count = args

        def body(j, best):
            at = builder.add(scores, builder.mul(j, I64(4)))
            return [
                larger(builder, load(builder, VF, at, 4 * LANES * i), value)
                for i, value in enumerate(best)
            ]

        start = [const(F32, -np.inf)] * (PANEL // LANES)
        best = emit.loop(builder, I64(0), count, PANEL, start, body)
        while len(best) > 1:
            best = [larger(builder, x, y) for x, y in zip(best[::2], best[1::2], strict=True)]
        return emit.max_lanes(builder, best[0])

    return types.float32(types.int64, types.int64), codegen


def _exp2_lanes(b: ir.IRBuilder, x: ir.Value) -> ir.Value:
    """2^x for x <= 0; 2^-126 below -126, NaN of NaN."""
    low = const(F32, -126.0)
    is_number = b.fcmp_ordered("ord", x, x)
    x = b.select(b.fcmp_ordered("<", x, low), low, x)
    n = emit.call_named(b, "llvm.rint.v16f32", VF, x)
    r = b.fsub(x, n)
    power = const(F32, EXP2[-1])
    for c in EXP2[-2::-1]:
        power = emit.fma(b, power, r, const(F32, c))
    exponent = b.shl(b.fptosi(n, VI), const(I32, 23))
    result = b.bitcast(b.add(b.bitcast(power, VI), exponent), VF)
    return b.select(is_number, result, const(F32, np.nan))


@intrinsic
def _exp2_to_bf16(typingctx, scores, count, scale, peak, out):
    """out[j] = bf16 of 2^(scale scores[j] - peak), j < count, a multiple of PANEL; the f32 sum."""

    def codegen(context, builder, signature, args):
        scores, count, scale, peak, out = args
        scales, peaks = splat(builder, scale), splat(builder, builder.fneg(peak))

        def body(j, sums):
            at = builder.add(scores, builder.mul(j, I64(4)))
            to = builder.add(out, builder.mul(j, I64(2)))
            new = []
            for i, total in enumerate(sums):
                x = load(builder, VF, at, 4 * LANES * i)
                weight = _exp2_lanes(builder, emit.fma(builder, x, scales, peaks))
                bits = builder.bitcast(builder.fptrunc(weight, vec(BF16)), vec(I16))
                emit.store(builder, bits, to, 2 * LANES * i)
                new.append(builder.fadd(total, weight))
            return new

        start = [const(F32, 0.0)] * (PANEL // LANES)
        sums = emit.loop(builder, I64(0), count, PANEL, start, body)
        total = builder.fadd(builder.fadd(sums[0], sums[1]), builder.fadd(sums[2], sums[3]))
        return emit.sum_lanes(builder, total)

    i64, f32 = types.int64, types.float32
    return f32(i64, i64, f32, f32, i64), codegen


@intrinsic
def _times_to_bf16(typingctx, values, count, factor, out):
    """out[j] = bf16 of factor values[j], j < count rounded up to 16; addresses."""

    def codegen(context, builder, signature, args):
        values, count, factor, out = args
        factors = splat(builder, factor)

        def body(j, carried):
            value = load(builder, VF, builder.add(values, builder.mul(j, I64(4))))
            narrow = builder.fptrunc(builder.fmul(value, factors), vec(BF16))
            at = builder.add(out, builder.mul(j, I64(2)))
            emit.store(builder, builder.bitcast(narrow, vec(I16)), at)
            return []

        emit.loop(builder, I64(0), count, LANES, [], body)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.float32, types.int64), codegen


@njit(cache=True, nogil=True)
def _pack(k, v, first, last, keys, values):
    """Keys and values first..last of one kv head, as ``attend_causal`` packs them."""
    half = k.shape[1]
    for j in range(first, last):
        for c in range(half):
            keys[j // PANEL, c, j % PANEL] = k[j, c]
        row, shift = values[j // 2], np.uint32(16 * (j % 2))
        for c in range(v.shape[1]):
            if shift:
                row[c] |= np.uint32(v[j, c]) << shift
            else:
                row[c] = np.uint32(v[j, c])


@njit(cache=True, nogil=True)
def _attend_rows(q, count, keys, values, position, scale, scores, weights, acc, peak, mass):
    """One task: the first ``count`` rows of q bf16 (TASK_ROWS, d), at ``position`` and after it.

    acc f32 (TASK_ROWS, d_v), mass f32 (TASK_ROWS,): the sums of values and of weights at the end.
    """
    d_v = values.shape[1]
    acc[:] = 0
    mass[:] = 0
    peak[:] = NEGATIVE_INFINITY
    row_bytes, weight_bytes, acc_bytes = 4 * BLOCK, 2 * BLOCK, 4 * d_v
    end = position + count
    for start in range(0, end, BLOCK):
        n_panels = (min(BLOCK, end - start) + PANEL - 1) // PANEL
        size = n_panels * PANEL
        for panel in range(n_panels):
            b = keys[start // PANEL + panel].ctypes.data
            for i in range(0, count, ROWS):
                _multiply(
                    4, q[i].ctypes.data, 2 * q.shape[1], b, 4 * PANEL, q.shape[1] // 2,
                    scores[i, panel * PANEL :].ctypes.data, row_bytes, 0,
                )  # fmt: skip
        for i in range(count):
            allowed = position + i + 1 - start  # keys of this block that row i may see
            for j in range(max(0, allowed), size):
                scores[i, j] = NEGATIVE_INFINITY
            at = scores[i].ctypes.data
            top = max(peak[i], scale * _panel_max(at, size))
            old = np.float32(np.exp2(peak[i] - top))
            mass[i] = mass[i] * old + _exp2_to_bf16(at, size, scale, top, weights[i].ctypes.data)
            peak[i] = top
            if old != 1:
                for c in range(d_v):
                    acc[i, c] *= old
        for i in range(0, count, ROWS):
            for c in range(0, d_v // 64 * 64, 64):
                _multiply(
                    4, weights[i].ctypes.data, weight_bytes, values[start // 2, c:].ctypes.data,
                    acc_bytes, size // 2, acc[i, c:].ctypes.data, acc_bytes, 1,
                )  # fmt: skip
            for c in range(d_v // 64 * 64, d_v, LANES):
                _multiply(
                    1, weights[i].ctypes.data, weight_bytes, values[start // 2, c:].ctypes.data,
                    acc_bytes, size // 2, acc[i, c:].ctypes.data, acc_bytes, 1,
                )  # fmt: skip


@njit(cache=True, nogil=True)
def _attend_tasks(counter, q, keys, values, n, scale, out):
    """Takes (query head, rows) tasks until there are none, the long ones first."""
    n_head, n_new, d = q.shape
    group = n_head // keys.shape[0]
    d_v = values.shape[2]
    rows = np.zeros((TASK_ROWS, d), np.uint16)
    scores = np.empty((TASK_ROWS, BLOCK), np.float32)
    weights = np.zeros((TASK_ROWS, BLOCK), np.uint16)
    acc = np.empty((TASK_ROWS, d_v), np.float32)
    narrow = np.empty(d_v, np.uint16)
    peak, mass = np.empty(TASK_ROWS, np.float32), np.empty(TASK_ROWS, np.float32)
    n_blocks = (n_new + TASK_ROWS - 1) // TASK_ROWS
    task = next_task(counter)
    while task < n_head * n_blocks:
        h, block = task % n_head, n_blocks - 1 - task // n_head
        first = block * TASK_ROWS
        count = min(TASK_ROWS, n_new - first)
        for i in range(count):
            for c in range(d):
                rows[i, c] = q[h, first + i, c]
        kv_head = h // group
        _attend_rows(
            rows, count, keys[kv_head], values[kv_head], n - n_new + first, scale, scores, weights,
            acc, peak, mass,
        )  # fmt: skip
        for i in range(count):
            _times_to_bf16(acc[i].ctypes.data, d_v, np.float32(1) / mass[i], narrow.ctypes.data)
            for c in range(out.shape[2]):
                out[h, first + i, c] = narrow[c]
        task = next_task(counter)


@njit(cache=True, nogil=True, parallel=PRANGE_ONLY)
def attend_causal(q, k, v, scale, out, n_threads):
    """Attention of the last T of n rows, each over the rows up to its own; bf16 bits as uint16.

    q (H, T, d), d even; k uint32 (G, n, d / 2): pairs of bf16; v (G, n, d_v); out (H, T, d_v).
    """
    n_kv, n, half = k.shape
    d_v = (v.shape[2] + LANES - 1) // LANES * LANES
    n_panels = (n + PANEL - 1) // PANEL
    keys = np.empty((n_kv, n_panels, half, PANEL), np.uint32)
    values = np.empty((n_kv, n_panels * PANEL // 2, d_v), np.uint32)
    n_parts = 4 * n_threads
    for part in prange(n_kv * n_parts):
        g, piece = part // n_parts, part % n_parts
        first, last = piece * n_panels // n_parts, (piece + 1) * n_panels // n_parts
        if last == n_panels:
            keys[g, n_panels - 1, :, :] = 0
        values[g, first * PANEL // 2 : last * PANEL // 2] = 0
        _pack(k[g], v[g], first * PANEL, min(n, last * PANEL), keys[g], values[g])
    counter = np.zeros(1, np.int64)
    scale *= LOG2_E  # weights are powers of 2
    for _thread in prange(n_threads):
        _attend_tasks(counter, q, keys, values, n, scale, out)


def attend_causal_ref(q, k, v, scale):
    """f64 (H, T, d_v) of q (H, T, d), k (G, n, d), v (G, n, d_v), all of them floats."""
    group, n, n_new = q.shape[0] // k.shape[0], k.shape[1], q.shape[1]
    k, v = (np.repeat(x.astype(np.float64), group, axis=0) for x in (k, v))
    scores = scale * q.astype(np.float64) @ k.transpose(0, 2, 1)
    seen = np.arange(n) <= np.arange(n - n_new, n)[:, None]
    scores = np.where(seen, scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return weights @ v / weights.sum(-1, keepdims=True)
