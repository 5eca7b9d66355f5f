"""SALS' latents: their store, and kernels that encode keys to latents and reconstruct keys.

A token's latent is its pre-RoPE key of all kv heads, times a basis E: z = k E. Scores use the first
r* columns. They are stored as integers of 16 bits with one scale a token. Their high bytes lie in
tiles of sixteen tokens: (words, 16, 4), then sixteen scales. attention/byte_scores.py defines a
word. The rest of a token is its record, which is read only if the token is chosen. It holds the
low bytes, the other columns in f16, and the quantised values (sals/values.py).

Letters: G kv heads, d head size, d' = d padded to 16, r rank, r* score rank.
"""

from typing import NamedTuple

import numpy as np
from numba import prange

from sparsekv_cli.cpu.attention import byte_scores
from sparsekv_cli.cpu.attention.load import widen_halves
from sparsekv_cli.cpu.attention.rows import K_HEAD, K_ROW, V_HEAD, V_ROW, K, V
from sparsekv_cli.cpu.attention.select import bits_of, float_of
from sparsekv_cli.cpu.attention.store import store_halves
from sparsekv_cli.cpu.jit.kernel import njit
from sparsekv_cli.cpu.jit.llvm import prefetch_lines
from sparsekv_cli.cpu.jit.pointers import on_lines
from sparsekv_cli.cpu.jit.threads import PRANGE_ONLY
from sparsekv_cli.cpu.jit.value import LANES
from sparsekv_cli.cpu.sals.values import head_bytes, quantize_head, read_head
from sparsekv_cli.cpu.sals.vectors import (
    MAX_ROWS,
    copy_words,
    cos_sin,
    join_bytes,
    multiply,
    rotate_row,
    scatter_halves,
)
from sparsekv_cli.cpu.vector.declared import f32, f64

PIECE = 32  # rows that are reconstructed at a time: as many stay in the L1 cache


class Latents(NamedTuple):
    """Addresses of the two parts of a layer's latents, and their layout."""

    score: int  # bytes (tiles, words, 16, 4) with scales
    records: int  # (tokens, record); kernels may read one line past the last record
    record: int  # bytes of a token's record
    rank: int
    score_rank: int
    bits: int
    head_bytes: int  # of one token's values in one kv head
    first: int  # position of latent 0


@njit(cache=True, nogil=True)
def words_of(r_star):
    """Returns the number of words of a token's scored columns."""
    return (r_star + 3) // 4


@njit(cache=True, nogil=True)
def tile_bytes(n_words):
    """Returns the bytes of a tile: the scored columns of sixteen tokens, and their scales."""
    return byte_scores.LINE * (n_words + 1)


class LatentBasis(NamedTuple):
    """The matrices that turn one layer's keys into latents and back, as a part of SALSState."""

    n_pairs: int
    rope_scale: np.float32
    d: int
    d_v: int
    n_kv: int
    encode: np.ndarray = f32("n_key_dims", "encode_columns")  # E (G d', r padded to 16)
    decode: np.ndarray = f32("rank", "decode_columns")  # D^T (r, >= G d')
    turns: np.ndarray = f64("n_turns")  # theta / 2 pi (pairs padded to 16,): circles a position


def make_basis(
    vectors: np.ndarray,
    weights: np.ndarray,
    theta: np.ndarray,
    rope_scale: float,
    n_kv: int,
    d_v: int,
) -> LatentBasis:
    """E = w U and D = U / w, laid out for the kernels: vectors U (G d, r), weights w (G d,)."""
    size, rank = vectors.shape
    d = size // n_kv
    width = -(-d // LANES) * LANES
    encode = np.zeros((n_kv, width, -(-rank // LANES) * LANES), np.float32)
    encode[:, :d, :rank] = (weights[:, None] * vectors).reshape(n_kv, d, rank)
    # A row has sixteen floats of padding, so that rows do not share the same sets of the L1 cache.
    decode = np.zeros((rank, n_kv * width + LANES), np.float32)
    by_head = decode[:, :-LANES].reshape(rank, n_kv, width)
    by_head[..., :d] = (vectors / weights[:, None]).T.reshape(rank, n_kv, d)
    decode[:, :-LANES] = by_head.reshape(rank, -1)
    turns = np.zeros(-(-len(theta) // LANES) * LANES)
    turns[: len(theta)] = theta / (2 * np.pi)
    return LatentBasis(
        len(theta), np.float32(rope_scale), d, d_v, n_kv, encode.reshape(n_kv * width, -1), decode,
        turns,
    )  # fmt: skip


class LatentStore:
    """Latents and quantised values of a layer's tokens from position ``first`` on."""

    def __init__(
        self, rank: int, score_rank: int, bits: int, first: int, basis: LatentBasis
    ) -> None:
        self.n, self.first = 0, first
        self._shape = rank, score_rank, bits
        self._head_bytes = head_bytes(basis.d_v, bits)
        values = basis.n_kv * self._head_bytes
        self._record = 4 * words_of(score_rank) + 2 * (rank - score_rank) + values
        self._scored = self._records = np.zeros(0, np.uint8)
        self._allocate(0)

    def _allocate(self, capacity: int) -> None:
        """Makes room for ``capacity`` tokens and copies the present ones."""
        tile = tile_bytes(words_of(self._shape[1]))
        capacity = -(-capacity // byte_scores.PAIR) * byte_scores.PAIR
        n_scored = capacity // LANES * tile
        # One block for both parts, of whole lines: numpy asks for huge pages from 4 MB on.
        block = on_lines(
            n_scored + capacity * self._record + byte_scores.LINE, np.uint8, zeros=True
        )
        scored, records = block[:n_scored], block[n_scored:]
        for new, old, size in (
            (scored, self._scored, -(-self.n // LANES) * tile),
            (records, self._records, self.n * self._record),
        ):
            new[:size] = old[:size]
        self.capacity, self._scored, self._records = capacity, scored, records
        at, records_at = (a.__array_interface__["data"][0] for a in (scored, records))
        self.table = Latents(
            at, records_at, self._record, *self._shape, self._head_bytes, self.first
        )

    @property
    def nbytes(self) -> int:
        return self._scored.nbytes + self._records.nbytes

    @property
    def row_bytes(self) -> int:
        """Bytes of one token."""
        return self.scored_bytes + self._record

    @property
    def scored_bytes(self) -> int:
        """Bytes of one token that scoring reads."""
        return tile_bytes(words_of(self._shape[1])) // LANES

    def reserve(self, n: int) -> None:
        """Makes room for ``n`` tokens. A store with tokens grows by at least a sixteenth."""
        if n > self.capacity:
            self._allocate(n if self.n == 0 else max(n, self.capacity + self.capacity // 16 + 256))


def rotate_ref(x: np.ndarray, positions: np.ndarray, theta: np.ndarray, scale: float) -> np.ndarray:
    """Rotates x (..., n, d), half-split, to ``positions`` (n,); scales the rotated dims."""
    half = len(theta)
    cos, sin = (scale * f(np.outer(positions, theta)) for f in (np.cos, np.sin))
    a, b = x[..., :half], x[..., half : 2 * half]
    return np.concatenate([a * cos - b * sin, a * sin + b * cos, x[..., 2 * half :]], axis=-1)


def encode_ref(
    k: np.ndarray, positions: np.ndarray, encode: np.ndarray, theta: np.ndarray, rope_scale: float
) -> np.ndarray:
    """Rotated keys k (G, n, d) -> latents (n, r) before rounding; encode E (G d, r)."""
    nope = rotate_ref(k.astype(np.float64), -positions, theta, 1 / rope_scale)
    return nope.transpose(1, 0, 2).reshape(k.shape[1], -1) @ encode


def reconstruct_ref(
    latents: np.ndarray,
    positions: np.ndarray,
    decode: np.ndarray,
    theta: np.ndarray,
    rope_scale: float,
    n_kv: int,
) -> np.ndarray:
    """latents (n, r) -> rotated keys (G, n, d); decode D (G d, r)."""
    nope = latents.astype(np.float64) @ decode.T
    nope = nope.reshape(len(latents), n_kv, -1).transpose(1, 0, 2)
    return rotate_ref(nope, positions, theta, rope_scale)


@njit(cache=True, nogil=True)
def write_columns(z, tile, lane, record, words):
    """Stores a token's scored columns z f32 (r*,) as integers of 16 bits, in two parts.

    The high bytes go to ``lane`` of the tile at address ``tile``. The low bytes go to address
    ``record``. words int32 (2, words + 1): scratch.
    """
    n_words = words.shape[1] - 1
    peak = np.float32(1e-30)
    for c in range(len(z)):
        peak = max(peak, abs(z[c]))
    words[0, n_words] = bits_of(peak / np.float32(byte_scores.ZERO - 1))
    inverse = np.float32(256 * (byte_scores.ZERO - 1)) / peak
    for w in range(n_words):
        high = low = np.int64(0)
        for i in range(4):
            c = 4 * w + i
            x = np.int64(np.rint(z[c] * inverse)) if c < len(z) else 0
            byte = (x + 128) >> 8
            high |= (byte + byte_scores.ZERO) << (8 * i)
            low |= ((x - (byte << 8)) & 255) << (8 * i)
        words[0, w], words[1, w] = np.int32(high), np.int32(low)
    copy_words(words[0], 4, n_words + 1, tile + 4 * lane, byte_scores.LINE)
    copy_words(words[1], 4, n_words, record, 4)


@njit(cache=True, nogil=True)
def encode_rows(layout, slot, position, count, basis, latents, index):
    """Encodes ``count`` rows from row ``slot`` on as latents from ``index`` on.

    layout: of the rows (attention/rows.py). position: of row ``slot``.
    """
    n_kv, r_star = basis.n_kv, latents.score_rank
    width, r_padded = basis.encode.shape
    d_padded = width // n_kv
    x = np.empty((MAX_ROWS, width), np.float32)
    z = np.empty((MAX_ROWS, r_padded), np.float32)
    value = np.empty(layout[V_ROW] // 2, np.float32)
    cosines = np.empty(len(basis.turns), np.float32)
    sines = np.empty(len(basis.turns), np.float32)
    n_words = words_of(r_star)
    words = np.empty((2, n_words + 1), np.int32)
    for start in range(0, count, MAX_ROWS):
        size = min(MAX_ROWS, count - start)
        for j in range(size):
            cos_sin(basis.turns, -np.float64(position + start + j), basis.n_pairs, cosines, sines)
            for g in range(n_kv):
                key = x[j, g * d_padded : (g + 1) * d_padded]
                at = layout[K] + g * layout[K_HEAD] + (slot + start + j) * layout[K_ROW]
                widen_halves(at, d_padded, key)
                rotate_row(key, basis.n_pairs, cosines, sines, np.float32(1) / basis.rope_scale)
        for c in range(0, r_padded, LANES):
            multiply(
                1, size, x.ctypes.data, x.strides[0], 4, basis.encode.ctypes.data + 4 * c,
                basis.encode.strides[0], width, z.ctypes.data + 4 * c, z.strides[0],
            )  # fmt: skip
        for j in range(size):
            i = index + start + j
            tile = latents.score + i // LANES * tile_bytes(n_words)
            record = latents.records + i * latents.record
            write_columns(z[j, :r_star], tile, i % LANES, record, words)
            at = record + 4 * n_words
            scatter_halves(z[j, r_star:], latents.rank - r_star, at, 2)
            values = at + 2 * (latents.rank - r_star)
            for g in range(n_kv):
                at = layout[V] + g * layout[V_HEAD] + (slot + start + j) * layout[V_ROW]
                widen_halves(at, len(value), value)
                quantize_head(value, basis.d_v, latents.bits, values + g * latents.head_bytes)


@njit(cache=True, nogil=True, parallel=PRANGE_ONLY)
def encode_range(layout, slot, position, count, basis, latents, index):
    """``encode_rows`` on all threads."""
    n_piece = (count + PIECE - 1) // PIECE
    for piece in prange(n_piece):
        start = piece * PIECE
        size = min(PIECE, count - start)
        encode_rows(layout, slot + start, position + start, size, basis, latents, index + start)


@njit(cache=True, nogil=True)
def prefetch_rows(chosen, latents):
    """Prefetches what ``reconstruct_rows`` reads."""
    tile = tile_bytes(words_of(latents.score_rank))
    for j in range(len(chosen)):
        i = np.int64(chosen[j])
        prefetch_lines(latents.score + i // LANES * tile, tile)
        prefetch_lines(latents.records + i * latents.record, latents.record)


@njit(cache=True, nogil=True)
def reconstruct_rows(chosen, slots, basis, latents, layout):
    """Writes K and V of latent chosen[j] as f16 rows slots[j] of ``layout``, for all j < count.

    K is decoded and rotated. V is dequantised. chosen, slots int32 (count,), count <= PIECE.
    """
    count = len(chosen)
    n_kv, r, r_star = basis.n_kv, latents.rank, latents.score_rank
    d_padded = layout[K_ROW] // 2
    z = np.empty((count, r + 2 * LANES), np.float32)
    key = np.empty((count, d_padded), np.float32)
    cosines = np.empty((count, len(basis.turns)), np.float32)
    sines = np.empty((count, len(basis.turns)), np.float32)
    n_words = words_of(r_star)
    values = 4 * n_words + 2 * (r - r_star)  # offset of the values in a record
    words = np.empty(n_words + LANES, np.int32)
    for j in range(count):
        i = np.int64(chosen[j])
        tile = latents.score + i // LANES * tile_bytes(n_words)
        at = tile + 4 * (i % LANES)
        copy_words(at, byte_scores.LINE, n_words + 1, words, 4)
        record = latents.records + i * latents.record
        join_bytes(words, record, float_of(words[n_words]), r_star, z[j])
        widen_halves(record + 4 * n_words, r - r_star, z[j, r_star:])
        cos_sin(basis.turns, np.float64(latents.first + i), basis.n_pairs, cosines[j], sines[j])
    for g in range(n_kv):
        decode = basis.decode.ctypes.data + 4 * g * d_padded
        pairs = d_padded - d_padded % (2 * LANES)
        for c in range(0, pairs, 2 * LANES):
            multiply(
                2, count, z.ctypes.data, z.strides[0], 4, decode + 4 * c, basis.decode.strides[0],
                r, key.ctypes.data + 4 * c, key.strides[0],
            )  # fmt: skip
        if pairs < d_padded:
            multiply(
                1, count, z.ctypes.data, z.strides[0], 4, decode + 4 * pairs,
                basis.decode.strides[0], r, key.ctypes.data + 4 * pairs, key.strides[0],
            )  # fmt: skip
        for j in range(count):
            rotate_row(key[j], basis.n_pairs, cosines[j], sines[j], basis.rope_scale)
            at = layout[K] + g * layout[K_HEAD] + slots[j] * layout[K_ROW]
            store_halves(key[j], at, d_padded)
            source = latents.records + np.int64(chosen[j]) * latents.record + values
            at = layout[V] + g * layout[V_HEAD] + slots[j] * layout[V_ROW]
            read_head(latents.bits, source + g * latents.head_bytes, basis.d_v, at)


@njit(cache=True, nogil=True)
def _reconstruct_piece(start, size, basis, latents, layout, slot):
    chosen = np.arange(start, start + size).astype(np.int32)
    slots = np.arange(slot, slot + size).astype(np.int32)
    reconstruct_rows(chosen, slots, basis, latents, layout)


@njit(cache=True, nogil=True, parallel=PRANGE_ONLY)
def reconstruct_range(count, basis, latents, layout, slot):
    """Reconstructs the first ``count`` latents as rows from ``slot`` on, on all threads."""
    for piece in prange((count + PIECE - 1) // PIECE):
        start = piece * PIECE
        size = min(PIECE, count - start)
        _reconstruct_piece(start, size, basis, latents, layout, slot + start)


@njit(cache=True, nogil=True)
def assign_slots(chosen, kept, slots, missing, missing_slots):
    """Assigns slots to the chosen latents. A latent that is reconstructed already keeps its slot.

    chosen int32 (m,) ascending. kept int32 (>= m,): the latent in each slot, or -1. It is updated:
    slots below m hold the chosen latents, the others -1. slots int32 (m,): set to the slot of each
    chosen latent. missing, missing_slots int32 (m,): set to the latents that must be reconstructed
    and their slots. Returns the number of missing latents.
    """
    m, n_missing = len(chosen), 0
    slots[:] = -1
    free = np.empty(m, np.int32)
    n_free = 0
    place = np.full(chosen[-1] + 1 if m else 0, -1, np.int32)  # index of a latent in chosen
    for i in range(m):
        place[chosen[i]] = i
    for slot in range(m):
        latent = kept[slot]
        at = place[latent] if 0 <= latent < len(place) else -1
        if at >= 0 and slots[at] < 0:
            slots[at] = slot
        else:
            free[n_free] = slot
            n_free += 1
    for i in range(m):
        if slots[i] < 0:
            slot = free[n_missing]
            slots[i], kept[slot] = slot, chosen[i]
            missing[n_missing], missing_slots[n_missing] = chosen[i], slot
            n_missing += 1
    kept[m:] = -1
    return n_missing
