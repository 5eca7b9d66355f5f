"""Attention on a tile of query heads, in vector IR: scores and weighted values.

Rows of K and V (attention/rows.py) are padded to a multiple of 16 elements. A row is loaded and
widened once for a tile of several query heads of its GQA group. The dot products of a tile are
summed across lanes together (llvm.sum_many). Rows are consecutive, or listed by int32 numbers. A
``mode`` is the kind of the rows, + GATHER for listed rows. 0 and 1 are the modes of f16.

Sums are as wide as the CPU's vectors, and as many as its registers hold. AVX-512 has 16 sums of 16
lanes, other CPUs have 8 sums of 8. AVX2 has 16 registers: twice as many sums take three times as
long there.

Each tile and mode has its own code, which takes long to compile. It is compiled once for each kind
of rows, and kernels call it through a table of addresses. The entry of f16 is set when this file is
imported. ``install`` sets the entry of another kind when a cache has such rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import binding, ir
from numba import types

from sparsekv_cli.cpu.attention.load import VECTOR_LANES, VW, RowReader, widen_halves
from sparsekv_cli.cpu.attention.rows import F16 as F16_ROWS
from sparsekv_cli.cpu.attention.rows import GATHER, KIND, QUANT_BLOCK
from sparsekv_cli.cpu.jit import llvm
from sparsekv_cli.cpu.jit.emitter import LITERAL, emitter
from sparsekv_cli.cpu.jit.install import when_installed
from sparsekv_cli.cpu.jit.kernel import njit
from sparsekv_cli.cpu.jit.pointers import address, function_address
from sparsekv_cli.cpu.jit.value import (
    F32,
    I32,
    I64,
    LANES,
    Value,
    builder,
    const,
    load,
    select,
    store,
)

PAD = 32  # floats that a score buffer needs after its last score
AHEAD_SCAN, AHEAD_GATHER = 64, 40  # rows between a load and its prefetch
# Dims of values that registers sum at a time, a multiple of 16, for each size of a tile.
WIDE_DIMS = (
    dict.fromkeys(range(1, 8), 64) | {8: 32}
    if VECTOR_LANES == LANES
    else {1: 64, 2: 32, 3: 32, 4: 16}
)
MAX_TILE = len(WIDE_DIMS)  # query heads
TABLE = "sparsekv_tiles"  # the linker's name of ``_TABLE``
_TABLE = np.zeros(2 * (KIND // 2 + 1), np.int64)  # for each kind, the addresses of its two kernels
_N_NUMBERS = 10  # arguments of a tile's kernel


def _row_address(base, row_bytes, idx, j, mode):
    """Returns the address of row j (of row idx[j] when gathering; idx: address of int32)."""
    if mode & GATHER:
        j = load(I32, idx + j * 4).to(I64)
    return base + j * row_bytes


def _rows_ahead(base, row_bytes, idx, j, n_rows, last, mode):
    """Returns addresses of n_rows rows from j + AHEAD on; in a list, none after ``last``."""
    rows = []
    for i in range(n_rows):
        at = j + ((AHEAD_GATHER if mode & GATHER else AHEAD_SCAN) + i)
        if mode & GATHER:
            at = select(at < last, at, last)
        rows.append(_row_address(base, row_bytes, idx, at, mode))
    return rows


def _add_products(sums, left, n_left, right, n_right):
    """Returns sums[i n_right + j] + left(i) right(j), with i < n_left and j < n_right.

    left, right: functions that load a vector. The side with fewer vectors stays in registers.
    """
    few, n_few, many, n_many, to_few, to_many = left, n_left, right, n_right, n_right, 1
    if n_right <= n_left:
        few, n_few, many, n_many, to_few, to_many = right, n_right, left, n_left, 1, n_right
    sums, kept = list(sums), [few(i) for i in range(n_few)]
    for j in range(n_many):
        vector = many(j)
        for i, other in enumerate(kept):
            at = to_few * i + to_many * j
            sums[at] = vector.fma(other, sums[at])
    return sums


def _emit_scores(tile, mode, q, k, row_bytes, idx, count, d, out, out_stride):
    """Emits ``tile_scores`` for one tile and mode, ints."""
    n_keys = VECTOR_LANES // tile
    last = count - 1
    reader = RowReader(mode, d)

    @llvm.every(count, n_keys)
    def group(j):
        rows = []
        for i in range(n_keys):
            at = j + i
            at = select(at < last, at, last)
            rows.append(_row_address(k, row_bytes, idx, at, mode))

        ahead = _rows_ahead(k, row_bytes, idx, j, n_keys, last, mode)
        if reader.has_scales:
            for row in ahead:
                llvm.prefetch(reader.after_quants(row))

        def dims(n_vectors):
            """Adds the products of n_vectors vectors of dims from c on."""

            def body(c, sums):
                at = reader.bytes_to(c)
                lines = llvm.Prefetches([row + at for row in ahead], n_keys * n_vectors)
                scales = [reader.scale(row, c) for row in rows]
                for vector in range(n_vectors):
                    at = c + VECTOR_LANES * vector

                    def query(t, at=at):
                        return load(VW, q + (t * d + at) * 4)

                    def key(i, at=at):
                        lines.step()
                        return reader.vector(rows[i], at, scales[i])

                    sums = _add_products(sums, query, tile, key, n_keys)
                return sums

            return body

        zero = const(F32, 0.0, VECTOR_LANES)
        sums = [zero] * (tile * n_keys)
        whole = d - d.unsigned_mod(QUANT_BLOCK)
        sums = llvm.loop(0, whole, QUANT_BLOCK, sums, dims(QUANT_BLOCK // VECTOR_LANES))
        sums = llvm.loop(whole, d, LANES, sums, dims(LANES // VECTOR_LANES))
        sums += [zero] * (VECTOR_LANES - len(sums))
        dots = llvm.sum_many(sums)
        for t in range(tile):
            at = out + (t * out_stride + j) * 4
            store(dots.shuffle(range(t * n_keys, (t + 1) * n_keys)), at)


def _emit_values(tile, mode, p, p_stride, v, row_bytes, idx, count, d, acc):
    """Emits ``tile_values`` for one tile and mode, ints."""
    reader = RowReader(mode, d)

    def chunk(c, n_vectors):
        """Accumulates dims c .. c + VECTOR_LANES n_vectors."""
        unroll = max(1, 8 // (tile * n_vectors))
        acc_at = [
            acc + (t * d + c + VECTOR_LANES * i) * 4 for t in range(tile) for i in range(n_vectors)
        ]

        def key(j, sums, lines=None):
            row = _row_address(v, row_bytes, idx, j, mode)
            scales = [
                reader.scale(row, c + first)
                for first in range(0, VECTOR_LANES * n_vectors, QUANT_BLOCK)
            ]

            def weight(t):
                return load(F32, p + (t * p_stride + j) * 4).splat(VECTOR_LANES)

            def values(i):
                if lines is not None:
                    lines.step()
                first = VECTOR_LANES * i
                return reader.vector(row, c + first, scales[first // QUANT_BLOCK])

            return _add_products(sums, weight, tile, values, n_vectors)

        n_sums = len(acc_at)
        last = count - 1

        def keys(j, sums):
            addresses = []
            for row in _rows_ahead(v, row_bytes, idx, j, unroll, last, mode):
                first = row + reader.bytes_to(c)
                for line in range(0, reader.bits * VECTOR_LANES * n_vectors // 8, 64):
                    addresses.append(first + line)
                if reader.has_scales:
                    llvm.prefetch(reader.after_quants(row))
            lines = llvm.Prefetches(addresses, unroll * n_vectors)
            new = []
            for u in range(unroll):
                new += key(j + u, sums[u * n_sums : (u + 1) * n_sums], lines)
            return new

        zero = const(F32, 0.0, VECTOR_LANES)
        whole = count - count % unroll
        start = [load(VW, at) for at in acc_at] + [zero] * (n_sums * (unroll - 1))
        sums = llvm.loop(0, whole, unroll, start, keys)
        for u in range(1, unroll):
            sums[:n_sums] = [sums[i] + sums[u * n_sums + i] for i in range(n_sums)]
        sums = llvm.loop(whole, count, 1, sums[:n_sums], key)
        for at, value in zip(acc_at, sums, strict=True):
            store(value, at)

    dims = WIDE_DIMS[tile]

    whole = d - d % dims
    llvm.loop(0, whole, dims, [], lambda c, _: chunk(c, dims // VECTOR_LANES))
    llvm.loop(whole, d, LANES, [], lambda c, _: chunk(c, LANES // VECTOR_LANES))


def _for_tiles(emit: Callable[..., None]) -> Any:
    """Returns an emitter with the code of ``emit`` for each tile, of a kind's rows or listed rows.

    is_listed: 0 or GATHER.
    """

    @emitter(kind=LITERAL, tile=range(1, MAX_TILE + 1), is_listed=(0, GATHER))
    def any_tile(kind, tile, is_listed, a, b, c, d, e, f, g, h):
        emit(tile, kind | is_listed, a, b, c, d, e, f, g, h)

    return any_tile


_any_scores, _any_values = _for_tiles(_emit_scores), _for_tiles(_emit_values)


@njit(cache=True, nogil=True)
def _scores(kind, tile, mode, q, k, row_bytes, idx, count, d, out, out_stride):
    _any_scores(kind, tile, mode & GATHER, q, k, row_bytes, idx, count, d, out, out_stride)


@njit(cache=True, nogil=True)
def _values(kind, tile, mode, p, p_stride, v, row_bytes, idx, count, d, acc):
    _any_values(kind, tile, mode & GATHER, p, p_stride, v, row_bytes, idx, count, d, acc)


def prepare(kind: int) -> None:
    """Sets the table's kernels of a kind of rows: compiles them or loads them from the disk."""
    for i, function in enumerate((_scores, _values)):
        if not _TABLE[kind + i]:
            signature = (types.literal(kind),) + (types.int64,) * _N_NUMBERS
            _TABLE[kind + i] = function_address(function, signature)


def _call(which: int, tile: Value, mode: Value, *others: Value) -> None:
    """Calls the table's kernel of scores (0) or values (1)."""
    b, kind = builder(), mode & KIND  # a kind is twice its number
    table = b.module.globals.get(TABLE)
    if table is None:
        table = ir.GlobalVariable(b.module, ir.ArrayType(I64, len(_TABLE)), TABLE)
    function = Value(b.load(b.gep(table, [I64(0), (kind + which).ir])))
    type_ = ir.FunctionType(ir.VoidType(), [I64] * (1 + _N_NUMBERS))
    arguments = [I64(0), *(x.ir for x in (tile, mode, *others))]  # 0 for the literal
    b.call(function.pointer(type_), arguments)


@emitter
def tile_scores(tile, mode, q, k, row_bytes, idx, count, d, out, out_stride):
    """out[t, j] = q[t] . k[row j], t < tile, j < count; q f32 (tile, d), k rows, out f32.

    Addresses are i64; tile: 1 to MAX_TILE; ``out_stride`` in floats. ``mode``: see above; with
    GATHER, row j is idx[j] (int32). Writes up to 15 floats after out[t, count). d is a multiple of
    16.
    """
    _call(0, tile, mode, q, k, row_bytes, idx, count, d, out, out_stride)


@emitter
def tile_values(tile, mode, p, p_stride, v, row_bytes, idx, count, d, acc):
    """acc[t] += sum over j < count of p[t, j] v[row j]; acc f32 (tile, d), addresses as i64."""
    _call(1, tile, mode, p, p_stride, v, row_bytes, idx, count, d, acc)


@njit(cache=True, nogil=True)
def widen_row(kind, row, out):
    """out f32 (width,) = the row of ``kind`` at an address."""
    if kind == F16_ROWS:
        widen_halves(row, len(out), out)
        return
    one = np.ones(1, np.float32)
    out[:] = 0
    tile_values(1, kind, one, 0, row, 0, 0, 1, len(out), out)


binding.add_symbol(TABLE, address(_TABLE))
when_installed(lambda: prepare(F16_ROWS))
