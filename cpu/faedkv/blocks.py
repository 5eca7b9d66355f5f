"""FAEDKV in blocks: each block of tokens is transformed alone, and all keep the same waves.

A block's rows are the coefficients of its tokens. Small products with the waves, which stay in the
L1 cache, give the scores and the output:

    scores = waves^T (rows_k . q),    output = (waves p) . rows_v,    p = softmax(scores)

The waves have their origin in the middle of a block. So the second half of a wave is its first half
backwards, with the same or the opposite sign. The quarters of a half have the same symmetry. So
products over a quarter of the tokens and two levels of butterflies are enough. ``_quarters`` says
in which order the scores of a block lie.

Sixteen blocks are a group: each block is a lane of the vectors. A group's rows of one wave are
contiguous. Each group has its own softmax. The groups are merged as in flash attention. A block
that keeps its mean only has one score for all its tokens. Rows are f16. A gain a block scales them
to the range of f16.
"""

from typing import Any

import numpy as np
from numba import carray

from sparsekv_cli.cpu.attention.decode import (
    TILE,
    Softmax,
    attend_heads,
    begin_softmax,
    merge_pieces,
)
from sparsekv_cli.cpu.attention.rows import (
    K_HEAD,
    K_ROW,
    V_HEAD,
    V_ROW,
    K,
    V,
    layout_of,
    successive_rows,
)
from sparsekv_cli.cpu.attention.softmax import NEGATIVE_INFINITY, exponentiate
from sparsekv_cli.cpu.attention.tile import tile_scores, tile_values
from sparsekv_cli.cpu.faedkv.frequencies import FourierBasis, centred_waves
from sparsekv_cli.cpu.faedkv.spectrum import Mark
from sparsekv_cli.cpu.faedkv.state import BlocksBuffers, BlocksState, BlocksWork
from sparsekv_cli.cpu.jit.kernel import njit
from sparsekv_cli.cpu.jit.llvm import keep, tasks_of
from sparsekv_cli.cpu.jit.pointers import grown, integer_pointer
from sparsekv_cli.cpu.jit.threads import blas_threads
from sparsekv_cli.cpu.jit.value import LANES
from sparsekv_cli.cpu.sals.vectors import multiply, scale_lanes
from sparsekv_cli.cpu.vector.put import put_scaled
from sparsekv_cli.cpu.vector.run import KernelStep, memory_of, run
from sparsekv_cli.cpu.vector.views import scratch, view

MEANS_AT_ONCE = 256  # blocks of a task, if each has one score
ONE_THREAD_BELOW = 256  # rows under which threads cost more than they save
LINE = 4 * LANES  # bytes of one number of each block of a group


@njit(cache=True, nogil=True, fastmath={"nsz"})
def _quarters(x, size):
    """Turns the four parts' sums into four quarters of tokens, or back, in place.

    x f32 (>= 4 size). The quarters are: the first; the second backwards; the fourth backwards; the
    third.
    """
    a, b, c, d = x[:size], x[size : 2 * size], x[2 * size : 3 * size], x[3 * size : 4 * size]
    for i in range(size):
        even, even_back, odd, odd_back = a[i] + b[i], a[i] - b[i], c[i] + d[i], c[i] - d[i]
        a[i], b[i], c[i], d[i] = even + odd, even_back + odd_back, even - odd, even_back - odd_back


@njit(cache=True, nogil=True)
def _to_tokens(z, waves, n_waves, x):
    """Transforms z f32 (>= rows LANES), numbers of waves, to x f32 (>= length LANES), of tokens."""
    quarter, row = waves.shape[1], 0
    for part in range(4):
        multiply(
            1, quarter, waves.ctypes.data + 4 * row * quarter, 4, 4 * quarter,
            z.ctypes.data + row * LINE, LINE, n_waves[part],
            x.ctypes.data + part * quarter * LINE, LINE,
        )  # fmt: skip
        row += n_waves[part]
    _quarters(x, quarter * LANES)


@njit(cache=True, nogil=True)
def _to_waves(x, waves, n_waves, z):
    """Transforms x to z, see ``_to_tokens``; overwrites x."""
    quarter, row = waves.shape[1], 0
    _quarters(x, quarter * LANES)
    for part in range(4):
        multiply(
            1, n_waves[part], waves.ctypes.data + 4 * row * quarter, 4 * quarter, 4,
            x.ctypes.data + part * quarter * LINE, LINE, quarter, z.ctypes.data + row * LINE, LINE,
        )  # fmt: skip
        row += n_waves[part]


@njit(cache=True, nogil=True)
def _weigh_means(z, n_block, length, from_k, from_v, softcap):
    """``_weigh_blocks`` for blocks with one score each; from_k, from_v f32 (>= n_block,)."""
    root = np.float32(np.sqrt(length))
    for i in range(n_block):
        z[i] *= from_k[i] / root
    peak, mass = exponentiate(z, n_block, softcap, NEGATIVE_INFINITY)
    for i in range(n_block):
        z[i] *= from_v[i] * root
    return peak, mass * np.float32(length)


@njit(cache=True, nogil=True)
def _weigh_blocks(z, n_block, waves, n_waves, from_k, from_v, softcap, x):
    """Returns peak and mass of one head's softmax over a group of blocks.

    z f32 (>= rows LANES + PAD): the rows' dot products; replaced by the factors of the value rows.
    from_k, from_v f32 (LANES,): 1 / gain. x f32 (>= length LANES + PAD): scratch.
    """
    n_rows, quarter = waves.shape
    scale_lanes(z, n_rows, from_k)
    _to_tokens(z, waves, n_waves, x)
    n = 4 * quarter * LANES
    for block in range(n_block, LANES):
        x[block:n:LANES] = NEGATIVE_INFINITY
    peak, mass = exponentiate(x, n, softcap, NEGATIVE_INFINITY)
    _to_waves(x, waves, n_waves, z)
    scale_lanes(z, n_rows, from_v)
    return peak, mass


@njit(cache=True, nogil=True, forceinline=True)
def _attend_group(this, q, g, first, n_block, peak, mass, acc, z, x):
    """Computes the softmax of one kv head's query heads over blocks first .. first + n_block - 1.

    this: the view of a BlocksState (faedkv/state.py). g: the kv head. q f32 (heads, d): its query
    heads, scaled. It writes the state that ``merge_pieces`` takes: peak, mass f32 (heads,) and acc
    f32 (heads, d_v). z f32 (TILE, at_once n_rows + PAD): scratch, the scores of a tile of heads. x:
    scratch of ``_weigh_blocks``.
    """
    layout, n_rows, d, d_v = this.layout, this.n_rows, q.shape[1], acc.shape[1]
    from_k, from_v = this.inverse[0, first:], this.inverse[1, first:]
    is_mean = this.quarter == 0
    count = n_block if is_mean else n_rows * LANES
    k = layout[K] + g * layout[K_HEAD] + first * n_rows * layout[K_ROW]
    v = layout[V] + g * layout[V_HEAD] + first * n_rows * layout[V_ROW]
    acc[:] = 0
    for h in range(0, len(q), TILE):
        tile = min(TILE, len(q) - h)
        tile_scores(tile, 0, q[h:], k, layout[K_ROW], 0, count, d, z, z.shape[1])
        for t in range(tile):
            if is_mean:
                state = _weigh_means(z[t], n_block, this.length, from_k, from_v, this.softcap)
            else:
                state = _weigh_blocks(
                    z[t], n_block, this.waves, this.n_waves, from_k, from_v, this.softcap, x
                )
            peak[h + t], mass[h + t] = state
        tile_values(tile, 0, z, z.shape[1], v, layout[V_ROW], 0, count, d_v, acc[h:])


@njit(cache=True, nogil=True)
def run_thread(at, task, counter, shared, own):
    """Runs tasks until none is left: a kv head's exact rows, or a group of its blocks.

    See ``run`` (cpu/vector/run.py).
    """
    this, work = view(BlocksState, at), scratch(BlocksWork, at, shared)
    buffers, tasks = scratch(BlocksBuffers, at, own), carray(integer_pointer(counter), 1)
    n_kv, at_once, group = this.n_kv, this.at_once, this.n_head // this.n_kv
    for i in tasks_of(tasks, n_kv * len(work.peak)):
        part, g = i // n_kv, i % n_kv
        heads = slice(g * group, (g + 1) * group)
        peak, mass, acc = work.peak[part, heads], work.mass[part, heads], work.acc[part, heads]
        q = work.queries[heads]
        if part == 0:
            state = Softmax(peak=peak, mass=mass, acc=acc)
            begin_softmax(this.sinks[heads], state)
            rows = successive_rows(this.exact, g, 0, this.n_exact)
            attend_heads(q, rows, this.softcap, state, buffers.scores)
        else:
            first = (part - 1) * at_once
            n_block = min(at_once, this.n_block - first)
            _attend_group(
                this, q, g, first, n_block, peak, mass, acc, buffers.waves, buffers.tokens
            )


@njit(cache=True, nogil=True)
def attend_blocks(at):
    """Computes attention of one token over exact rows and blocks; at: of a BlocksState."""
    this = view(BlocksState, at)
    is_small = this.n_exact + this.n_block * this.n_rows < ONE_THREAD_BELOW
    n_threads = 1 if is_small else this.n_threads
    memory = memory_of(BlocksWork, BlocksBuffers, at, n_threads)
    work = scratch(BlocksWork, at, memory.shared)
    put_scaled(work.queries, this.q, this.scale)
    run(this.thread, n_threads, at, 0, memory)
    for h in range(this.n_head):
        merge_pieces(work.peak[:, h], work.mass[:, h], work.acc[:, h], this.out[h])
    keep(memory)


class BlockSpectrum:
    """The coefficient rows of K and V of blocks of tokens, (G, capacity, width) f16.

    The rows of a group of LANES blocks are (wave, block). basis: the waves that a block keeps; its
    length is a multiple of 4.
    """

    def __init__(self, n_head_kv: int, width: int, width_v: int, basis: FourierBasis) -> None:
        self.basis = basis
        self.n_tokens = 0
        matrix, n_waves = centred_waves(basis.n, basis.bins)
        self._matrix = matrix.astype(np.float32)
        columns = 0 if basis.is_mean else basis.n // 4
        self._waves = self._matrix[:, :columns].copy()
        at_once = MEANS_AT_ONCE if basis.is_mean else LANES
        state = BlocksState(
            n_kv=n_head_kv, length=basis.n, at_once=at_once, waves=self._waves,
            n_waves=np.array(n_waves, np.int64),
        )  # fmt: skip
        self._step = KernelStep(state, run_thread)
        self._inverse = np.ones((2, 0), np.float32)  # 1 / gain of K and V, a column a block
        self.k, self.v = (np.zeros((n_head_kv, 0, w), np.float16) for w in (width, width_v))

    @property
    def n_segments(self) -> int:
        return self.n_tokens // self.basis.n

    @property
    def n_rows(self) -> int:
        return self.n_segments * self.basis.n_rows

    @property
    def nbytes(self) -> int:
        return sum(a.nbytes for a in (self.k, self.v, self._inverse, self._matrix, self._waves))

    @property
    def row_bytes(self) -> int:
        """Bytes of one row of K and V in one kv head."""
        return self.k.strides[1] + self.v.strides[1]

    def _groups(self, array: np.ndarray) -> np.ndarray:
        """Returns a view of K or V as (G, groups, waves, LANES, width)."""
        return array.reshape(len(array), -1, self.basis.n_rows, LANES, array.shape[2])

    def reserve(self, n: int) -> None:
        """Makes room for the rows of n tokens, in whole groups; grows by at least an eighth."""
        n_block, capacity = n // self.basis.n, self._inverse.shape[1]
        if n_block <= capacity:
            return
        n_group = -(-max(n_block, capacity + capacity // 8) // LANES)
        n_rows = n_group * LANES * self.basis.n_rows
        self.k, self.v = (grown(old, 1, n_rows) for old in (self.k, self.v))
        self._inverse = grown(self._inverse, 1, n_group * LANES, fill=1)
        self._step.state.set(layout=layout_of(self.k, self.v), inverse=self._inverse)

    def append(self, k: np.ndarray, v: np.ndarray) -> None:
        """Appends blocks of tokens k f32 (G, m, d), v f32 (G, m, d_v); m: a multiple of basis.n."""
        length, m = self.basis.n, k.shape[1]
        assert m % length == 0
        self.reserve(self.n_tokens + m)
        group, lane = np.divmod(self.n_tokens // length + np.arange(m // length), LANES)
        for target, inverse, x in zip((self.k, self.v), self._inverse, (k, v), strict=True):
            blocks = x.reshape(len(x), -1, length, x.shape[2])
            with blas_threads(1):  # small matrices: threads of BLAS would mostly wait
                found = np.matmul(self._matrix, blocks)  # (G, blocks, rows, d)
            # A gain moves the largest value to between 2^13 and 2^14. f16 ends at 2^16.
            largest = np.maximum(np.abs(found).max((0, 2, 3)), 1e-30)
            gains = np.exp2(14 - np.frexp(largest)[1]).astype(np.float32)
            found *= gains[:, None, None]
            self._groups(target)[:, group, :, lane, : x.shape[2]] = found.swapaxes(0, 1)
            inverse[group * LANES + lane] = 1 / gains
        self.n_tokens += m

    def tokens(self) -> tuple[np.ndarray, np.ndarray]:
        """Returns all tokens in the time domain, lossy: f32 (G, n_tokens, width) of K and of V."""
        out = []
        group, lane = np.divmod(np.arange(self.n_segments), LANES)
        for array, inverse in zip((self.k, self.v), self._inverse, strict=True):
            rows = self._groups(array)[:, group, :, lane].astype(np.float32)  # (blocks, G, ..)
            rows *= inverse[: self.n_segments, None, None, None]
            tokens = np.matmul(self._matrix.T, rows).swapaxes(0, 1)
            out.append(tokens.reshape(len(array), -1, array.shape[2]))
        return out[0], out[1]

    def mark(self) -> Mark:
        return Mark(self.n_tokens)

    def go_back(self, mark: Mark) -> None:
        """Drops the tokens after ``mark``."""
        self.n_tokens = mark.n_tokens

    def copied_bytes(self, mark: Mark) -> int:
        """Returns 0: blocks do not change."""
        return 0

    def attend(
        self,
        q: np.ndarray,
        store: Any,
        scale: np.float32,
        softcap: np.float32,
        sinks: np.ndarray,
        n_threads: int,
    ) -> np.ndarray:
        """Returns attention f32 (H, d_v) of q f32 (H, d) over a KVStore's rows and all blocks.

        softcap: 0 for none; sinks f32 (H,): scores without values, or empty.
        """
        out = np.empty((len(q), self.v.shape[2]), np.float32)
        state = self._step.state
        state.set(
            exact=store.layout, n_exact=store.n, n_block=self.n_segments, scale=scale,
            softcap=softcap, n_threads=n_threads, q=q, sinks=sinks if len(sinks) else None, out=out,
        )  # fmt: skip
        attend_blocks(self._step.at)
        return out
