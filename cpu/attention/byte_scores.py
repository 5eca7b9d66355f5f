"""Scores of rows by bytes: dot products of unsigned bytes of rows and signed bytes of queries.

Rows lie in tiles of sixteen, (words, 16, 4). A word is four dims of a row. Each row of a tile has a
lane of its own, and nothing is summed across lanes. Two tiles are scored at a time, for as many
queries as the registers hold sums for. vpdpbusd (VNNI) multiplies a word of sixteen rows at once.
sdot and usdot (ARM) multiply a word of four rows. Other CPUs multiply pairs of i16.

Rows of half bytes have eight dims in a word: the low halves of its bytes come before the high ones.
vpmaddubsw (AVX2) multiplies them, and adds up all dims in i16.
"""

from __future__ import annotations

from collections.abc import Sequence

from sparsekv_cli.cpu.jit import llvm
from sparsekv_cli.cpu.jit.kernel import njit
from sparsekv_cli.cpu.jit.value import I8, I16, I32, LANES, Value, const, load, vec
from sparsekv_cli.cpu.weights import vnni
from sparsekv_cli.cpu.weights.integer import byte_products, pair_products

PAIR = 2 * LANES  # rows of two tiles
LINE = 4 * LANES  # bytes of a word of a tile
MAX_QUERIES = 9 if llvm.has_feature("avx512f") else 3  # registers hold their sums over two tiles
ZERO = 128  # the unsigned byte that means 0
# Sums of half bytes are in i16 if no instruction adds products to i32.
_SUMS_IN_I16 = llvm.has_feature("avx2") and not vnni.is_available()
SUMS = 8 if _SUMS_IN_I16 else LANES  # of half bytes in a vector
MOST_OF_HALF = 15  # the largest half byte
# Queries whose sums over half bytes the registers hold.
MAX_HALF_QUERIES = max(MAX_QUERIES, 6 if _SUMS_IN_I16 else 0)


def _add_products(total: Value, rows: Value, query: Value, *, unsigned: bool = True) -> Value:
    """Returns total <16 x i32> + products of sixteen rows' word <64 x u8> and a query <16 x i32>.

    unsigned: some byte of the rows may be above 127.
    """
    if vnni.is_available():
        return vnni.dot_bytes(total, rows, query, unsigned=unsigned)
    halves, eight = vec(I16, PAIR), const(I16, 8, PAIR)
    rows, query = rows.bitcast(halves), query.bitcast(halves)
    even = rows & 255, (query << eight).signed_shift(eight)
    odd = rows >> eight, query.signed_shift(eight)
    sixteens = range(LANES), range(LANES, PAIR)
    for pair in (even, odd):
        parts = [pair_products(*(each.shuffle(lanes) for each in pair)) for lanes in sixteens]
        total = total + parts[0].shuffle(range(LANES), parts[1])
    return total


def emit_products(
    starts: Sequence[Value],
    query: Value,
    query_row: Value,
    query_word: int,
    tiles: Sequence[Value],
    n_words: Value,
) -> list[list[Value]]:
    """Returns each query's sums over each of ``tiles``, <16 x i32>, added to its start value.

    query: address of the first query's first word; query_row, query_word: bytes to the next query
    and word. tiles: addresses.
    """

    def word(w: Value, sums: list[Value]) -> list[Value]:
        at = w * LINE
        rows = [load(vec(I8, LINE), tile + at) for tile in tiles]
        place, new = query + w * query_word, list(sums)
        for m in range(len(starts)):
            factors = load(I32, place + query_row * m).splat()
            for i, row in enumerate(rows, len(rows) * m):
                new[i] = _add_products(new[i], row, factors)
        return new

    first = [start.splat() for start in starts for _ in tiles]
    sums = llvm.loop(0, n_words, 1, first, word)
    n = len(tiles)
    return [sums[n * m : n * (m + 1)] for m in range(len(starts))]


@njit(cache=True, nogil=True)
def largest_of_query(n_dims: int) -> int:
    """Returns the largest element of a query whose sums over half bytes fit an i16."""
    return min(127, 32767 // (MOST_OF_HALF * n_dims // 2))


def emit_half_products(
    n_queries: int, query: Value, query_row: Value, tile: Value, n_words: Value, factor: int
) -> list[list[Value]]:
    """Returns each query's products with a tile of half bytes, times ``factor``, a power of 2.

    The sixteen products are in one vector of i32, or in two. query, query_row: address, and bytes
    to the next query; see ``largest_of_query``. tile: address.
    """
    lines = [vec(I32, SUMS)] * (LANES // SUMS)

    def word(w: Value, sums: list[Value]) -> list[Value]:
        at, place, new = w * LINE, query + w * 8, list(sums)
        for half in range(2):
            rows = []
            for i, type_ in enumerate(lines):
                both = load(type_, tile + at, PAIR * i)
                both = both >> 4 if half else both
                rows.append(both & 0x0F0F0F0F)
            for m in range(n_queries):
                of_query = load(I32, place + query_row * m, 4 * half)
                for i, row in enumerate(rows, len(rows) * m):
                    new[i] = _add_halves(new[i], row, of_query.splat(row.type.count))
        return new

    zero = const(I16, 0) if _SUMS_IN_I16 else const(I32, 0)
    sums = llvm.loop(0, n_words, 1, [zero] * (n_queries * len(lines)), word)
    if _SUMS_IN_I16:
        sums = [pair_products(each, const(I16, factor)) for each in sums]
    else:
        sums = [each * factor for each in sums]
    n = len(lines)
    return [sums[n * m : n * (m + 1)] for m in range(n_queries)]


def _add_halves(total: Value, rows: Value, query: Value) -> Value:
    """Returns total + the products of a word of rows below 16 and of a query, of the same type."""
    if not _SUMS_IN_I16:
        return _add_products(total, rows.bitcast(vec(I8, LINE)), query, unsigned=False)
    rows, query = (each.bitcast(vec(I8, PAIR)) for each in (rows, query))
    return llvm.add_in_order(total, byte_products(rows, query))
