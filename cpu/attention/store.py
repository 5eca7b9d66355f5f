"""Storing of rows of K and V (attention/rows.py) in vector IR: f32 to f16 or q8_0."""

from __future__ import annotations

from numba import njit, types
from numba.extending import intrinsic

from sparsekv_cli.cpu.attention.rows import Q8_0, QUANT_BLOCK
from sparsekv_cli.cpu.jit import llvm
from sparsekv_cli.cpu.jit.llvm import F16, F32, I8, I64, LANES, VF, VI, const, load, splat, vec


@intrinsic
def store_halves(typingctx, source, target, count):
    """target[i] = f16(source[i]), i < count (a multiple of 16); f32 source, addresses."""

    def codegen(context, b, signature, args):
        source, target, count = args

        def body(j, carried):
            value = load(b, VF, b.add(source, b.mul(j, I64(4))))
            llvm.store(b, b.fptrunc(value, vec(F16)), b.add(target, b.mul(j, I64(2))))
            return []

        llvm.loop(b, I64(0), count, LANES, [], body)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), codegen


@intrinsic
def store_quantized(typingctx, source, target, count):
    """target = q8_0 of f32 source, count elements (a multiple of 16); see quantize_rows_ref."""

    def codegen(context, b, signature, args):
        source, target, count = args

        def block(n_vectors):
            """Quantises 16 n_vectors elements from c on, which share a scale."""

            def body(c, carried):
                at = b.add(source, b.mul(c, I64(4)))
                x = [load(b, VF, at, 4 * LANES * i) for i in range(n_vectors)]
                peak = const(F32, 0.0)
                for each in x:
                    size = llvm.call_named(b, "llvm.fabs.v16f32", VF, each)
                    peak = llvm.call_named(b, "llvm.maxnum.v16f32", VF, peak, size)
                scale = b.fdiv(llvm.max_lanes(b, peak), F32(127.0))
                for each in x:  # maxnum drops what is no number; a sum keeps it
                    zeros = b.fmul(each, const(F32, 0.0))
                    scale = b.fadd(scale, llvm.sum_lanes(b, zeros))
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
                return []

            return body

        whole = b.sub(count, b.urem(count, I64(QUANT_BLOCK)))
        llvm.loop(b, I64(0), whole, QUANT_BLOCK, [], block(QUANT_BLOCK // LANES))
        llvm.loop(b, whole, count, LANES, [], block(1))
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), codegen


@njit(cache=True, nogil=True)
def store_row(kind, source, target, count):
    """Stores f32 at an address as a row of ``kind``; count elements, a multiple of 16."""
    if kind == Q8_0:
        store_quantized(source, target, count)
    else:
        store_halves(source, target, count)
