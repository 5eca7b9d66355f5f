"""SALS' latents: keys to latents and back, and their store.

The latent of a token is its pre-RoPE key of all kv heads, times a basis E: z = k E, in f16. Scores
use its first r* columns. These lie in tiles of sixteen tokens, (tile, r*, 16), so that a scan has
one token a lane. The other columns, which only chosen rows need, lie as (token, r - r*), and the
token's quantised values (sals/values.py) beside them.

Letters: G kv heads, d head size, d' = d padded to 16, r rank, r* score rank.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit, prange

from sparsekv_cli.cpu.attention.store import store_halves
from sparsekv_cli.cpu.jit.llvm import LANES, prefetch_lines
from sparsekv_cli.cpu.jit.pointers import on_lines
from sparsekv_cli.cpu.jit.threads import PRANGE_ONLY
from sparsekv_cli.cpu.sals.values import head_bytes, quantize_head, read_head
from sparsekv_cli.cpu.sals.vectors import (
    MAX_ROWS,
    cos_sin,
    gather_halves,
    multiply,
    multiply_pair,
    rotate_row,
    scatter_halves,
    widen,
)

PIECE = 32  # rows that are reconstructed at a time: they stay in the L1 cache


class RowPointers(NamedTuple):
    """f16 K and V rows of a KVStore: addresses, then bytes between kv heads and rows."""

    k: int
    v: int
    k_head: int
    v_head: int
    k_row: int
    v_row: int


class Latents(NamedTuple):
    """Addresses of the three parts of a layer's latents, and how they are laid out."""

    score: int  # f16 (tiles, r*, 16), fifteen columns more readable behind the last
    rest: int  # f16 (tokens, r - r*), sixteen more readable behind the last
    values: int  # (tokens, G, head bytes)
    rank: int
    score_rank: int
    bits: int
    head_bytes: int  # of one token's values in one kv head
    first: int  # position of latent 0


class LatentBasis(NamedTuple):
    """The matrices that turn one layer's keys into latents and back."""

    encode: np.ndarray  # E f32 (G d', r padded to 16)
    decode: np.ndarray  # D^T f32 (r, >= G d')
    turns: np.ndarray  # theta / 2 pi f64 (pairs padded to 16,)
    n_pairs: int
    rope_scale: np.float32
    d: int
    d_v: int
    n_kv: int


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
    # Sixteen floats more a row, so that rows do not all fall on the same lines of the L1 cache.
    decode = np.zeros((rank, n_kv * width + LANES), np.float32)
    by_head = decode[:, :-LANES].reshape(rank, n_kv, width)
    by_head[..., :d] = (vectors / weights[:, None]).T.reshape(rank, n_kv, d)
    decode[:, :-LANES] = by_head.reshape(rank, -1)
    turns = np.zeros(-(-len(theta) // LANES) * LANES)
    turns[: len(theta)] = theta / (2 * np.pi)
    return LatentBasis(
        encode.reshape(n_kv * width, -1), decode, turns, len(theta), np.float32(rope_scale), d, d_v,
        n_kv,
    )  # fmt: skip


class LatentStore:
    """Latents and quantised values of a layer's tokens from position ``first`` on, growing."""

    def __init__(
        self, rank: int, score_rank: int, bits: int, first: int, basis: LatentBasis
    ) -> None:
        self.n, self.first = 0, first
        self._shape = rank, score_rank, bits
        self._head_bytes = head_bytes(basis.d_v, bits)
        self._row = basis.n_kv * self._head_bytes
        self._arrays: tuple[np.ndarray, ...] = ()
        self._allocate(0)

    def _allocate(self, capacity: int) -> None:
        """Room for ``capacity`` tokens; keeps those there are."""
        rank, score_rank, _ = self._shape
        n_rest = rank - score_rank
        capacity = -(-capacity // (2 * LANES)) * 2 * LANES  # two tiles are scored at a time
        arrays = (
            on_lines(capacity * score_rank + LANES**2, np.float16),
            on_lines(capacity * n_rest + LANES, np.float16),
            on_lines(capacity * self._row, np.uint8),
        )
        if self.n:
            tiles = -(-self.n // LANES) * LANES
            sizes = (tiles * score_rank, self.n * n_rest, self.n * self._row)
            for i, size in enumerate(sizes):
                arrays[i][:size] = self._arrays[i][:size]
        self.capacity, self._arrays = capacity, arrays
        first, rest, values = (a.__array_interface__["data"][0] for a in arrays)
        self.table = Latents(first, rest, values, *self._shape, self._head_bytes, self.first)

    @property
    def nbytes(self) -> int:
        return sum(a.nbytes for a in self._arrays)

    @property
    def row_bytes(self) -> int:
        """Bytes of one token."""
        return 2 * self._shape[0] + self._row

    def reserve(self, n: int) -> None:
        """Room for ``n`` tokens; if it has to grow, at least a sixteenth more."""
        if n > self.capacity:
            self._allocate(n if self.n == 0 else max(n, self.capacity + self.capacity // 16 + 256))


def rotate_ref(x: np.ndarray, positions: np.ndarray, theta: np.ndarray, scale: float) -> np.ndarray:
    """x (..., n, d) half-split, rotated to ``positions`` (n,); rotated dims times ``scale``."""
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
def encode_rows(rows, slot, position, count, basis, latents, index):
    """Encodes ``count`` rows, from row ``slot`` and ``position`` on, as latents ``index`` on."""
    n_kv, r_star = basis.n_kv, latents.score_rank
    width, r_padded = basis.encode.shape
    d_padded = width // n_kv
    x = np.empty((MAX_ROWS, width), np.float32)
    z = np.empty((MAX_ROWS, r_padded), np.float32)
    value = np.empty(rows.v_row // 2, np.float32)
    cosines = np.empty(len(basis.turns), np.float32)
    sines = np.empty(len(basis.turns), np.float32)
    for start in range(0, count, MAX_ROWS):
        size = min(MAX_ROWS, count - start)
        for j in range(size):
            cos_sin(
                basis.turns.ctypes.data, -np.float64(position + start + j), basis.n_pairs,
                cosines.ctypes.data, sines.ctypes.data,
            )  # fmt: skip
            for g in range(n_kv):
                key = x[j, g * d_padded : (g + 1) * d_padded]
                at = rows.k + g * rows.k_head + (slot + start + j) * rows.k_row
                widen(at, d_padded, key.ctypes.data)
                rotate_row(
                    key.ctypes.data, basis.n_pairs, cosines.ctypes.data, sines.ctypes.data,
                    np.float32(1) / basis.rope_scale,
                )  # fmt: skip
        for c in range(0, r_padded, LANES):
            multiply(
                size, x.ctypes.data, x.strides[0], 4, basis.encode.ctypes.data + 4 * c,
                basis.encode.strides[0], width, z.ctypes.data + 4 * c, z.strides[0],
            )  # fmt: skip
        for j in range(size):
            i = index + start + j
            at = latents.score + 2 * (i // LANES * LANES * r_star + i % LANES)
            scatter_halves(z[j].ctypes.data, r_star, at, 2 * LANES)
            n_rest = latents.rank - r_star
            at = latents.rest + 2 * i * n_rest
            scatter_halves(z[j, r_star:].ctypes.data, n_rest, at, 2)
            for g in range(n_kv):
                at = rows.v + g * rows.v_head + (slot + start + j) * rows.v_row
                widen(at, len(value), value.ctypes.data)
                at = latents.values + (i * n_kv + g) * latents.head_bytes
                quantize_head(value, basis.d_v, latents.bits, at)


@njit(cache=True, nogil=True, parallel=PRANGE_ONLY)
def encode_range(rows, slot, position, count, basis, latents, index):
    """``encode_rows`` on all threads."""
    n_piece = (count + PIECE - 1) // PIECE
    for piece in prange(n_piece):
        start = piece * PIECE
        size = min(PIECE, count - start)
        encode_rows(rows, slot + start, position + start, size, basis, latents, index + start)


@njit(cache=True, nogil=True)
def prefetch_rows(chosen, basis, latents):
    """Prefetches what ``reconstruct_rows`` reads."""
    rest = 2 * (latents.rank - latents.score_rank)
    values = basis.n_kv * latents.head_bytes
    for j in range(len(chosen)):
        i = np.int64(chosen[j])
        tile = 2 * LANES * latents.score_rank
        prefetch_lines(latents.score + i // LANES * tile, tile)
        prefetch_lines(latents.rest + i * rest, rest)
        prefetch_lines(latents.values + i * values, values)


@njit(cache=True, nogil=True)
def reconstruct_rows(chosen, basis, latents, out, slot):
    """K (decoded, rotated to its position) and V of the latents ``chosen`` int32, at most PIECE.

    Written as f16 rows ``slot`` on of ``out``.
    """
    count = len(chosen)
    n_kv, r, r_star = basis.n_kv, latents.rank, latents.score_rank
    d_padded = out.k_row // 2
    z = np.empty((count, r + LANES), np.float32)
    key = np.empty((count, d_padded), np.float32)
    cosines = np.empty((count, len(basis.turns)), np.float32)
    sines = np.empty((count, len(basis.turns)), np.float32)
    for j in range(count):
        i = np.int64(chosen[j])
        at = latents.score + 2 * (i // LANES * LANES * r_star + i % LANES)
        gather_halves(at, 2 * LANES, r_star, z[j].ctypes.data)
        at = latents.rest + 2 * i * (r - r_star)
        widen(at, r - r_star, z[j, r_star:].ctypes.data)
        cos_sin(
            basis.turns.ctypes.data, np.float64(latents.first + i), basis.n_pairs,
            cosines[j].ctypes.data, sines[j].ctypes.data,
        )  # fmt: skip
    for g in range(n_kv):
        decode = basis.decode.ctypes.data + 4 * g * d_padded
        pairs = d_padded - d_padded % (2 * LANES)
        for c in range(0, pairs, 2 * LANES):
            multiply_pair(
                count, z.ctypes.data, z.strides[0], 4, decode + 4 * c, basis.decode.strides[0], r,
                key.ctypes.data + 4 * c, key.strides[0],
            )  # fmt: skip
        if pairs < d_padded:
            multiply(
                count, z.ctypes.data, z.strides[0], 4, decode + 4 * pairs,
                basis.decode.strides[0], r, key.ctypes.data + 4 * pairs, key.strides[0],
            )  # fmt: skip
        for j in range(count):
            rotate_row(
                key[j].ctypes.data, basis.n_pairs, cosines[j].ctypes.data, sines[j].ctypes.data,
                basis.rope_scale,
            )  # fmt: skip
            at = out.k + g * out.k_head + (slot + j) * out.k_row
            store_halves(key[j].ctypes.data, at, d_padded)
            source = latents.values + (np.int64(chosen[j]) * n_kv + g) * latents.head_bytes
            at = out.v + g * out.v_head + (slot + j) * out.v_row
            read_head(latents.bits, source, basis.d_v, at)


@njit(cache=True, nogil=True)
def _reconstruct_piece(start, size, basis, latents, out, slot):
    chosen = np.arange(start, start + size).astype(np.int32)
    reconstruct_rows(chosen, basis, latents, out, slot)


@njit(cache=True, nogil=True, parallel=PRANGE_ONLY)
def reconstruct_range(count, basis, latents, out, slot):
    """``reconstruct_rows`` of latents 0 .. count on all threads."""
    for piece in prange((count + PIECE - 1) // PIECE):
        start = piece * PIECE
        size = min(PIECE, count - start)
        _reconstruct_piece(start, size, basis, latents, out, slot + start)
