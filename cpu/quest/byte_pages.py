"""Pages as bytes: the summaries of keys that choose the pages of a prefill, and their scores.

A page's summary is the mean and the deviation of its keys (cpu/quest/pages.py), 2 d numbers. The
centre of all keys is subtracted from the mean. All scores of a query then change by one number, so
the choice of its pages stays. A page has one scale. Numbers are rounded to bytes:

    mean - centre     3.0 -1.5  0.2     scale 3.0 / 127    bytes  128 + (127, -64, 8)
    deviation         0.5  0.1  0.0                        bytes         21,   4, 0

Pages lie in tiles of 16, (words, 16, 4), as attention/byte_scores.py reads them. A word is four
dims. A query is rounded likewise: q and |q|, one after the other, are signed bytes with one scale.
"""

import numpy as np
from numba import prange, types

from sparsekv_cli.cpu.attention import byte_scores
from sparsekv_cli.cpu.attention.byte_scores import LINE, MAX_QUERIES, PAIR, ZERO
from sparsekv_cli.cpu.attention.flash import larger
from sparsekv_cli.cpu.attention.prefill_bf16 import F32_ROWS, wide_lanes
from sparsekv_cli.cpu.attention.rows import F16 as F16_ROWS
from sparsekv_cli.cpu.attention.rows import K_HEAD, K_KIND, K_ROW, K
from sparsekv_cli.cpu.attention.tile import widen_row
from sparsekv_cli.cpu.jit import llvm
from sparsekv_cli.cpu.jit.emitter import LITERAL, emitter
from sparsekv_cli.cpu.jit.kernel import njit
from sparsekv_cli.cpu.jit.llvm import tasks_of
from sparsekv_cli.cpu.jit.threads import PRANGE_ONLY
from sparsekv_cli.cpu.jit.value import (
    F32,
    I8,
    I32,
    LANES,
    VF,
    VI,
    call_named,
    const,
    load,
    store,
    vec,
)
from sparsekv_cli.cpu.layer.hadamard import rotate_row
from sparsekv_cli.cpu.quest.pages import page_summaries_ref

PAGE = 8  # rows that are chosen together
LARGEST = 127  # of a rounded number
SMALLEST = np.float32(1e-30)  # a scale for numbers that are all 0
SPAN = 16 * PAIR  # pages of a task


# --- summaries ------------------------------------------------------------------------------------


@emitter(returns=types.float32, kind=LITERAL)
def _summarise(kind, rows, row_bytes, width, centre, out):
    """out f32 (2 width,) = mean - centre and deviation of PAGE rows, addresses.

    kind: a literal, F16_ROWS or F32_ROWS. width: a multiple of 16. Returns the largest magnitude of
    out. The deviation comes from differences to the mean, so that no digits cancel.
    """
    share, zero = const(F32, 1 / PAGE), const(F32, 0.0)
    places = [rows + row_bytes * j for j in range(PAGE)]

    def size(x):
        return x.call("fabs")

    def chunk(c, most):
        at = c * 4
        x = [wide_lanes(kind, place, c) for place in places]
        mean = zero
        for row in x:
            mean = mean + row
        mean, squares = mean * share, zero
        for row in x:
            deviation = row - mean
            squares = deviation.fma(deviation, squares)
        deviation = call_named("llvm.sqrt.v16f32", VF, squares * share)
        moved = mean - load(VF, centre + at)
        store(moved, out + at)
        store(deviation, out + (at + width * 4))
        return [larger(deviation, larger(size(moved), most[0]))]

    return llvm.max_lanes(llvm.loop(0, width, LANES, [zero], chunk)[0])


@emitter(scale=types.float32)
def _round(x, count, scale, zero, out, stride):
    """Writes the nearest bytes to x f32 (count,) / scale, + zero. Four are consecutive.

    The next four lie ``stride`` bytes later. count: a multiple of 16; addresses.
    """
    inverse, offset = (1.0 / scale).splat(), zero.to(I32).splat()

    @llvm.every(count, LANES)
    def chunk(c):
        lanes = load(VF, x + c * 4) * inverse
        lanes = lanes.call("rint").to(VI)
        narrow = (lanes + offset).to(vec(I8))
        words = narrow.bitcast(vec(I32, LANES // 4))
        first = c >> 2
        for i in range(LANES // 4):
            store(words.lane(i), out + stride * (first + i))


@njit(cache=True, nogil=True)
def _code_tile(layout, head, tile, rotated, centre, codes, scales):
    """Codes the 16 pages of a tile of one kv head; see ``code_pages``."""
    width = 2 * codes.shape[2]
    wide, summary = np.empty((PAGE, width), np.float32), np.empty(2 * width, np.float32)
    at = layout[K] + head * layout[K_HEAD] + tile * LANES * PAGE * layout[K_ROW]
    to = codes[head, tile].ctypes.data
    for i in range(LANES):
        first = at + i * PAGE * layout[K_ROW]
        if layout[K_KIND] == F16_ROWS:
            most = _summarise(F16_ROWS, first, layout[K_ROW], width, centre[head], summary)
        else:
            for j in range(PAGE):
                widen_row(layout[K_KIND], first + j * layout[K_ROW], wide[j])
                if rotated:
                    rotate_row(wide[j], rotated, rotated & -rotated)
            most = _summarise(F32_ROWS, wide, wide.strides[0], width, centre[head], summary)
        scale = max(most / np.float32(LARGEST), SMALLEST)
        scales[head, tile, i] = scale
        mean, deviation = to + 4 * i, to + 4 * i + width // 4 * LINE
        _round(summary, width, scale, ZERO, mean, LINE)
        _round(summary[width:], width, scale, 0, deviation, LINE)


@njit(cache=True, nogil=True, parallel=PRANGE_ONLY)
def code_pages(layout, first, last, rotated, centre, codes, scales, n_threads):
    """Codes the pages of tiles first..last - 1 of every kv head; see ``code_pages_ref``.

    layout: of the rows (attention/rows.py). rotated: the first elements of a stored key, which are
    rotated; 0: none. centre f32 (G, width). codes uint8 (G, >= last, words, 16, 4);
    scales f32 (G, >= last, 16).
    """
    n_head = len(codes)
    counter = np.zeros(1, np.int64)
    for _thread in prange(n_threads):
        for task in tasks_of(counter, n_head * (last - first)):
            tile = first + task // n_head
            _code_tile(layout, task % n_head, tile, rotated, centre, codes, scales)


def code_pages_ref(keys, centre):
    """numpy reference: returns codes and scales of keys f32 (G, n, d), n of whole tiles."""
    hi, lo = page_summaries_ref(keys, PAGE, True)
    mean, deviation = (hi + lo) / 2, (hi - lo) / 2
    summary = np.concatenate([mean - centre[:, None], deviation], 2)
    scales = np.maximum(np.abs(summary).max(2) / LARGEST, SMALLEST)
    codes = np.rint(summary / scales[:, :, None])
    codes[:, :, : keys.shape[2]] += ZERO
    tiles = codes.astype(np.uint8).reshape(len(keys), -1, LANES, summary.shape[2] // 4, 4)
    return tiles.swapaxes(2, 3), scales.reshape(len(keys), -1, LANES)


# --- scores ---------------------------------------------------------------------------------------


@njit(cache=True, nogil=True)
def round_queries(q, queries, starts, factors):
    """Rounds q f32 (G, R, width): bytes int8 (G, R, 2 width), int32 (G, R), f32 (G, R).

    start + bytes . codes is the product of a rounded query and a summary. Times the query's factor
    and the page's scale it is the score.
    """
    width = q.shape[2]
    for g in range(q.shape[0]):
        for r in range(q.shape[1]):
            most = SMALLEST
            for c in range(width):
                most = max(most, abs(q[g, r, c]))
            factor, total = most / np.float32(LARGEST), np.int32(0)
            for c in range(width):
                value = np.int8(np.rint(q[g, r, c] / factor))
                queries[g, r, c], queries[g, r, width + c] = value, abs(value)
                total += value
            starts[g, r], factors[g, r] = -ZERO * total, factor


def round_queries_ref(q):
    """numpy reference: returns the three arrays."""
    factors = np.maximum(np.abs(q).max(2), SMALLEST) / np.float32(LARGEST)
    rounded = np.rint(q / factors[:, :, None]).astype(np.int8)
    starts = -ZERO * rounded.sum(2, dtype=np.int32)
    return np.concatenate([rounded, np.abs(rounded)], 2), starts, factors


@emitter(n_queries=range(1, MAX_QUERIES + 1))
def _score_pair(n_queries, queries, n_words, starts, factors, tiles, scales, out, out_row, tops):
    """Scores the pages of two tiles for n_queries queries, 1 to MAX_QUERIES; all are addresses.

    out f32 (n_queries, 32), rows ``out_row`` bytes apart. tops f32 (n_queries, 16): each lane is
    raised to the query's largest scores.
    """
    query_row = n_words * 4
    pair = [tiles, tiles + n_words * LINE]
    of_pages = [load(VF, scales, 4 * LANES * i) for i in range(2)]

    first = [load(I32, starts, 4 * m) for m in range(n_queries)]
    sums = byte_scores.emit_products(first, queries, query_row, 4, pair, n_words)
    for m, dots in enumerate(sums):
        factor = load(F32, factors, 4 * m).splat()
        top = load(VF, tops, 4 * LANES * m)
        for i, dot in enumerate(dots):
            score = dot.to(VF) * (of_pages[i] * factor)
            store(score, out + out_row * m, 4 * LANES * i)
            top = larger(score, top)
        store(top, tops, 4 * LANES * m)


@njit(cache=True, nogil=True)
def _score_tasks(counter, queries, starts, factors, codes, scales, n_page, out, tops):
    """Runs tasks until none is left. A task is SPAN pages of a kv head; see ``score_pages``."""
    n_kv, n_rows, n_bytes = queries.shape
    n_spans = (n_page + SPAN - 1) // SPAN
    for task in tasks_of(counter, n_kv * n_spans):
        head, span = task % n_kv, task // n_kv
        tops[span, head] = -np.inf
        for at in range(span * SPAN, min(n_page, (span + 1) * SPAN), PAIR):
            tile = at // LANES
            for r in range(0, n_rows, MAX_QUERIES):
                _score_pair(
                    min(MAX_QUERIES, n_rows - r), queries[head, r], n_bytes // 4, starts[head, r:],
                    factors[head, r:], codes[head, tile], scales[head, tile],
                    out[span, head, r, at - span * SPAN :], out.strides[2], tops[span, head, r],
                )  # fmt: skip


@njit(cache=True, nogil=True, parallel=PRANGE_ONLY)
def score_pages(queries, starts, factors, codes, scales, n_page, out, tops, n_threads):
    """out[s, g, r, j] = the score of page s SPAN + j < n_page for row r of kv head g's queries.

    queries, starts, factors: see ``round_queries``. codes, scales: see ``code_pages``. out f32
    (spans, G, R, SPAN). tops f32 (spans, G, R, 16): the largest score of each span is among 16.
    n_page: a multiple of PAIR.
    """
    counter = np.zeros(1, np.int64)
    for _thread in prange(n_threads):
        _score_tasks(counter, queries, starts, factors, codes, scales, n_page, out, tops)


def score_pages_ref(queries, starts, factors, codes, scales):
    """numpy reference: scores f32 (G, R, pages)."""
    n_head, n_tiles = codes.shape[:2]
    flat = codes.swapaxes(2, 3).reshape(n_head, n_tiles * LANES, -1).astype(np.int64)
    dots = queries.astype(np.int64) @ flat.swapaxes(1, 2) + starts[:, :, None]
    of_pages = scales.reshape(n_head, 1, -1) * factors[:, :, None]
    return dots.astype(np.float32) * of_pages
