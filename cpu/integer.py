"""Integer dot products: activations rounded once a layer input to 16 bits a value, blocks of 32.

A block's 32 products of small weight integers and i16 activations are summed exactly in i32 (one
vpmaddwd on AVX2 and AVX-512, widening multiply-adds on NEON) and scaled once, where the f32 path
converts every weight. With 16 bits the rounding is about 2^-16 of a block's largest activation,
256 times finer than llama.cpp's 8 bits: logits stay within f32 noise of the f32 path.
"""

from __future__ import annotations

import numpy as np
from llvmlite import binding, ir
from numba import njit, types
from numba.extending import intrinsic

from sparsekv_cli.cpu import emit
from sparsekv_cli.cpu.blocks import FORMAT_OF_CODE, BlockFormat, Group
from sparsekv_cli.cpu.emit import F32, I16, I32, I64, LANES, VF, VI, const, load, splat, vec

BLOCK = 32
LARGEST = 32767.0
SMALLEST = 1e-30
ACCUMULATORS = 4


def quantized_bytes(n: int) -> int:
    """Bytes of ``quantize_activations``' output for n elements, a multiple of 32.

    Layout: i16 values (n,), f32 scales (n / 32,), f32 sums of scale * value (n / 16,).
    """
    return 2 * n + 4 * (n // BLOCK) + 4 * (n // LANES)


@intrinsic
def quantize_activations(typingctx, x, out, n):
    """x f32 (n,) -> i16 blocks at ``out`` (addresses; n a multiple of 32; see quantized_bytes)."""

    def codegen(context, b, signature, args):
        x, out, n = args
        scales = b.add(out, b.mul(n, I64(2)))
        sums = b.add(scales, b.sdiv(b.mul(n, I64(4)), I64(BLOCK)))

        def body(i, carried):
            halves = [load(b, VF, b.add(x, b.mul(i, I64(4))), 4 * LANES * h) for h in range(2)]
            sizes = [emit.call_named(b, "llvm.fabs.v16f32", VF, half) for half in halves]
            peak = emit.max_lanes(b, emit.call_named(b, "llvm.maxnum.v16f32", VF, *sizes))
            # Below, 1 / scale would overflow to infinity; such a block counts as zeros.
            is_zero = b.fcmp_ordered("<", peak, F32(SMALLEST))
            scale = b.fdiv(peak, F32(LARGEST))
            inverse = b.select(is_zero, F32(0.0), b.fdiv(F32(LARGEST), peak))
            emit.store(b, scale, b.add(scales, b.sdiv(b.mul(i, I64(4)), I64(BLOCK))))
            for h, half in enumerate(halves):
                scaled = b.fmul(half, splat(b, inverse))
                rounded = emit.call_named(b, "llvm.rint.v16f32", VF, scaled)
                q = b.fptosi(rounded, VI)
                emit.store(b, b.trunc(q, vec(I16)), b.add(out, b.mul(i, I64(2))), 2 * LANES * h)
                total = b.fmul(emit.sum_lanes(b, rounded), scale)
                at = b.add(sums, b.sdiv(b.mul(i, I64(4)), I64(LANES)))
                emit.store(b, total, at, 4 * h)
            return []

        emit.loop(b, I64(0), n, BLOCK, [], body)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), codegen


def _has(feature: str) -> bool:
    return binding.get_host_cpu_features().get(feature, False)


def _pair_products(b: ir.IRBuilder, w: ir.Value, x: ir.Value) -> ir.Value:
    """<32 x i16> w, x -> <16 x i32> of w[2i] x[2i] + w[2i+1] x[2i+1]."""
    if _has("avx512bw"):
        return emit.call_named(b, "llvm.x86.avx512.pmaddw.d.512", VI, w, x)
    if _has("avx2"):
        parts = []
        for h in range(2):
            lanes = range(LANES * h, LANES * (h + 1))
            a, c = emit.shuffle(b, w, w, lanes), emit.shuffle(b, x, x, lanes)
            parts.append(emit.call_named(b, "llvm.x86.avx2.pmadd.wd", vec(I32, 8), a, c))
        return emit.shuffle(b, parts[0], parts[1], range(LANES))
    wide = vec(I32, BLOCK)
    products = b.mul(b.sext(w, wide), b.sext(x, wide))
    even = emit.shuffle(b, products, products, range(0, BLOCK, 2))
    odd = emit.shuffle(b, products, products, range(1, BLOCK, 2))
    return b.add(even, odd)


def _emit_block(
    b: ir.IRBuilder,
    groups: tuple[Group, Group],
    at: int,
    x: ir.Value,
    scales: ir.Value,
    sums: ir.Value,
    total: ir.Value,
    offsets: ir.Value,
) -> tuple[ir.Value, ir.Value]:
    """Adds 32 elements: total <16 x float>, offsets float. ``at``: their block within this one."""
    first, second = groups
    q = emit.shuffle(b, first.q, second.q, range(BLOCK))
    w = b.sext(q, vec(I16, BLOCK)) if first.signed else b.zext(q, vec(I16, BLOCK))
    products = b.sitofp(_pair_products(b, w, load(b, vec(I16, BLOCK), x, 2 * BLOCK * at)), VF)
    x_scale = load(b, F32, scales, 4 * at)
    if first.scale is second.scale:
        scale = splat(b, b.fmul(first.scale, x_scale))
    else:
        low, high = (splat(b, b.fmul(g.scale, x_scale)) for g in groups)
        scale = emit.shuffle(b, low, high, [*range(8), *range(24, 32)])
    total = emit.fma(b, products, scale, total)
    if first.offset is not None:
        parts = [load(b, F32, sums, 4 * (2 * at + h)) for h in range(2)]
        if first.offset is second.offset:
            offsets = emit.fma(b, first.offset, b.fadd(*parts), offsets)
        else:
            for group, part in zip(groups, parts, strict=True):
                offsets = emit.fma(b, group.offset, part, offsets)
    return total, offsets


def _emit_row(
    b: ir.IRBuilder, format_: BlockFormat, w: ir.Value, x: ir.Value, n: ir.Value
) -> ir.Value:
    decode = format_.decode
    assert decode is not None
    n_blocks = b.sdiv(n, I64(format_.n_elements))
    scales = b.add(x, b.mul(n, I64(2)))
    sums = b.add(scales, b.mul(b.sdiv(n, I64(BLOCK)), I64(4)))
    a_block = format_.n_elements // BLOCK
    unroll = max(1, ACCUMULATORS // a_block)

    def blocks(start: ir.Value, count: int, carried: list[ir.Value]) -> list[ir.Value]:
        totals, offsets = carried[:ACCUMULATORS], carried[ACCUMULATORS:]
        turn = 0
        for u in range(count):
            block = b.add(start, I64(u))
            p = b.add(w, b.mul(block, I64(format_.n_bytes)))
            small = b.mul(block, I64(a_block))
            values = b.add(x, b.mul(small, I64(2 * BLOCK)))
            scale_at = b.add(scales, b.mul(small, I64(4)))
            sum_at = b.add(sums, b.mul(small, I64(8)))
            groups = decode(b, p)
            for at in range(a_block):
                pair = (next(groups), next(groups))
                i = turn % ACCUMULATORS
                totals[i], offsets[i] = _emit_block(
                    b, pair, at, values, scale_at, sum_at, totals[i], offsets[i]
                )
                turn += 1
        return [*totals, *offsets]

    start = [const(F32, 0.0)] * ACCUMULATORS + [F32(0.0)] * ACCUMULATORS
    whole = b.sub(n_blocks, b.srem(n_blocks, I64(unroll)))
    carried = emit.loop(b, I64(0), whole, unroll, start, lambda i, c: blocks(i, unroll, c))
    carried = emit.loop(b, whole, n_blocks, 1, carried, lambda i, c: blocks(i, 1, c))
    totals, offsets = carried[:ACCUMULATORS], carried[ACCUMULATORS:]
    vector = b.fadd(b.fadd(totals[0], totals[1]), b.fadd(totals[2], totals[3]))
    scalar = b.fadd(b.fadd(offsets[0], offsets[1]), b.fadd(offsets[2], offsets[3]))
    return b.fadd(emit.sum_lanes(b, vector), scalar)


@intrinsic
def _row_dot_integer(typingctx, code, w, x, n):
    if not isinstance(code, types.IntegerLiteral):
        return None

    def codegen(context, builder, signature, args):
        format_ = FORMAT_OF_CODE[signature.args[0].literal_value]
        return _emit_row(builder, format_, args[1], args[2], args[3])

    return types.float32(code, types.int64, types.int64, types.int64), codegen


@njit(cache=True, nogil=True)
def rows_dot_integer(code, w, row_bytes, n_columns, x, out, first, last):
    """``matvec.rows_dot`` with x an address of quantised activations."""
    for row in range(first, last):
        total = _row_dot_integer(code, w + row * row_bytes, x, n_columns)
        emit.store_f32(out + 4 * row, total)


@njit(cache=True, nogil=True)
def _quantize(x, out):
    quantize_activations(x.ctypes.data, out.ctypes.data, x.shape[0])


def quantize(x: np.ndarray) -> np.ndarray:
    """x f32 (n,), n a multiple of 32 -> the block form, uint8 (quantized_bytes(n),)."""
    out = np.empty(quantized_bytes(len(x)), np.uint8)
    _quantize(x, out)
    return out


def quantize_ref(x: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """numpy reference: values i16 (n,), scales f32 (n / 32,), sums f32 (n / 16,)."""
    blocks = x.reshape(-1, BLOCK)
    peak = np.abs(blocks).max(1)
    scale = peak / np.float32(LARGEST)
    inverse = np.divide(np.float32(LARGEST), peak, out=np.zeros_like(peak), where=peak >= SMALLEST)
    rounded = np.rint(blocks * inverse[:, None])
    sums = rounded.reshape(-1, LANES).sum(1) * np.repeat(scale, 2)
    return rounded.astype(np.int16).reshape(-1), scale, sums.astype(np.float32)
