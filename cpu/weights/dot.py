"""Matrix-vector products and dequantisation of weights in the file's layout.

``rows_dot(code, ...)`` is compiled once for each weight format and called by its address. So the
fused layer (layer/decode.py) is compiled once for all models. It gets a table of (kernel address,
weight address, row bytes, rows, columns, planes) and knows no format.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, partial

import numpy as np
from llvmlite import ir
from numba import prange, types

from sparsekv_cli.cpu.jit import llvm
from sparsekv_cli.cpu.jit.bf16 import narrowed, widened
from sparsekv_cli.cpu.jit.emitter import LITERAL, emitter
from sparsekv_cli.cpu.jit.kernel import njit
from sparsekv_cli.cpu.jit.llvm import F16, F32, I16, I64, LANES, VF, const, load
from sparsekv_cli.cpu.jit.pointers import address, caller, function_address
from sparsekv_cli.cpu.jit.threads import PRANGE_ONLY
from sparsekv_cli.cpu.weights.block import BlockFormat
from sparsekv_cli.cpu.weights.formats import FORMAT_OF_CODE
from sparsekv_cli.cpu.weights.integer import emit_row as integer_row
from sparsekv_cli.cpu.weights.integer import quantize
from sparsekv_cli.cpu.weights.interleaved import groups_dot

PLAIN_FLOATS = {"F32": F32, "F16": F16, "BF16": I16}
ACCUMULATORS = 4  # independent sums in flight, enough to hide the latency of one fma
ROWS_A_PASS = 16  # rows of weights that stay in the L1 cache while all inputs use them
TO_F32, TO_BF16, TO_F16 = 0, 1, 2
TARGET_BYTES = {TO_F32: 4, TO_BF16: 2, TO_F16: 2}


def _scalar_weight(b: ir.IRBuilder, format_: BlockFormat, address: ir.Value) -> ir.Value:
    """Returns one element of a plain float format as f32 (for the tail of a row)."""
    raw = load(b, PLAIN_FLOATS[format_.name], address)
    if format_.name == "F16":
        return b.fpext(raw, F32)
    if format_.name == "BF16":
        return widened(b, raw)
    return raw


def _emit_row(
    b: ir.IRBuilder, format_: BlockFormat, w: ir.Value, xs: Sequence[ir.Value], n: ir.Value
) -> list[ir.Value]:
    """Returns the dot products, floats, of one row at w with each of ``xs``, addresses of n f32.

    A block is decoded once for all inputs. A product's bits do not depend on the other inputs.
    """
    n_blocks = b.sdiv(n, I64(format_.n_elements))

    def body(block: ir.Value, sums: list[ir.Value]) -> list[ir.Value]:
        p = b.add(w, b.mul(block, I64(format_.n_bytes)))
        start = b.mul(block, I64(4 * format_.n_elements))
        places = [b.add(x, start) for x in xs]
        for i, values in enumerate(format_.floats(b, p)):
            for j, at in enumerate(places):
                slot = ACCUMULATORS * j + i % ACCUMULATORS
                sums[slot] = llvm.fma(b, values, load(b, VF, at, 4 * LANES * i), sums[slot])
        return sums

    zeros = [const(F32, 0.0)] * (ACCUMULATORS * len(xs))
    sums = llvm.loop(b, I64(0), n_blocks, 1, zeros, body)
    totals = []
    for j in range(0, len(sums), ACCUMULATORS):
        pairs = b.fadd(sums[j], sums[j + 1]), b.fadd(sums[j + 2], sums[j + 3])
        totals.append(llvm.sum_lanes(b, b.fadd(*pairs)))
    if format_.name not in PLAIN_FLOATS:
        return totals
    size = format_.n_bytes // LANES

    def tail(i: ir.Value, carried: list[ir.Value]) -> list[ir.Value]:
        value = _scalar_weight(b, format_, b.add(w, b.mul(i, I64(size))))
        return [
            llvm.fma(b, value, load(b, F32, b.add(x, b.mul(i, I64(4)))), total)
            for x, total in zip(xs, carried, strict=True)
        ]

    return llvm.loop(b, b.mul(n_blocks, I64(LANES)), n, 1, totals, tail)


def _narrow(b: ir.IRBuilder, values: ir.Value, target: int) -> ir.Value:
    """Rounds f32 lanes (or one f32) to the target's type, to nearest even."""
    if target == TO_F32:
        return values
    if target == TO_F16:
        is_vector = isinstance(values.type, ir.VectorType)
        return b.fptrunc(values, llvm.vec(F16) if is_vector else F16)
    return narrowed(b, values)


@emitter(code=LITERAL, n_planes=LITERAL, count=range(1, 5))
def _row_dots(b, code, n_planes, count, w, x, x_row, n, out, out_row):
    """Writes dot products of a weight row with ``count`` inputs, x_row bytes apart, to ``out``.

    code, n_planes: literals. w, x, out: addresses. x: f32 (n_planes 0) or quantised; out:
    f32.
    """
    emit_row = partial(integer_row, n_planes=n_planes) if n_planes else _emit_row
    xs = [b.add(x, b.mul(I64(j), x_row)) for j in range(count)]
    for j, total in enumerate(emit_row(b, FORMAT_OF_CODE[code], w=w, xs=xs, n=n)):
        llvm.store(b, total, b.add(out, b.mul(I64(j), out_row)))


@emitter(code=LITERAL, target=LITERAL)
def _row_dequantize(b, code, target, w, out, n):
    """Writes one row's ``n`` elements at ``out`` as f32, bf16 or f16 (literal ``target``)."""
    format_ = FORMAT_OF_CODE[code]
    size = TARGET_BYTES[target]
    n_blocks = b.sdiv(n, I64(format_.n_elements))

    @llvm.every(b, n_blocks)
    def body(block: ir.Value) -> None:
        p = b.add(w, b.mul(block, I64(format_.n_bytes)))
        at = b.add(out, b.mul(block, I64(size * format_.n_elements)))
        for i, values in enumerate(format_.floats(b, p)):
            llvm.store(b, _narrow(b, values, target), at, size * LANES * i)

    if format_.name in PLAIN_FLOATS:

        @llvm.every(b, n, 1, b.mul(n_blocks, I64(LANES)))
        def tail(i: ir.Value) -> None:
            p = b.add(w, b.mul(i, I64(format_.n_bytes // LANES)))
            value = _scalar_weight(b, format_, p)
            llvm.store(b, _narrow(b, value, target), b.add(out, b.mul(i, I64(size))))


@njit(cache=True, nogil=True)
def rows_dot(
    code, n_planes, w, row_bytes, n_columns, x, x_row, n_inputs, out, out_row, first, last
):  # fmt: skip
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
def kernel_address(code: int, n_planes: int = 0, repacked: bool = False) -> int:
    """Returns the address of ``rows_dot``, compiled for the format ``code`` or loaded from disk.

    n_planes: bytes of a quantised activation; 0: f32. For repacked weights it is the address of
    ``groups_dot``, which takes quantised activations only.
    """
    literals = (types.literal(code), types.literal(n_planes))
    kernel = groups_dot if repacked else rows_dot
    return function_address(kernel, literals + (types.int64,) * 10)


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


@njit(cache=True, nogil=True, parallel=PRANGE_ONLY)
def _matvec_parallel(
    kernel, w, row_bytes, n_columns, x, x_row, n_inputs, out, out_row, n_rows, n_parts
):  # fmt: skip
    for part in prange(n_parts):
        first, last = part * n_rows // n_parts, (part + 1) * n_rows // n_parts
        call_rows(
            kernel, w, row_bytes, n_columns, x, x_row, n_inputs, out, out_row, first, last
        )  # fmt: skip


def matvec(
    code: int,
    w: np.ndarray,
    n_columns: int,
    x: np.ndarray,
    n_parts: int = 1,
    *,
    n_planes: int = 0,
) -> np.ndarray:
    """Returns W x: w uint8 (rows, row_bytes) in format ``code``; x f32 (n_columns,) -> f32 (rows,).

    x f32 (B, n_columns) gives f32 (B, rows); a row's bits do not depend on the other rows.
    """
    assert x.dtype == np.float32 and x.shape[-1] == n_columns and x.flags.c_contiguous
    rows = np.atleast_2d(x)
    out = np.empty((len(rows), w.shape[0]), np.float32)
    inputs = quantize(rows, n_planes) if n_planes else rows
    _matvec_parallel(
        kernel_address(code, n_planes), address(w), w.strides[0], n_columns, address(inputs),
        inputs.strides[0], len(rows), address(out), out.strides[0], w.shape[0], n_parts,
    )  # fmt: skip
    return out[0] if x.ndim == 1 else out


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
    _dequantize_parallel(
        dequantize_address(code, target), address(w), w.strides[0], n_columns, out_address,
        out_row_bytes, w.shape[0], n_parts,
    )  # fmt: skip


def dequantize(code: int, w: np.ndarray, n_columns: int) -> np.ndarray:
    """Returns w, uint8 (rows, row_bytes) in format ``code``, as f32 (rows, n_columns)."""
    out = np.empty((w.shape[0], n_columns), np.float32)
    dequantize_into(code, w, n_columns, address(out), out.strides[0], TO_F32)
    return out


def matvec_ref(code: int, w: np.ndarray, n_columns: int, x: np.ndarray) -> np.ndarray:
    """numpy reference of ``matvec`` with gguf's own dequantisation, summed in f64."""
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize as gguf_dequantize

    weights = gguf_dequantize(w.reshape(-1), GGMLQuantizationType(code)).reshape(-1, n_columns)
    return (weights.astype(np.float64) @ x).astype(np.float32)
