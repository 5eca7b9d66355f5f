"""FAEDKV in blocks: each block of tokens is transformed by itself, and all keep the same waves.

A block's rows are the coefficients of its tokens, and scores and weights turn into each other by
small products with the waves, which stay in the L1 cache:

    scores = waves^T (rows_k . q),    output = (waves p) . rows_v,    p = softmax(scores)

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
from sparsekv_cli.cpu.faedkv.spectrum import FourierBasis, Mark
from sparsekv_cli.cpu.jit.llvm import LANES, next_task
from sparsekv_cli.cpu.jit.pointers import on_lines
from sparsekv_cli.cpu.jit.threads import PRANGE_ONLY
from sparsekv_cli.cpu.sals.vectors import multiply, multiply_pair

TOKENS_AT_ONCE = 512  # of the blocks that share a softmax
MEANS_AT_ONCE = 256  # blocks, where each has one score
ONE_THREAD_BELOW = 256  # rows under which threads cost more than they save


class Waves(NamedTuple):
    """The waves of a block and their transpose, f32, padded with zeros."""

    waves: np.ndarray  # (rows, L padded to two vectors)
    transposed: np.ndarray  # (L, rows padded to one vector)


def make_waves(matrix: np.ndarray) -> Waves:
    """matrix (rows, L) as kernels take it."""
    n_rows, length = matrix.shape
    waves = np.pad(matrix, [(0, 0), (0, -length % (2 * LANES))])
    transposed = np.pad(matrix, [(0, -n_rows % LANES), (0, 0)]).T
    return Waves(*(np.ascontiguousarray(a, np.float32) for a in (waves, transposed)))


@njit(cache=True, nogil=True)
def _scale_rows(x, n_rows, factors, first):
    """x[:, i] /= the gain, a power of 2, of i's block; n_rows a block, gains f32 from ``first``."""
    for h in range(x.shape[0]):
        for block in range(x.shape[1] // n_rows):
            inverse = np.float32(1) / factors[first + block]
            for i in range(block * n_rows, (block + 1) * n_rows):
                x[h, i] *= inverse


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
    is_mean = waves.waves.shape[0] == 0
    n_score = n_block if is_mean else n_block * length
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
    _scale_rows(z[:, :count], n_rows, gains[:, 0], first)
    root = np.float32(np.sqrt(length))
    if is_mean:
        for h in range(n_head):
            for i in range(n_block):
                scores[h, i] = z[h, i] / root
    else:
        for block in range(n_block):
            for c in range(0, length, 2 * LANES):
                multiply_pair(
                    n_head, z.ctypes.data + 4 * block * n_rows, z.strides[0], 4,
                    waves.waves.ctypes.data + 4 * c, waves.waves.strides[0], n_rows,
                    scores.ctypes.data + 4 * (block * length + c), scores.strides[0],
                )  # fmt: skip
    for h in range(n_head):
        scores[h, n_score:] = NEGATIVE_INFINITY
        at = scores[h].ctypes.data
        if softcap:
            soften(at, n_score, softcap)
        peak[h] = max_of(at, n_score)
        mass[h] = exp_in_place(at, n_score, peak[h])
        if is_mean:
            mass[h] *= length
    if is_mean:
        for h in range(n_head):
            for i in range(n_block):
                z[h, i] = scores[h, i] * root
    else:
        width = waves.transposed.shape[1]
        w = np.empty((n_head, width), np.float32)
        for block in range(n_block):
            for c in range(0, width, LANES):
                multiply(
                    n_head, scores.ctypes.data + 4 * block * length, scores.strides[0], 4,
                    waves.transposed.ctypes.data + 4 * c, waves.transposed.strides[0], length,
                    w.ctypes.data + 4 * c, w.strides[0],
                )  # fmt: skip
            z[:, block * n_rows : (block + 1) * n_rows] = w[:, :n_rows]
    _scale_rows(z[:, :count], n_rows, gains[:, 1], first)
    acc[:] = 0
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
    at_once = TOKENS_AT_ONCE // length if len(waves.waves) else MEANS_AT_ONCE
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
        matrix = np.zeros((0, 0), np.float32) if basis.kind == MEAN else basis.matrix
        self._waves = make_waves(matrix)
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
        return sum(a.nbytes for a in (self.k, self.v, self._gains, *self._waves))

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
            found = np.matmul(self.basis.matrix, blocks)  # (G, blocks, rows, d)
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
            out.append(np.matmul(self.basis.matrix.T, rows).reshape(len(rows), -1, array.shape[2]))
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
