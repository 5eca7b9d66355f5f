"""Scores of rows by bytes: dot products of unsigned bytes of rows and signed bytes of queries.

Rows lie in tiles of sixteen, (words, 16, 4). A word is four dims of a row. Each row of a tile has a
lane of its own, and nothing is summed across lanes. Two tiles are scored at a time, for as many
queries as the registers hold sums for. vpdpbusd (VNNI) multiplies a word of sixteen rows at once.
sdot and usdot (ARM) multiply a word of four rows. Other CPUs multiply pairs of i16.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from llvmlite import ir

from sparsekv_cli.cpu.jit import llvm
from sparsekv_cli.cpu.jit.llvm import I8, I16, I32, I64, LANES, const, load, shuffle, splat, vec
from sparsekv_cli.cpu.weights import vnni
from sparsekv_cli.cpu.weights.integer import byte_products, pair_products

PAIR = 2 * LANES  # rows of two tiles
LINE = 4 * LANES  # bytes of a word of a tile
MAX_QUERIES = 9 if llvm.has_feature("avx512f") else 3  # registers hold their sums over two tiles
ZERO = 128  # the unsigned byte that means 0


def _add_products(
    b: ir.IRBuilder, total: ir.Value, rows: ir.Value, query: ir.Value, *, seven_bits: bool
) -> ir.Value:
    """Returns total <16 x i32> + products of sixteen rows' word <64 x u8> and a query <16 x i32>.

    seven_bits: no byte of the rows is above 127, so that two products fit an i16.
    """
    if vnni.is_available():
        return vnni.dot_bytes(b, total, rows, query, unsigned=not seven_bits)
    if seven_bits and llvm.has_feature("avx2"):
        query, ones, parts = b.bitcast(query, vec(I8, LINE)), const(I16, 1), []
        for lanes in (range(PAIR), range(PAIR, LINE)):
            pairs = byte_products(b, *(shuffle(b, each, each, lanes) for each in (rows, query)))
            parts.append(pair_products(b, pairs, ones))
        return b.add(total, shuffle(b, parts[0], parts[1], range(LANES)))
    halves, eight = vec(I16, PAIR), const(I16, 8, PAIR)
    rows, query = b.bitcast(rows, halves), b.bitcast(query, halves)
    even = b.and_(rows, const(I16, 255, PAIR)), b.ashr(b.shl(query, eight), eight)
    odd = b.lshr(rows, eight), b.ashr(query, eight)
    for pair in (even, odd):
        parts = []
        for lanes in (range(LANES), range(LANES, PAIR)):
            parts.append(pair_products(b, *(shuffle(b, each, each, lanes) for each in pair)))
        total = b.add(total, shuffle(b, parts[0], parts[1], range(LANES)))
    return total


def emit_products(
    b: ir.IRBuilder,
    starts: Sequence[ir.Value],
    query: ir.Value,
    query_row: ir.Value,
    query_word: int,
    tiles: Sequence[ir.Value],
    n_words: ir.Value,
    *,
    seven_bits: bool = False,
) -> list[list[ir.Value]]:
    """Returns each query's sums over each of ``tiles``, <16 x i32>, added to its start value.

    query: address of the first query's first word; query_row, query_word: bytes to the next query
    and word. tiles: addresses. seven_bits: no byte of the rows is above 127.
    """

    def word(w: ir.Value, sums: list[ir.Value]) -> list[ir.Value]:
        at = b.mul(w, I64(LINE))
        rows = [load(b, vec(I8, LINE), b.add(tile, at)) for tile in tiles]
        place, new = b.add(query, b.mul(w, I64(query_word))), list(sums)
        for m in range(len(starts)):
            factors = splat(b, load(b, I32, b.add(place, b.mul(query_row, I64(m)))))
            for i, row in enumerate(rows, len(rows) * m):
                new[i] = _add_products(b, new[i], row, factors, seven_bits=seven_bits)
        return new

    first = [splat(b, start) for start in starts for _ in tiles]
    sums = llvm.loop(b, I64(0), n_words, 1, first, word)
    n = len(tiles)
    return [sums[n * m : n * (m + 1)] for m in range(len(starts))]


def for_each_number(b: ir.IRBuilder, number: ir.Value, emit: Callable[[int], None]) -> None:
    """Emits a switch on ``number``, with the code of ``emit(n)`` for every n up to MAX_QUERIES."""
    done = b.append_basic_block("done")
    switch = b.switch(number, done)
    for n in range(1, MAX_QUERIES + 1):
        block = b.append_basic_block()
        switch.add_case(I64(n), block)
        b.position_at_end(block)
        emit(n)
        b.branch(done)
    b.position_at_end(done)
