"""Plain loops of one instruction: the rate that a CPU's cores reach with no loads and no rest."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
from llvmlite import ir
from numba import njit, prange, types
from numba.extending import intrinsic

from sparsekv_cli.cpu.jit import bf16, llvm
from sparsekv_cli.cpu.jit.llvm import F32, I8, I16, I32, I64, LANES, VF, load, vec
from sparsekv_cli.cpu.jit.pointers import on_lines
from sparsekv_cli.cpu.jit.threads import PRANGE_ONLY
from sparsekv_cli.cpu.weights import vnni
from sparsekv_cli.cpu.weights.integer import byte_products

IS_WIDE = llvm.has_feature("avx512f")
LANES_OF = {True: LANES, False: 8}
SUMS = {True: 24, False: 12}  # independent sums, as many as the kernels keep in registers
N_STEPS = 1 << 20


def _looped(b: ir.IRBuilder, data: ir.Value, sums: list[ir.Value], step: Callable) -> None:
    """Runs N_STEPS steps of an instruction on each sum, and stores the sums to ``data``."""

    def body(i: ir.Value, now: list[ir.Value]) -> list[ir.Value]:
        return [step(i, j, total) for j, total in enumerate(now)]

    sums = llvm.loop(b, I64(0), I64(N_STEPS), 1, sums, body)
    for i, total in enumerate(sums):
        llvm.store(b, total, data, 64 * i)


@intrinsic
def _multiply_bf16(typingctx, data):
    """vdpbf16ps on vectors from address ``data``."""

    def codegen(context, b, signature, args):
        pairs = vec(bf16.BF16, 2 * LANES)
        x, y = load(b, pairs, args[0]), load(b, pairs, args[0], 64)
        sums = [load(b, VF, args[0], 64 * i) for i in range(SUMS[True])]
        _looped(b, args[0], sums, lambda i, j, s: llvm.call_named(b, bf16.DOT, VF, s, x, y))
        return context.get_dummy_value()

    return types.void(types.int64), codegen


@intrinsic
def _multiply_f32(typingctx, data):
    """The multiplication and addition of floats on vectors from address ``data``."""

    def codegen(context, b, signature, args):
        lanes = vec(F32, LANES_OF[IS_WIDE])
        x, y = load(b, lanes, args[0]), load(b, lanes, args[0], 64)
        sums = [load(b, lanes, args[0], 64 * i) for i in range(SUMS[IS_WIDE])]
        _looped(b, args[0], sums, lambda i, j, s: llvm.fma(b, x, y, s))
        return context.get_dummy_value()

    return types.void(types.int64), codegen


@intrinsic
def _multiply_bytes(typingctx, data):
    """vpdpbusd, or without it vpmaddubsw and an addition, on vectors from address ``data``."""

    def codegen(context, b, signature, args):
        wide = llvm.has_feature("avx512vnni")
        n = LANES_OF[wide]
        bytes_ = vec(I8, 4 * n)
        x, same = load(b, bytes_, args[0]), load(b, bytes_, args[0], 64)
        type_ = vec(I32, n) if vnni.is_available() else vec(I16, 2 * n)
        sums = [load(b, type_, args[0], 64 * i) for i in range(SUMS[wide])]

        def step(i, j, total):
            if vnni.is_available():
                return vnni.add_dots(b, total, x, same)
            # Loaded for each sum and step, so that no product leaves the loop.
            y = load(b, bytes_, args[0], b.add(b.and_(i, I64(960)), I64(64 * j)))
            return llvm.add_in_order(b, total, byte_products(b, x, y))

        _looped(b, args[0], sums, step)
        return context.get_dummy_value()

    return types.void(types.int64), codegen


@njit(cache=True, nogil=True, parallel=PRANGE_ONLY)
def _run_bf16(data):
    for thread in prange(len(data)):
        _multiply_bf16(data[thread].ctypes.data)


@njit(cache=True, nogil=True, parallel=PRANGE_ONLY)
def _run_f32(data):
    for thread in prange(len(data)):
        _multiply_f32(data[thread].ctypes.data)


@njit(cache=True, nogil=True, parallel=PRANGE_ONLY)
def _run_bytes(data):
    for thread in prange(len(data)):
        _multiply_bytes(data[thread].ctypes.data)


def _rate(run: Callable, n_operations: int, n_threads: int) -> float:
    """Operations a second of the best of five runs."""
    data = on_lines((n_threads, 1 << 12), np.uint8, zeros=True)
    run(data)
    seconds = []
    for _ in range(5):
        started = time.perf_counter()
        run(data)
        seconds.append(time.perf_counter() - started)
    return n_threads * N_STEPS * n_operations / min(seconds)


def rates(n_threads: int) -> dict[str, float]:
    """Operations a second of all threads: attention's instruction and that of byte products.

    A multiplication and an addition are two operations.
    """
    if bf16.is_available():
        attention = _rate(_run_bf16, SUMS[True] * 4 * LANES, n_threads)
    else:
        attention = _rate(_run_f32, SUMS[IS_WIDE] * 2 * LANES_OF[IS_WIDE], n_threads)
    wide = llvm.has_feature("avx512vnni")
    return {
        "attention": attention,
        "products": _rate(_run_bytes, SUMS[wide] * 8 * LANES_OF[wide], n_threads),
    }
