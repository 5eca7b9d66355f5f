"""Plain loops of one instruction: the rate that a CPU's cores reach with no loads and no rest."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
from numba import prange

from sparsekv_cli.cpu.jit import bf16, llvm
from sparsekv_cli.cpu.jit.emitter import emitter
from sparsekv_cli.cpu.jit.kernel import njit
from sparsekv_cli.cpu.jit.pointers import on_lines
from sparsekv_cli.cpu.jit.threads import PRANGE_ONLY
from sparsekv_cli.cpu.jit.value import (
    F32,
    I8,
    I16,
    I32,
    LANES,
    VF,
    Value,
    call_named,
    load,
    store,
    vec,
)
from sparsekv_cli.cpu.weights import vnni
from sparsekv_cli.cpu.weights.integer import byte_products

IS_WIDE = llvm.has_feature("avx512f")
LANES_OF = {True: LANES, False: 8}
SUMS = {True: 24, False: 12}  # independent sums, as many as the kernels keep in registers
N_STEPS = 1 << 20


def _looped(data: Value, sums: list[Value], step: Callable) -> None:
    """Runs N_STEPS steps of an instruction on each sum, and stores the sums to ``data``."""

    def body(i: Value, now: list[Value]) -> list[Value]:
        return [step(i, j, total) for j, total in enumerate(now)]

    sums = llvm.loop(0, N_STEPS, 1, sums, body)
    for i, total in enumerate(sums):
        store(total, data, 64 * i)


def _loop(emit: Callable[[Value], None]) -> Callable:
    """A kernel that runs a loop in each thread, on a row of its argument. emit: writes the loop."""

    @emitter
    def multiply(data):
        emit(data)

    @njit(nogil=True, parallel=PRANGE_ONLY)
    def run(data):
        for thread in prange(len(data)):
            multiply(data[thread].ctypes.data)

    return run


def _bf16(data: Value) -> None:
    """vdpbf16ps."""
    x, y = (load(vec(bf16.BF16, 2 * LANES), data, at) for at in (0, 64))
    sums = [load(VF, data, 64 * i) for i in range(SUMS[True])]
    _looped(data, sums, lambda i, j, s: call_named(bf16.DOT, VF, s, x, y))


def _f32(data: Value) -> None:
    """The multiplication and addition of floats."""
    lanes = vec(F32, LANES_OF[IS_WIDE])
    x, y = (load(lanes, data, at) for at in (0, 64))
    sums = [load(lanes, data, 64 * i) for i in range(SUMS[IS_WIDE])]
    _looped(data, sums, lambda i, j, s: x.fma(y, s))


def _bytes(data: Value) -> None:
    """vpdpbusd; without it vpmaddubsw and an addition."""
    wide, has_dots = llvm.has_feature("avx512vnni"), vnni.is_available()
    n = LANES_OF[wide]
    x, same = (load(vec(I8, 4 * n), data, at) for at in (0, 64))
    type_ = vec(I32, n) if has_dots else vec(I16, 2 * n)

    def step(i, j, total):
        if has_dots:
            return vnni.add_dots(total, x, same)
        # Loaded for each sum and step, so that no product leaves the loop.
        y = load(vec(I8, 4 * n), data, (i & 960) + 64 * j)
        return llvm.add_in_order(total, byte_products(x, y))

    _looped(data, [load(type_, data, 64 * i) for i in range(SUMS[wide])], step)


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
        attention = _rate(_loop(_bf16), SUMS[True] * 4 * LANES, n_threads)
    else:
        attention = _rate(_loop(_f32), SUMS[IS_WIDE] * 2 * LANES_OF[IS_WIDE], n_threads)
    wide = llvm.has_feature("avx512vnni")
    return {
        "attention": attention,
        "products": _rate(_loop(_bytes), SUMS[wide] * 8 * LANES_OF[wide], n_threads),
    }
