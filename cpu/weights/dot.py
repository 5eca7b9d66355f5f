"""Matrix-vector products and dequantisation of weights in the file's layout.

``rows_dot(code, ...)`` is compiled once for each weight format and called by its address. So the
fused layer (layer/decode.py) is compiled once for all models. It gets a table of (kernel address,
weight address, row bytes, rows, columns, planes) and knows no format.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, partial

import numpy as np
from numba import prange, types

from sparsekv_cli.cpu.jit import llvm
from sparsekv_cli.cpu.jit.bf16 import narrowed, widened
from sparsekv_cli.cpu.jit.emitter import LITERAL, emitter
from sparsekv_cli.cpu.jit.kernel import njit
from sparsekv_cli.cpu.jit.pointers import address, caller, function_address
from sparsekv_cli.cpu.jit.threads import PRANGE_ONLY
from sparsekv_cli.cpu.jit.value import F16, F32, I16, LANES, VF, Value, const, load, store
from sparsekv_cli.cpu.weights.block import BlockFormat
from sparsekv_cli.cpu.weights.formats import FORMAT_OF_CODE
from sparsekv_cli.cpu.weights.integer import emit_row as integer_row

PLAIN_FLOATS = {"F32": F32, "F16": F16, "BF16": I16}
ACCUMULATORS = 4  # independent sums in flight, enough to hide the latency of one fma
ROWS_A_PASS = 16  # rows of weights that stay in the L1 cache while all inputs use them
TO_F32, TO_BF16 = 0, 1
TARGET_BYTES = {TO_F32: 4, TO_BF16: 2}


def _scalar_weight(format_: BlockFormat, address: Value) -> Value:
    """Returns one element of a plain float format as f32 (for the tail of a row)."""
    raw = load(PLAIN_FLOATS[format_.name], address)
    if format_.name == "F16":
        return raw.to(F32)
    if format_.name == "BF16":
        return widened(raw)
    return raw


def _emit_row(format_: BlockFormat, w: Value, xs: Sequence[Value], n: Value) -> list[Value]:
    """Returns the dot products, floats, of one row at w with each of ``xs``, addresses of n f32.

    A block is decoded once for all inputs. A product's bits do not depend on the other inputs.
    """
    n_blocks = n // format_.n_elements

    def body(block: Value, sums: list[Value]) -> list[Value]:
        p = w + block * format_.n_bytes
        start = block * (4 * format_.n_elements)
        places = [x + start for x in xs]
        for i, values in enumerate(format_.floats(p)):
            for j, at in enumerate(places):
                slot = ACCUMULATORS * j + i % ACCUMULATORS
                sums[slot] = values.fma(load(VF, at, 4 * LANES * i), sums[slot])
        return sums

    zeros = [const(F32, 0.0)] * (ACCUMULATORS * len(xs))
    sums = llvm.loop(0, n_blocks, 1, zeros, body)
    totals = []
    for j in range(0, len(sums), ACCUMULATORS):
        first, second, third, fourth = sums[j : j + ACCUMULATORS]
        totals.append(llvm.sum_lanes((first + second) + (third + fourth)))
    if format_.name not in PLAIN_FLOATS:
        return totals
    size = format_.n_bytes // LANES

    def tail(i: Value, carried: list[Value]) -> list[Value]:
        value = _scalar_weight(format_, w + i * size)
        return [
            value.fma(load(F32, x + i * 4), total) for x, total in zip(xs, carried, strict=True)
        ]

    return llvm.loop(n_blocks * LANES, n, 1, totals, tail)


def _narrow(values: Value, target: int) -> Value:
    """Rounds f32 lanes (or one f32) to the target's type, to nearest even."""
    return values if target == TO_F32 else narrowed(values)


@emitter(code=LITERAL, n_planes=LITERAL, count=range(1, 5))
def _row_dots(code, n_planes, count, w, x, x_row, n, out, out_row):
    """Writes dot products of a weight row with ``count`` inputs, x_row bytes apart, to ``out``.

    code, n_planes: literals. w, x, out: addresses. x: f32 (n_planes 0) or quantised; out:
    f32.
    """
    emit_row = partial(integer_row, n_planes=n_planes) if n_planes else _emit_row
    xs = [x + j * x_row for j in range(count)]
    for j, total in enumerate(emit_row(FORMAT_OF_CODE[code], w=w, xs=xs, n=n)):
        store(total, out + j * out_row)


@emitter(code=LITERAL, target=LITERAL)
def _row_dequantize(code, target, w, out, n):
    """Writes one row's ``n`` elements at ``out`` as f32 or bf16 (literal ``target``)."""
    format_ = FORMAT_OF_CODE[code]
    size = TARGET_BYTES[target]
    n_blocks = n // format_.n_elements

    @llvm.every(n_blocks)
    def body(block: Value) -> None:
        p = w + block * format_.n_bytes
        at = out + block * (size * format_.n_elements)
        for i, values in enumerate(format_.floats(p)):
            store(_narrow(values, target), at, size * LANES * i)

    if format_.name in PLAIN_FLOATS:

        @llvm.every(n, 1, n_blocks * LANES)
        def tail(i: Value) -> None:
            p = w + i * (format_.n_bytes // LANES)
            store(_narrow(_scalar_weight(format_, p), target), out + i * size)


@njit(cache=True, nogil=True)
def rows_dot(
    code, n_planes, w, row_bytes, n_columns, x, x_row, n_inputs, out, out_row, first, last
):
    """out[i, r] = weight row r . x[i] for i < n_inputs and first <= r < last; addresses.

    x[i]: f32 if n_planes is 0, else quantised, x_row bytes apart; out: f32, rows out_row bytes
    apart. Up to four inputs share a decoded row. More inputs are taken four at a time, while the
    weight rows are in the L1 cache.
    """
    for start in range(first, last, ROWS_A_PASS):
        stop = min(start + ROWS_A_PASS, last)
        for i in range(0, n_inputs, 4):
            source, target, count = x + i * x_row, out + i * out_row, min(4, n_inputs - i)
            for r in range(start, stop):
                at, to = w + r * row_bytes, target + 4 * r
                _row_dots(code, n_planes, count, at, source, x_row, n_columns, to, out_row)


@njit(cache=True, nogil=True)
def rows_dequantize(code, target, w, row_bytes, n_columns, out, out_row_bytes, first, last):
    """Dequantises rows first..last of a weight into ``out`` (row r at out + r out_row_bytes)."""
    for row in range(first, last):
        _row_dequantize(code, target, w + row * row_bytes, out + row * out_row_bytes, n_columns)


call_rows, call_dequantize = caller(rows_dot, 2), caller(rows_dequantize, 2)


@cache
def dequantize_address(code: int, target: int) -> int:
    """Returns the address of ``rows_dequantize`` for a format and a target (TO_F32, ...)."""
    signature = (types.literal(code), types.literal(target)) + (types.int64,) * 7
    return function_address(rows_dequantize, signature)


@njit(cache=True, nogil=True, parallel=PRANGE_ONLY)
def _dequantize_parallel(kernel, w, row_bytes, n_columns, out, out_row_bytes, n_rows, n_parts):
    for part in prange(n_parts):
        first, last = part * n_rows // n_parts, (part + 1) * n_rows // n_parts
        call_dequantize(kernel, w, row_bytes, n_columns, out, out_row_bytes, first, last)


def dequantize_into(
    code: int,
    w: np.ndarray,
    n_columns: int,
    out_address: int,
    out_row_bytes: int,
    target: int,
    n_parts: int = 1,
) -> None:
    """Dequantises w, uint8 (rows, row_bytes), to rows at ``out_address`` in a TO_* type."""
    kernel, row_bytes = dequantize_address(code, target), w.strides[0]
    _dequantize_parallel(
        kernel, address(w), row_bytes, n_columns, out_address, out_row_bytes, len(w), n_parts
    )


def dequantize(code: int, w: np.ndarray, n_columns: int) -> np.ndarray:
    """Returns w, uint8 (rows, row_bytes) in format ``code``, as f32 (rows, n_columns)."""
    out = np.empty((w.shape[0], n_columns), np.float32)
    dequantize_into(code, w, n_columns, address(out), out.strides[0], TO_F32)
    return out


def matvec_ref(code: int, w: np.ndarray, n_columns: int, x: np.ndarray) -> np.ndarray:
    """numpy reference of ``rows_dot``, W x: with gguf's own dequantisation, summed in f64."""
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize as gguf_dequantize

    weights = gguf_dequantize(w.reshape(-1), GGMLQuantizationType(code)).reshape(-1, n_columns)
    return (weights.astype(np.float64) @ x).astype(np.float32)
