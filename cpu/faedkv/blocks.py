"""FAEDKV in blocks: each block of tokens is transformed by itself, and all keep the same waves.

A block's rows are the coefficients of its tokens, and scores and weights turn into each other by
small products with the waves, which stay in the L1 cache:

    scores = waves^T (rows_k . q),    output = (waves p) . rows_v,    p = softmax(scores)

The waves are counted from the middle of a block. So each is the same in both halves, if one is read
backwards, or of the other sign; products of one half's length and a butterfly are enough. Scores of
a block therefore lie as its first half and then its second half backwards.

A few blocks at a time go through all of it with a softmax of their own, and these parts are merged
as flash attention does. Where a block keeps its mean only, it has one score for all its tokens.
Rows are f16, scaled to its range by a gain a block.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit, prange

from sparsekv_cli.cpu.attention.decode import BLOCK as ATTENDED_AT_ONCE
from sparsekv_cli.cpu.attention.decode import (
    TILE,
    attend_tile,
    begin_softmax,
    merge_pieces,
    scaled_copy,
)
from sparsekv_cli.cpu.attention.rows import K_HEAD, K_ROW, V_HEAD, V_ROW, K, V, layout_of
from sparsekv_cli.cpu.attention.tile import (
    NEGATIVE_INFINITY,
    PAD,
    exp_in_place,
    max_of,
    soften,
    tile_scores,
    tile_values,
)
from sparsekv_cli.cpu.faedkv.attention import MEAN
from sparsekv_cli.cpu.faedkv.spectrum import FourierBasis, Mark, is_single
from sparsekv_cli.cpu.jit.llvm import LANES, next_task
from sparsekv_cli.cpu.jit.pointers import on_lines
from sparsekv_cli.cpu.jit.threads import PRANGE_ONLY
from sparsekv_cli.cpu.sals.vectors import multiply, multiply_pair

TOKENS_AT_ONCE = 512  # of the blocks that share a softmax
MEANS_AT_ONCE = 256  # blocks, where each has one score
ONE_THREAD_BELOW = 256  # rows under which threads cost more than they save


class Waves(NamedTuple):
    """First halves of a block's waves and their transposes, f32, padded with zeros.

    P: the longer half of a block, padded to two vectors. In the second half even waves are the same
    backwards, odd ones have the other sign.
    """

    even: np.ndarray  # (even waves, P)
    odd: np.ndarray  # (odd waves, P)
    even_columns: np.ndarray  # (P, even waves padded to a vector)
    odd_columns: np.ndarray  # (P, odd waves padded to a vector)


def centred_waves(n: int, bins: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Even and odd waves of the kept bins around the middle of n tokens: f64 (rows, n) each.

    Together they are an orthonormal basis of what ``waves`` spans.
    """
    angles = np.pi / n * (np.multiply.outer(bins, 2 * np.arange(n) + 1) % (2 * n))
    norm = np.sqrt(np.where(is_single(n, bins), 1, 2) / n)[:, None]
    return (norm * np.cos(angles))[2 * bins != n], (norm * np.sin(angles))[bins != 0]


def make_waves(even: np.ndarray, odd: np.ndarray) -> Waves:
    """even, odd (rows, n) as kernels take them."""
    half = (even.shape[1] + 1) // 2
    rows = [np.pad(x[:, :half], [(0, 0), (0, -half % (2 * LANES))]) for x in (even, odd)]
    columns = [np.pad(x, [(0, -len(x) % LANES), (0, 0)]).T for x in rows]
    return Waves(*(np.ascontiguousarray(x, np.float32) for x in rows + columns))


@njit(cache=True, nogil=True)
def _divide_rows(x, n_block, n_rows, gains):
    """x[:, i] /= the gain, a power of 2, of i's block, f32; n_rows a block."""
    for h in range(x.shape[0]):
        for block in range(n_block):
            inverse = np.float32(1) / gains[block]
            for i in range(block * n_rows, (block + 1) * n_rows):
                x[h, i] *= inverse


@njit(cache=True, nogil=True, fastmath={"nsz"})
def _butterflies(x, n_block, half):
    """(a, b) becomes (a + b, a - b); x f32 (H, >= 2 n_block half) has halves a, b a block."""
    for h in range(x.shape[0]):
        for block in range(n_block):
            at = 2 * block * half
            first, second = x[h, at : at + half], x[h, at + half : at + 2 * half]
            for j in range(half):
                a, b = first[j], second[j]
                first[j], second[j] = a + b, a - b


@njit(cache=True, nogil=True)
def _to_tokens(z, n_block, n_rows, waves, x):
    """x f32 (H, >= 2 P blocks), a number a token, from z f32 (H, >= n_rows blocks), one a wave."""
    n_head, (n_even, half) = len(x), waves.even.shape
    even, odd, row = waves.even.ctypes.data, waves.odd.ctypes.data, waves.even.strides[0]
    for block in range(n_block):
        source = z.ctypes.data + 4 * block * n_rows
        to = x.ctypes.data + 4 * block * 2 * half
        for c in range(0, 4 * half, 4 * 2 * LANES):
            multiply_pair(
                n_head, source, z.strides[0], 4, even + c, row, n_even, to + c, x.strides[0]
            )
            multiply_pair(
                n_head, source + 4 * n_even, z.strides[0], 4, odd + c, row, n_rows - n_even,
                to + 4 * half + c, x.strides[0],
            )  # fmt: skip
    _butterflies(x, n_block, half)


@njit(cache=True, nogil=True)
def _to_waves(x, n_block, n_rows, waves, z):
    """z from x, see ``_to_tokens``; x changes. z f32 (H, >= n_rows blocks + LANES)."""
    n_head, (n_even, half) = len(x), waves.even.shape
    even, even_row = waves.even_columns.ctypes.data, waves.even_columns.strides[0]
    odd, odd_row = waves.odd_columns.ctypes.data, waves.odd_columns.strides[0]
    _butterflies(x, n_block, half)
    for block in range(n_block):  # of a vector that ends behind its rows, the rest is overwritten
        source = x.ctypes.data + 4 * block * 2 * half
        to = z.ctypes.data + 4 * block * n_rows
        for c in range(0, 4 * n_even, 4 * LANES):
            multiply(
                n_head, source, x.strides[0], 4, even + c, even_row, half, to + c, z.strides[0]
            )
        for c in range(0, 4 * (n_rows - n_even), 4 * LANES):
            multiply(
                n_head, source + 4 * half, x.strides[0], 4, odd + c, odd_row, half,
                to + 4 * n_even + c, z.strides[0],
            )  # fmt: skip


@njit(cache=True, nogil=True)
def _attend_blocks(
    q, layout, n_kv, n_rows, length, gains, waves, softcap, first, last, peak, mass, acc
):
    """Softmax state of all heads over the blocks first .. last.

    q f32 (H, d) scaled; layout: of the coefficient rows, ``n_rows`` a block of ``length`` tokens;
    gains f32 (blocks, 2); softcap: 0 for none. peak, mass f32 (H,), acc f32 (H, d_v).
    """
    n_head, d = q.shape
    group, n_block = n_head // n_kv, last - first
    count = n_block * n_rows
    half = waves.even.shape[1]
    is_mean = half == 0
    n_score = n_block if is_mean else n_block * 2 * half
    z = np.empty((n_head, count + PAD), np.float32)
    scores = np.empty((n_head, n_score + PAD), np.float32)
    at = layout[K] + first * n_rows * layout[K_ROW]
    for g in range(n_kv):
        for h in range(g * group, (g + 1) * group, TILE):
            tile = min(TILE, (g + 1) * group - h)
            tile_scores(
                tile, 0, q[h:].ctypes.data, at + g * layout[K_HEAD], layout[K_ROW], 0, count, d,
                z[h].ctypes.data, z.shape[1],
            )  # fmt: skip
    _divide_rows(z, n_block, n_rows, gains[first:last, 0])
    root = np.float32(np.sqrt(length))
    if is_mean:
        for h in range(n_head):
            for i in range(n_block):
                scores[h, i] = z[h, i] / root
    else:
        _to_tokens(z, n_block, n_rows, waves, scores)
    for h in range(n_head):
        for i in range(n_score, n_score + PAD):
            scores[h, i] = NEGATIVE_INFINITY
        at = scores[h].ctypes.data
        if softcap:
            soften(at, n_score, softcap)
        for block in range(n_block if length < 2 * half else 0):  # what is no token
            start = 2 * block * half
            scores[h, start + (length + 1) // 2 : start + half] = NEGATIVE_INFINITY
            scores[h, start + half + length // 2 : start + 2 * half] = NEGATIVE_INFINITY
        peak[h] = max_of(at, n_score)
        mass[h] = exp_in_place(at, n_score, peak[h])
        if is_mean:
            mass[h] *= length
    if is_mean:
        for h in range(n_head):
            for i in range(n_block):
                z[h, i] = scores[h, i] * root
    else:
        _to_waves(scores, n_block, n_rows, waves, z)
    _divide_rows(z, n_block, n_rows, gains[first:last, 1])
    for h in range(n_head):
        for c in range(acc.shape[1]):
            acc[h, c] = 0
    at = layout[V] + first * n_rows * layout[V_ROW]
    for g in range(n_kv):
        for h in range(g * group, (g + 1) * group, TILE):
            tile = min(TILE, (g + 1) * group - h)
            tile_values(
                tile, 0, z[h].ctypes.data, z.shape[1], at + g * layout[V_HEAD], layout[V_ROW], 0,
                count, acc.shape[1], acc[h:].ctypes.data,
            )  # fmt: skip


@njit(cache=True, nogil=True)
def _attend_exact(q, layout, n, n_kv, g, softcap, sinks, peak, mass, acc):
    """Softmax state of kv head g's query heads over n exact rows; see ``_attend_blocks``.

    sinks f32 (H,): scores without values that it begins with, or empty.
    """
    group = q.shape[0] // n_kv
    buffer = np.empty((TILE, ATTENDED_AT_ONCE + PAD), np.float32)
    for h in range(g * group, (g + 1) * group, TILE):
        end = min(h + TILE, (g + 1) * group)
        begin_softmax(sinks[h:end], peak[h:end], mass[h:end])
        acc[h:end] = 0
        attend_tile(
            q[h:end], layout[K] + g * layout[K_HEAD], layout[V] + g * layout[V_HEAD], layout[K_ROW],
            layout[V_ROW], 0, 0, n, softcap, peak[h:end], mass[h:end], acc[h:end], buffer,
        )  # fmt: skip


@njit(cache=True, nogil=True)
def _take_tasks(
    counter, q, exact, n_exact, layout, n_kv, n_rows, length, gains, waves, softcap, sinks, at_once,
    peak, mass, acc
):  # fmt: skip
    """Takes tasks: the exact rows of each kv head, then ``at_once`` blocks after the other."""
    task = next_task(counter)
    while task < n_kv + len(peak) - 1:
        part = task - n_kv
        if part < 0:
            _attend_exact(q, exact, n_exact, n_kv, task, softcap, sinks, peak[0], mass[0], acc[0])
        else:
            first, last = part * at_once, min(len(gains), (part + 1) * at_once)
            _attend_blocks(
                q, layout, n_kv, n_rows, length, gains, waves, softcap, first, last,
                peak[part + 1], mass[part + 1], acc[part + 1],
            )  # fmt: skip
        task = next_task(counter)


@njit(cache=True, nogil=True, parallel=PRANGE_ONLY)
def attend_blocks(
    q, exact, n_exact, layout, n_kv, n_rows, length, gains, waves, scale, softcap, sinks, out,
    n_threads,
):  # fmt: skip
    """Attention of one token over exact rows and blocks of ``length`` tokens.

    q f32 (H, d); exact, layout: of the exact rows and of the coefficient rows, which are f16, see
    attention/rows.py; n_rows of these a block, gains f32 (blocks, 2) of K and V. softcap: 0 for
    none; sinks f32 (H,): scores without values, or empty. out f32 (H, d_v).
    """
    n_block, n_head = len(gains), q.shape[0]
    at_once = TOKENS_AT_ONCE // length if waves.even.shape[1] else MEANS_AT_ONCE
    at_once = max(1, at_once)
    n_part = 1 + (n_block + at_once - 1) // at_once
    peak = np.empty((n_part, n_head), np.float32)
    mass = np.empty((n_part, n_head), np.float32)
    acc = np.empty((n_part, n_head, out.shape[1]), np.float32)
    scaled = scaled_copy(q, scale)
    counter = np.zeros(1, np.int64)
    if n_exact + n_block * n_rows < ONE_THREAD_BELOW:
        n_threads = 1
    for _thread in prange(n_threads):
        _take_tasks(
            counter, scaled, exact, n_exact, layout, n_kv, n_rows, length, gains, waves, softcap,
            sinks, at_once, peak, mass, acc,
        )  # fmt: skip
    for h in range(n_head):
        merge_pieces(peak[:, h], mass[:, h], acc[:, h], out[h])


class BlockSpectrum:
    """The coefficient rows of K and V of blocks of tokens, (G, capacity, width) f16.

    basis: the waves that a block keeps.
    """

    def __init__(self, n_head_kv: int, width: int, width_v: int, basis: FourierBasis) -> None:
        self.basis, self._n_kv = basis, n_head_kv
        self.n_tokens = 0
        even, odd = centred_waves(basis.n, basis.bins)
        self._matrix = np.concatenate([even, odd]).astype(np.float32)
        if basis.kind == MEAN:
            even = odd = np.zeros((0, 0))
        self._waves = make_waves(even, odd)
        self._gains = np.ones((0, 2), np.float32)  # a row a block
        self.k, self.v = (np.zeros((n_head_kv, 0, w), np.float16) for w in (width, width_v))

    @property
    def n_segments(self) -> int:
        return self.n_tokens // self.basis.n

    @property
    def n_rows(self) -> int:
        return self.n_segments * self.basis.n_rows

    @property
    def nbytes(self) -> int:
        return sum(a.nbytes for a in (self.k, self.v, self._gains, self._matrix, *self._waves))

    @property
    def row_bytes(self) -> int:
        """Bytes of one row of K and V in one kv head."""
        return self.k.strides[1] + self.v.strides[1]

    def reserve(self, n: int) -> None:
        """Room for the rows of n tokens; if it has to grow, at least an eighth more."""
        n_rows = n // self.basis.n * self.basis.n_rows
        capacity = self.k.shape[1]
        if n_rows <= capacity:
            return
        capacity = max(n_rows, capacity + capacity // 8 + 32 if capacity else 0)
        grown = []
        for old in (self.k, self.v):
            new = on_lines((old.shape[0], capacity, old.shape[2]), np.float16, zeros=True)
            new[:, : self.n_rows] = old[:, : self.n_rows]
            grown.append(new)
        self.k, self.v = grown
        gains = np.ones((capacity // self.basis.n_rows, 2), np.float32)
        gains[: len(self._gains)] = self._gains
        self._gains, self._layout = gains, layout_of(self.k, self.v)

    def append(self, k: np.ndarray, v: np.ndarray) -> None:
        """New blocks of tokens k f32 (G, m, d), v f32 (G, m, d_v)."""
        length, m = self.basis.n, k.shape[1]
        assert m % length == 0
        self.reserve(self.n_tokens + m)
        rows = slice(self.n_rows, self.n_rows + m // length * self.basis.n_rows)
        first = self.n_tokens // length
        for column, (target, x) in enumerate(((self.k, k), (self.v, v))):
            blocks = x.reshape(len(x), -1, length, x.shape[2])
            found = np.matmul(self._matrix, blocks)  # (G, blocks, rows, d)
            # To a largest value between 2^13 and 2^14: f16 ends at 2^16.
            largest = np.maximum(np.abs(found).max((0, 2, 3)), 1e-30)
            gains = np.exp2(14 - np.frexp(largest)[1]).astype(np.float32)
            found *= gains[:, None, None]
            target[:, rows, : x.shape[2]] = found.reshape(len(x), -1, x.shape[2])
            self._gains[first : first + len(gains), column] = gains
        self.n_tokens += m

    def tokens(self) -> tuple[np.ndarray, np.ndarray]:
        """All tokens back in the time domain, lossy: f32 (G, n_tokens, width) of K and of V."""
        out = []
        n_block = self.n_segments
        for column, array in enumerate((self.k, self.v)):
            rows = array[:, : self.n_rows].astype(np.float32)
            rows = rows.reshape(len(rows), n_block, -1, array.shape[2])
            rows /= self._gains[:n_block, column][:, None, None]
            out.append(np.matmul(self._matrix.T, rows).reshape(len(rows), -1, array.shape[2]))
        return out[0], out[1]

    def mark(self) -> Mark:
        return Mark(self.n_tokens, self.n_rows, 0, None)

    def go_back(self, mark: Mark) -> None:
        """Takes back what came after ``mark``."""
        self.n_tokens = mark.n_tokens

    def attend(
        self,
        q: np.ndarray,
        exact: np.ndarray,
        n: int,
        scale: np.float32,
        softcap: np.float32,
        sinks: np.ndarray,
        n_threads: int,
    ) -> np.ndarray:
        """Attention f32 (H, d_v) of q f32 (H, d) over n exact rows and all blocks.

        softcap, sinks: see ``attend_blocks``.
        """
        out = np.empty((len(q), self.v.shape[2]), np.float32)
        attend_blocks(
            q, exact, n, self._layout, self._n_kv, self.basis.n_rows, self.basis.n,
            self._gains[: self.n_segments], self._waves, scale, softcap, sinks, out, n_threads,
        )  # fmt: skip
        return out
