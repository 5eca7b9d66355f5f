"""LFPS' scout finds rows that the history does not know, from codes of all keys.

A key's code is its part along the few directions that matter most to scores, 4 bits each. The
first step scores the codes of all rows, and each later step those of the next slice. The best row
of each part becomes a candidate. Its exact score decides whether it is attended to.

Codes lie in parts of 128 rows, (8, words, 16, 4), for attention/byte_scores.py: eight tiles of
sixteen rows. A word is eight directions, a byte two of them:

    codes 9 8 1 15, 7 8 2 8     bytes 9 + 16 x 7, 8 + 16 x 8, 1 + 16 x 2, 15 + 16 x 8

Steps always attend to the sinks, so the scout need not find them: they have the code of the row
after them.
"""

from functools import partial
from typing import NamedTuple

import numpy as np
from numba import prange

from sparsekv_cli.cpu.attention import byte_scores
from sparsekv_cli.cpu.attention.byte_scores import LINE, MAX_HALF_QUERIES, largest_of_query
from sparsekv_cli.cpu.attention.flash import larger
from sparsekv_cli.cpu.attention.rows import F16, K_HEAD, K_KIND, K_ROW, K
from sparsekv_cli.cpu.attention.select import select_largest
from sparsekv_cli.cpu.attention.tile import PAD, tile_scores, widen_row
from sparsekv_cli.cpu.jit import llvm
from sparsekv_cli.cpu.jit.emitter import emitter
from sparsekv_cli.cpu.jit.kernel import njit
from sparsekv_cli.cpu.jit.pointers import address, grown, on_lines
from sparsekv_cli.cpu.jit.threads import PRANGE_ONLY, blas_threads
from sparsekv_cli.cpu.jit.value import (
    F32,
    I8,
    I32,
    LANES,
    VF,
    VI,
    builder,
    call_named,
    const,
    load,
    store,
    vec,
)
from sparsekv_cli.cpu.lfps.history import SINKS
from sparsekv_cli.cpu.vector.put import put

PART = 128  # rows; the scout finds the best one of each part
FOUND = 128  # rows that it finds for a head in a step, at most
ZERO = 8  # the code of 0
WORD = 8  # directions
ROWS = 8 if llvm.has_feature("avx512f") else 4  # that are coded at a time, in registers
PASS = 16  # parts that all queries are scored with before the next ones: they stay in a cache
# Standard deviations of the largest code. Clipped codes would hide the best rows.
LARGEST_CODE = 4.0
RIDGE = 0.05  # share of the queries' mean variance that is added in every direction
TINY = 1e-30


class Codes(NamedTuple):
    """The codes of G kv heads, for the kernels."""

    at: int  # address of the first kv head's codes
    head_bytes: int  # bytes from one kv head's codes to the next
    n_parts: int  # coded parts
    directions: int  # address of the first kv head's directions
    n_codes: int  # r; r / 2 bytes a row


class Scout:
    """The codes of one layer's keys; d is padded to a multiple of 16."""

    def __init__(self, n_kv_head: int, d: int) -> None:
        r = n_directions(d)
        self.n_words = r // WORD
        self.encode = np.zeros((n_kv_head, r, d), np.float32)  # E'
        self.directions = on_lines((n_kv_head, r, d), np.float16)  # D'
        self.zero = np.zeros((n_kv_head, r), np.float32)  # E' times the mean key
        self.codes = np.empty((n_kv_head, 0, PART // LANES, self.n_words, LANES, 4), np.uint8)
        self.n_parts = 0

    def aim(self, queries: np.ndarray, mean: np.ndarray, covariance: np.ndarray) -> None:
        """Chooses directions from queries f32 (H, s, d) and the keys' moments; drops all codes.

        mean f32 (G, d), covariance f32 (G, d, d).
        """
        n_kv, d = mean.shape
        of_heads = queries.reshape(n_kv, -1, d)
        with blas_threads(1):  # small matrices: threads of BLAS would mostly wait for each other
            encode, decode = choose_directions(of_heads, covariance, WORD * self.n_words)
        decode /= np.abs(decode).max((1, 2), keepdims=True)  # only the order of scores matters
        self.encode[:], self.directions[:] = encode.swapaxes(1, 2), decode.swapaxes(1, 2)
        self.zero[:] = np.einsum("gd,gdr->gr", mean, encode)
        self.n_parts = 0

    def code(self, layout: np.ndarray, n: int, n_threads: int) -> None:
        """Codes the whole parts of n rows that have no codes yet; layout: see attention/rows.py."""
        n_parts = n // PART
        if n_parts > self.codes.shape[1]:
            self.codes = grown(self.codes, 1, n_parts + n_parts // 8 + 4)
        r, width = self.zero.shape[1], -(-self.n_words // 2) * LANES  # directions of whole vectors
        encode = on_lines((*self.encode.shape[::2], width), np.float32, zeros=True)
        start = on_lines((len(self.zero), width), np.float32, zeros=True)
        encode[..., :r], start[:, :r] = self.encode.swapaxes(1, 2), -self.zero
        code_parts(layout, encode, start, self.n_parts, n_parts, self.codes, n_threads)
        self.n_parts = n_parts

    def known(self) -> Codes:
        """Returns the addresses of the codes. They are valid until ``code`` is called again."""
        return Codes(
            address(self.codes), self.codes.strides[0], self.n_parts, address(self.directions),
            self.directions.shape[1],
        )  # fmt: skip

    @property
    def nbytes(self) -> int:
        arrays = self.encode, self.directions, self.zero, self.codes
        return sum(array.nbytes for array in arrays)


def n_directions(d: int) -> int:
    """Returns the number of directions for heads of d dims: a fourth of d, but at least 16."""
    return WORD * max(2, -(-d // (4 * WORD)))


def choose_directions(
    queries: np.ndarray, covariance: np.ndarray, count: int
) -> tuple[np.ndarray, np.ndarray]:
    """Returns E, D f32 (G, d, count), for which (q D) . (k E) is the nearest to q . k.

    queries (G, m, d); covariance (G, d, d) of the keys. E and D are scaled so that the largest code
    of k E is LARGEST_CODE standard deviations. The queries' moments are C = L L'. U are the leading
    eigenvectors of L' covariance L. Then E = L U and D = L'^-1 U.
    """
    d = queries.shape[2]
    wide = queries.astype(np.float64)
    moments = wide.swapaxes(1, 2) @ wide / queries.shape[1]
    spread = RIDGE * np.trace(moments, axis1=1, axis2=2) / d + 1e-12
    lower = np.linalg.cholesky(moments + spread[:, None, None] * np.eye(d))
    upper = lower.swapaxes(1, 2)
    variances, vectors = np.linalg.eigh(upper @ covariance @ lower)
    best = vectors[..., : -count - 1 : -1]
    deviations = np.sqrt(np.maximum(variances[:, : -count - 1 : -1], 1e-12))[:, None]
    step = LARGEST_CODE * deviations / (ZERO - 1)
    encode, decode = lower @ best / step, np.linalg.solve(upper, best) * step
    return encode.astype(np.float32), decode.astype(np.float32)


def code_parts_ref(keys: np.ndarray, encode: np.ndarray, zero: np.ndarray) -> np.ndarray:
    """Returns the codes of the first rows, uint8 (G, parts, 8, words, 16, 4). numpy reference.

    See ``unpacked``. keys (G, parts x 128, d); encode f32 (G, r, d); zero f32 (G, r).
    """
    parts = np.rint(keys @ encode.swapaxes(1, 2) - zero[:, None])
    parts[:, :SINKS] = parts[:, SINKS : SINKS + 1]
    codes = (np.clip(parts, 1 - ZERO, ZERO - 1) + ZERO).astype(np.uint8)
    tiled = codes.reshape(len(codes), -1, PART // LANES, LANES, codes.shape[2] // WORD, WORD)
    tiled = tiled.swapaxes(3, 4)
    return tiled[..., : WORD // 2] + 16 * tiled[..., WORD // 2 :]


def unpacked(codes: np.ndarray) -> np.ndarray:
    """Returns the codes of rows, uint8 (..., 128, r), of parts (..., 8, words, 16, 4)."""
    halves = np.concatenate([codes & 15, codes >> 4], -1).swapaxes(-3, -2)
    return halves.reshape(*codes.shape[:-4], PART, -1)


@njit(cache=True, nogil=True, parallel=PRANGE_ONLY)
def code_parts(layout, encode, start, first, last, codes, n_threads):
    """Codes parts first..last - 1 of all rows; see ``code_parts_ref``.

    encode f32 (G, d, width), width: r in whole vectors. start f32 (G, width): - zero.
    """
    n_kv_head = len(encode)
    for thread in prange(n_threads):
        for i in range(thread, n_kv_head * (last - first), n_threads):
            _code_part(i % n_kv_head, first + i // n_kv_head, layout, encode, start, codes)


@njit(cache=True, nogil=True)
def _code_part(kv_head, part, layout, encode, start, codes):
    """Codes one part of a kv head."""
    d, k_row, of_part = encode.shape[1], layout[K_ROW], codes[kv_head, part]
    at = layout[K] + kv_head * layout[K_HEAD] + part * PART * k_row
    rows = np.empty((ROWS, d), np.float32)
    for first in range(0, PART, ROWS):
        for i in range(ROWS):
            widen_row(layout[K_KIND], at + (first + i) * k_row, rows[i])
        _code_rows(
            rows, d, encode[kv_head], encode.strides[1], start[kv_head], of_part.shape[1],
            of_part[first // LANES, 0, first % LANES],
        )  # fmt: skip
    if part == 0:
        for w in range(of_part.shape[1]):
            for i in range(SINKS):
                put(of_part[0, w, i], of_part[0, w, SINKS])


@emitter
def _code_rows(rows, d, encode, encode_row, start, n_words, out):
    """Writes the codes of ROWS rows f32 (ROWS, d), which lie in one tile; addresses.

    encode f32 (d, width), ``encode_row`` bytes from a dim to the next. start f32 (width,). out: of
    the first row's first word.
    """
    low, high = const(F32, 1.0 - ZERO), const(F32, ZERO - 1.0)

    @llvm.every(n_words, 2)
    def two_words(w):
        at = w * (4 * WORD)

        def dim(c, sums):
            directions = load(VF, encode + at + c * encode_row)
            new = []
            for i, total in enumerate(sums):
                new.append(load(F32, rows + (d * i + c) * 4).splat().fma(directions, total))
            return new

        sums = llvm.loop(0, d, 1, [load(VF, start + at)] * ROWS, dim)
        place, has_second = out + w * LINE, w + 1
        words = [_packed(total, low, high) for total in sums]
        for i, both in enumerate(words):
            store(both.lane(0), place, 4 * i)
        with builder().if_then((has_second < n_words).ir):
            for i, both in enumerate(words):
                store(both.lane(1), place, LINE + 4 * i)


def _packed(codes, low, high):
    """Returns two words <2 x i32> of a row, of codes before rounding, <16 x float>."""
    codes = codes.call("rint")
    codes = codes.maxnum(low)
    codes = codes.minnum(high)
    codes = codes.to(VI) + ZERO
    halves = [codes.shuffle([*range(i, i + 4), *range(i + 8, i + 12)]) for i in (0, 4)]
    return (halves[0] | halves[1] << 4).to(vec(I8, 8)).bitcast(vec(I32, 2))


def find_rows_ref(query: np.ndarray, codes: np.ndarray, directions: np.ndarray) -> np.ndarray:
    """Returns what ``find_rows`` finds in whole codes, of one query. numpy reference.

    query f32 (d,); codes uint8 (parts, 8, words, 16, 4) and directions f16 (r, d) of its kv head.
    The last one of equal rows of a part wins.
    """
    projected = directions.astype(np.float32) @ query
    projected *= largest_of_query(len(projected)) / max(np.abs(projected).max(), TINY)
    rows = unpacked(codes).astype(np.int64)
    scores = rows @ np.rint(projected).astype(np.int64)
    best = PART - 1 - scores[:, ::-1].argmax(1)
    keys = scores.max(1) * PART + best
    kept = np.sort(np.argsort(-keys, kind="stable")[:FOUND])
    return kept * PART + best[kept]


@emitter(n_queries=range(1, MAX_HALF_QUERIES + 1))
def _best_of_parts(queries, n_queries, parts, n_parts, n_words, out, out_row):
    """Writes each part's highest score and its place, 0 to 127, for at most MAX_HALF_QUERIES.

    queries: address of int8 (n_queries, 8 n_words). out: address of int32, with out_row bytes from
    a query to the next: the score times 128, plus the place.
    """
    tile_bytes, query_row = n_words * LINE, n_words * WORD

    def best_of_tiles(part, tile, known):
        sums = byte_scores.emit_half_products(
            n_queries, queries, query_row, part + tile_bytes * tile, n_words, PART
        )
        first, best = (tile * LANES).to(I32), list(known)
        for m, of_query in enumerate(sums):
            for i, total in enumerate(of_query):
                count = total.type.count
                place = const(total.type, range(count * i, count * (i + 1))) + first.splat(count)
                best[m] = larger(total | place, best[m])
        return best

    @llvm.every(n_parts)
    def best_of_part(i):
        part = parts + i * (tile_bytes * (PART // LANES))
        least = const(I32, -(1 << 31), byte_scores.SUMS)
        best = llvm.loop(0, PART // LANES, 1, [least] * n_queries, partial(best_of_tiles, part))
        to = out + i * 4
        for m, keys in enumerate(best):
            name = f"llvm.vector.reduce.smax.v{byte_scores.SUMS}i32"
            highest = call_named(name, I32, keys)
            store(highest, to + out_row * m)


@njit(cache=True, nogil=True, forceinline=True)
def find_rows(queries, codes, kv_head, first, last, found):
    """Writes the best rows of parts first..last - 1, one of each part and at most FOUND, to found.

    queries f32 (m, d), of heads of ``kv_head``. A part's codes are read once for all of them.
    found int32 (m, >= min(FOUND, last - first)), in order of the rows. The first win ties.
    """
    (m, d), r, n_parts = queries.shape, codes.n_codes, last - first
    keys, chosen = np.empty((m, n_parts), np.int32), np.empty(FOUND, np.int32)
    projected, rounded = np.empty(r + PAD, np.float32), np.empty((m, r), np.int8)
    at, most = codes.directions + kv_head * r * d * 2, np.float32(largest_of_query(r))
    for h in range(m):
        tile_scores(1, F16, queries[h], at, 2 * d, 0, r, d, projected, 0)
        largest = np.float32(TINY)
        for j in range(r):
            largest = max(largest, abs(projected[j]))
        for j in range(r):
            rounded[h, j] = np.int8(np.rint(projected[j] * (most / largest)))
    at = codes.at + kv_head * codes.head_bytes + first * PART * r // 2
    for part in range(0, n_parts, PASS):
        for h in range(0, m, MAX_HALF_QUERIES):
            _best_of_parts(
                rounded[h:], min(MAX_HALF_QUERIES, m - h), at + part * PART * r // 2,
                min(PASS, n_parts - part), r // WORD, keys[h, part:], keys.strides[0],
            )  # fmt: skip
    n_found = min(FOUND, n_parts)
    for h in range(m):
        select_largest(keys[h], n_parts, n_found, chosen)
        for j in range(n_found):
            found[h, j] = (first + chosen[j]) * PART + (keys[h, chosen[j]] & (PART - 1))
