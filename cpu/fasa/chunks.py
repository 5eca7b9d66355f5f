"""FASA's scores of all keys from their dominant chunks, and each head's choice of rows.

K of a layer lies in two parts (fasa/split.py), so that the scan reads the dominant dims only. f16
are passed as u16. The step in fasa/step.py calls these kernels.
"""

import numpy as np

from sparsekv_cli.cpu.attention.select import order_keys, select_largest
from sparsekv_cli.cpu.attention.softmax import NEGATIVE_INFINITY
from sparsekv_cli.cpu.jit import llvm
from sparsekv_cli.cpu.jit.emitter import emitter
from sparsekv_cli.cpu.jit.kernel import njit
from sparsekv_cli.cpu.jit.llvm import tasks_of
from sparsekv_cli.cpu.jit.value import F32, I32, I64, LANES, const, load, select, store

BLOCK = LANES  # tokens of a block of Kdom
TILE = 4  # query heads that share a loaded block
AT_ONCE = 32  # blocks that all query heads of a group score while they are in the L1 cache
AHEAD_SCAN = 4096  # bytes between a scanned block and its prefetch
AHEAD_LISTED = 2  # blocks between a listed block and its prefetch


# --- token importance: q . k over the dominant dims -----------------------------------------------


def _block_sums(tile, q, at, n_dom, ahead):
    """Returns q[t] . k for the 16 tokens of the block at address ``at``: <16 x float>, t < tile.

    For every tile it does one fma a dim, in the order of the dims. So every caller gets the same
    bits. Meanwhile it prefetches the block at ``ahead``.
    """

    def dim(c, sums):
        at_dim = c * (2 * BLOCK)
        llvm.prefetch(ahead + at_dim)
        keys = llvm.load_half_lanes(at, at_dim)
        new = []
        for t in range(tile):
            query_at = q + (t * n_dom + c) * 4
            new.append(keys.fma(load(F32, query_at).splat(), sums[t]))
        return new

    return llvm.loop(0, n_dom, 1, [const(F32, 0.0)] * tile, dim)


@emitter(tile=range(1, TILE + 1))
def block_maxima(tile, q, dom, n_dom, n_block, best, best_stride):
    """best[t, i] = the largest q[t] . k of the 16 tokens of block i < n_block, t < tile.

    q f32 (tile, n_dom), dom f16 (n_block, n_dom, 16), best f32. Addresses are i64, the stride in
    floats.
    """
    n_bytes = n_dom * (2 * BLOCK)

    @llvm.every(n_block)
    def block(i):
        at = dom + i * n_bytes
        sums = _block_sums(tile, q, at, n_dom, at + AHEAD_SCAN)
        for t in range(tile):
            store(llvm.max_lanes(sums[t]), best + (t * best_stride + i) * 4)


@emitter
def listed_scores(q, dom, n_dom, blocks, count, out):
    """out[16 i + j] = q . k of token j of block blocks[i] (int32), i < count; all are addresses."""
    n_bytes = n_dom * (2 * BLOCK)
    last = count - 1

    def address(i):
        i = select(i < last, i, last)
        return dom + load(I32, blocks + i * 4).to(I64) * n_bytes

    @llvm.every(count)
    def block(i):
        (scores,) = _block_sums(1, q, address(i), n_dom, address(i + AHEAD_LISTED))
        store(scores, out + i * (4 * BLOCK))


@njit(cache=True, nogil=True)
def score_pieces(counter, q, dom, n_split, best):
    """Scores all tokens by the dominant dims (not scaled), and keeps the best of each block.

    Runs tasks until none is left: a kv head and one of ``n_split`` parts of the blocks. q f32 (H,
    n_dom), dom u16 (G, >= n/16, n_dom, 16) holding f16, best f32 (H, ceil(n / 16)). In the last
    block, elements after token n count, too.
    """
    n_kv_head, n_block = dom.shape[0], best.shape[1]
    group = q.shape[0] // n_kv_head
    for task in tasks_of(counter, n_kv_head * n_split):
        head, part = task // n_split, task % n_split
        first, last = part * n_block // n_split, (part + 1) * n_block // n_split
        for start in range(first, last, AT_ONCE):
            size = min(AT_ONCE, last - start)
            for h in range(head * group, (head + 1) * group, TILE):
                block_maxima(
                    min(TILE, (head + 1) * group - h), q[h], dom[head, start], dom.shape[2], size,
                    best[h, start:], best.shape[1],
                )  # fmt: skip


def score_pieces_ref(q, dom):
    """numpy reference: q (H, n_dom), dom f16 (G, b, n_dom, 16) -> scores of all, f64 (H, 16 b)."""
    n_kv_head = dom.shape[0]
    keys = dom.astype(np.float64).swapaxes(2, 3).reshape(n_kv_head, -1, dom.shape[2])
    keys = np.repeat(keys, q.shape[0] // n_kv_head, axis=0)
    return np.einsum("hc,hnc->hn", q.astype(np.float64), keys)


# --- selection ------------------------------------------------------------------------------------


@njit(cache=True, nogil=True)
def scores_of(q, dom, blocks):
    """Returns ``listed_scores`` of one head as a new array f32 (16 m,); blocks int32 (m,)."""
    out = np.empty(BLOCK * blocks.shape[0], np.float32)
    listed_scores(q, dom, dom.shape[1], blocks, blocks.shape[0], out)
    return out


@njit(cache=True, nogil=True)
def bounds_of_blocks(n, n_sinks, n_recent):
    """Returns first, last, back: blocks first .. last - 1 hold all tokens that may be chosen.

    Only blocks 0 .. first and blocks from ``back`` on hold sinks or recent tokens.
    """
    first, last = n_sinks // BLOCK, (n - n_recent - 1) // BLOCK + 1
    return first, last, max(first + 1, last - 1)


@njit(cache=True, nogil=True)
def n_blocks_opened(n, n_sinks, n_recent, k):
    """Returns the number of blocks that ``choose_rows`` scores again for a head."""
    first, last, back = bounds_of_blocks(n, n_sinks, n_recent)
    return first + 1 + (n + BLOCK - 1) // BLOCK - back + min(k - n_sinks - n_recent, last - first)


@njit(cache=True, nogil=True)
def choose_rows(q, dom, best, n, n_sinks, n_recent, rows, scores):
    """Chooses k <= n rows of one head; ascending, ties go to the first.

    They are the first n_sinks tokens, the last n_recent, and the best tokens between. rows int32
    (k,) and their scores f32 (>= k,) are set. q f32 (n_dom,), dom u16 (blocks, n_dom, 16), best f32
    (ceil(n / 16),) from ``score_pieces``. The m best tokens lie in the m blocks with the largest
    maxima, so only these blocks are scored again. Writing all scores would take as long as reading
    the keys.
    """
    low, high, m = n_sinks, n - n_recent, rows.shape[0] - n_sinks - n_recent
    first, last, back = bounds_of_blocks(n, n_sinks, n_recent)
    edges = np.empty(first + 1 + best.shape[0] - back, np.int32)
    for i in range(edges.shape[0]):
        edges[i] = i if i <= first else back + i - first - 1
    edge_scores = scores_of(q, dom, edges)
    shift = BLOCK * (back - first - 1)  # token j lies at j - shift from the block ``back`` on
    for j in range(n_sinks):
        rows[j], scores[j] = j, edge_scores[j]
    for j in range(n_recent):
        row = high + j
        rows[n_sinks + m + j] = row
        scores[n_sinks + m + j] = edge_scores[row - shift if row >= BLOCK * back else row]
    if m == 0:
        return
    maxima = best[first:last].copy()
    for i in (first, last - 1):
        maxima[i - first] = NEGATIVE_INFINITY
        for j in range(max(low, BLOCK * i), min(high, BLOCK * (i + 1))):
            score = edge_scores[j - shift if i >= back else j]
            maxima[i - first] = max(maxima[i - first], score)
    n_block = last - first
    n_open = min(m, n_block)
    keys = np.empty(max(n_block, BLOCK * n_open), np.int32)
    order_keys(maxima, keys, n_block)
    opened = np.empty(n_open, np.int32)
    select_largest(keys, n_block, n_open, opened)
    opened += first
    candidates = scores_of(q, dom, opened)
    for i in (0, n_open - 1):
        for j in range(BLOCK):
            if not low <= BLOCK * opened[i] + j < high:
                candidates[BLOCK * i + j] = NEGATIVE_INFINITY
    order_keys(candidates, keys, BLOCK * n_open)
    chosen = rows[n_sinks : n_sinks + m]
    select_largest(keys, BLOCK * n_open, m, chosen)
    for j in range(m):
        scores[n_sinks + j] = candidates[chosen[j]]
        row = BLOCK * opened[chosen[j] // BLOCK] + chosen[j] % BLOCK
        chosen[j] = min(max(row, low), high - 1)  # NaN scores have no order


def choose_rows_ref(scores, n, n_sinks, n_recent, k):
    """numpy reference: returns the rows of one head, from its scores (>= n,)."""
    middle = np.arange(n_sinks, n - n_recent)
    best = middle[np.argsort(-scores[middle], kind="stable")[: k - n_sinks - n_recent]]
    forced = [*range(n_sinks), *range(n - n_recent, n)]
    return np.sort(np.concatenate([best, forced])).astype(np.int32)


@njit(cache=True, nogil=True)
def count_distinct(rows, n_list, n):
    """Counts the distinct rows < n of each n_list neighbouring lists; returns the counts' sum.

    rows int32 (U, k), U a multiple of n_list.
    """
    total = 0
    for first in range(0, rows.shape[0], n_list):
        seen = np.zeros(n, np.bool_)
        for i in range(first, first + n_list):
            for j in range(rows.shape[1]):
                total += not seen[rows[i, j]]
                seen[rows[i, j]] = True
    return total
