"""One decode step of SALS for a whole layer: score in latent space, select, reconstruct, attend.

With ``score=brope`` each block of 128 tokens has queries of its own: RoPE turns the query to the
distance of the block's centre, and pairs that turn much within a block are damped by their mean
over it. They are made for a span of sixteen blocks at a time, a block a lane. Selected rows are
reconstructed as f16 K and V; the kernels of attention/decode.py attend to them and to the exact
rows.
"""

from __future__ import annotations

import numpy as np
from numba import njit, prange

from sparsekv_cli.cpu.attention.decode import BLOCK as ATTENDED_AT_ONCE
from sparsekv_cli.cpu.attention.decode import NO_CAP, TILE, attend_tile, scaled_copy
from sparsekv_cli.cpu.attention.select import order_keys, select_largest
from sparsekv_cli.cpu.attention.tile import NEGATIVE_INFINITY, PAD
from sparsekv_cli.cpu.jit.llvm import LANES, next_task, prefetch_lines
from sparsekv_cli.cpu.jit.threads import PRANGE_ONLY
from sparsekv_cli.cpu.sals.latent import (
    PIECE,
    RowPointers,
    encode_rows,
    prefetch_rows,
    reconstruct_rows,
)
from sparsekv_cli.cpu.sals.vectors import (
    cos_sin,
    largest_of,
    multiply,
    multiply_halves,
    rotate_pair,
    weigh,
    weighted_sum,
)

ROPE_BLOCK = 128  # tokens that share a query
SPAN = LANES * ROPE_BLOCK  # tokens whose queries are made together
CHUNK = 512  # latents scored at a time
AHEAD = 128  # latents between a load and its prefetch
PAIR = 2 * LANES  # latents of two tiles, whose scores are products of one pass


def damping(theta: np.ndarray, block: int) -> np.ndarray:
    """Mean cosine of each pair's angle within a block, as an integral; never below 0; f32."""
    half_width = theta * block / 2 if block > 1 else np.zeros(len(theta))
    return np.maximum(0, np.sinc(half_width / np.pi)).astype(np.float32)


def brope_ref(
    q_nope: np.ndarray,
    position: int,
    latents: np.ndarray,
    first: int,
    decode: np.ndarray,
    theta: np.ndarray,
    rope_scale: float,
    block: int,
) -> np.ndarray:
    """Scores (H, n) before 1/sqrt(d), block by block: q_nope (H, d) at ``position``.

    latents (n, r*) of the positions from ``first`` on; decode D[:, :r*] (G d, r*). With block = 1
    and r* = G d, the exact q . k.
    """
    n_head, d = q_nope.shape
    n_kv = len(decode) // d
    half = len(theta)
    factor = np.ones(d)
    factor[: 2 * half] = rope_scale**2 * np.tile(damping(theta, block).astype(float), 2)
    scores = np.empty((n_head, len(latents)))
    for start in range(0, len(latents), block):
        angles = (position - (first + start + (block - 1) / 2)) * theta
        a, b = q_nope[:, :half], q_nope[:, half : 2 * half]
        cos, sin = np.cos(angles), np.sin(angles)
        turned = np.concatenate([a * cos - b * sin, a * sin + b * cos, q_nope[:, 2 * half :]], 1)
        for h in range(n_head):
            g = h * n_kv // n_head
            projected = decode[g * d : (g + 1) * d].T @ (turned[h] * factor)
            scores[h, start : start + block] = latents[start : start + block] @ projected
    return scores


def summed_ref(q_nope: np.ndarray, latents: np.ndarray, decode: np.ndarray) -> np.ndarray:
    """The paper's scores (n,): pre-RoPE logits summed over the heads."""
    n_head, d = q_nope.shape
    n_kv = len(decode) // d
    summed = q_nope.reshape(n_kv, n_head // n_kv, d).sum(1).reshape(-1)
    return latents @ (decode.T @ summed)


@njit(cache=True, nogil=True)
def block_queries(q, first, basis, damp, r_star, projected):
    """The queries of sixteen blocks from position ``first`` on in latent space.

    q f32 (H, d') rotated and scaled; damp f32 (pairs,); projected f32 (H, r*, 16), a block a lane.
    """
    n_head, d_padded = q.shape
    group = n_head // basis.n_kv
    centres = np.empty(LANES)
    for lane in range(LANES):
        centres[lane] = first + lane * ROPE_BLOCK + (ROPE_BLOCK - 1) / 2
    n_pairs = basis.n_pairs
    cosines = np.empty((n_pairs, LANES), np.float32)
    sines = np.empty((n_pairs, LANES), np.float32)
    for i in range(n_pairs):
        cos_sin(
            centres.ctypes.data, basis.turns[i], LANES, cosines[i].ctypes.data,
            sines[i].ctypes.data,
        )  # fmt: skip
    turned = np.empty((basis.d, LANES), np.float32)
    for h in range(n_head):
        for i in range(n_pairs):
            rotate_pair(
                q[h, i] * damp[i], q[h, i + n_pairs] * damp[i], cosines[i].ctypes.data,
                sines[i].ctypes.data, turned[i].ctypes.data, turned[i + n_pairs].ctypes.data,
            )  # fmt: skip
        for c in range(2 * n_pairs, basis.d):
            turned[c] = q[h, c]
        decode = basis.decode.ctypes.data + 4 * (h // group) * d_padded
        multiply(
            r_star, decode, basis.decode.strides[0], 4, turned.ctypes.data, 4 * LANES, basis.d,
            projected[h].ctypes.data, 4 * LANES,
        )  # fmt: skip


@njit(cache=True, nogil=True)
def score_chunk(chunk, queries, latents, n_latent, scores, peak, mass):
    """e^(score - peak) of a chunk's latents for every head, with the heads' peaks and sums.

    queries f32 (spans, H, r*, 16): of every block, see ``block_queries``. scores f32 (H, >=
    n_latent rounded up to 32); peak, mass f32 (H,).
    """
    start = chunk * CHUNK
    count = min(CHUNK, n_latent - start)
    stop = start + (count + PAIR - 1) // PAIR * PAIR
    n_head, r_star = queries.shape[1:3]
    for at in range(start, stop, PAIR):
        prefetch_lines(latents.score + 2 * (at + AHEAD) * r_star, 2 * PAIR * r_star)
        block = queries[at // SPAN].ctypes.data + 4 * (at % SPAN // ROPE_BLOCK)
        multiply_halves(
            n_head, block, queries.strides[1], 4 * LANES, latents.score + 2 * at * r_star, r_star,
            scores.ctypes.data + 4 * at, scores.strides[0],
        )  # fmt: skip
    for h in range(n_head):
        for j in range(start + count, stop):
            scores[h, j] = NEGATIVE_INFINITY
        at = scores.ctypes.data + h * scores.strides[0] + 4 * start
        peak[h] = largest_of(at, stop - start)
        mass[h] = weigh(at, stop - start, peak[h])


@njit(cache=True, nogil=True)
def _attend(q, n_kv, g, rows, idx, count, gather, peak, mass, acc, buffer):
    """Softmax state of kv head g's query heads over ``count`` rows; q f32 (H, d') scaled.

    peak, mass f32 (H,), acc f32 (H, d_v'); idx: address of int32 rows (``gather``).
    """
    group = q.shape[0] // n_kv
    peak[g * group : (g + 1) * group] = NEGATIVE_INFINITY
    mass[g * group : (g + 1) * group] = 0
    acc[g * group : (g + 1) * group] = 0
    for h in range(g * group, (g + 1) * group, TILE):
        end = min(h + TILE, (g + 1) * group)
        attend_tile(
            q[h:end], rows.k + g * rows.k_head, rows.v + g * rows.v_head, rows.k_row, rows.v_row,
            gather, idx, count, NO_CAP, peak[h:end], mass[h:end], acc[h:end], buffer,
        )  # fmt: skip


@njit(cache=True, nogil=True)
def _first_tasks(
    counter, q, exact, exact_rows, basis, damp, latents, queries, peak, mass, acc
):  # fmt: skip
    """Takes tasks: attention over the exact rows of each kv head, then the queries of each span."""
    buffer = np.empty((TILE, ATTENDED_AT_ONCE + PAD), np.float32)
    task = next_task(counter)
    while task < basis.n_kv + queries.shape[0]:
        span = task - basis.n_kv
        if span < 0:
            _attend(
                q, basis.n_kv, task, exact, exact_rows.ctypes.data, len(exact_rows), 1, peak, mass,
                acc, buffer,
            )  # fmt: skip
        else:
            block_queries(
                q, latents.first + span * SPAN, basis, damp, latents.score_rank, queries[span]
            )
        task = next_task(counter)


@njit(cache=True, nogil=True)
def _score_tasks(
    counter, queries, summed, latents, n_latent, scores, peaks, masses
):  # fmt: skip
    """Takes chunks of latents to score: by the blocks' queries, or if there are none by summed."""
    chunk = next_task(counter)
    while chunk < peaks.shape[0]:
        if queries.shape[0]:
            score_chunk(chunk, queries, latents, n_latent, scores, peaks[chunk], masses[chunk])
        else:
            r_star = latents.score_rank
            for at in range(chunk * CHUNK, min(n_latent, (chunk + 1) * CHUNK), PAIR):
                multiply_halves(
                    1, summed.ctypes.data, 0, 4, latents.score + 2 * at * r_star, r_star,
                    scores.ctypes.data + 4 * at, 0,
                )  # fmt: skip
        chunk = next_task(counter)


@njit(cache=True, nogil=True, fastmath={"reassoc", "contract", "nsz"})
def _dot(a, b):
    total = np.float32(0)
    for i in range(a.shape[0]):
        total += a[i] * b[i]
    return total


@njit(cache=True, nogil=True)
def summed_query(q_nope, basis, r_star):
    """The paper's q~ f32 (r*,): all heads' pre-RoPE queries f32 (H, d'), projected and added up."""
    n_head, d_padded = q_nope.shape
    by_kv_head = np.zeros(basis.n_kv * d_padded, np.float32)
    for h in range(n_head):
        at = h * basis.n_kv // n_head * d_padded
        by_kv_head[at : at + d_padded] += q_nope[h]
    summed = np.empty(r_star, np.float32)
    for c in range(r_star):
        summed[c] = _dot(by_kv_head, basis.decode[c])
    return summed


@njit(cache=True, nogil=True)
def _head_factors(peaks, masses, peak, mass, factors):
    """Factors f32 (chunks, H) that turn a chunk's exponentials into softmax weights over all rows.

    peaks, masses (chunks, H) of the latents; peak, mass (H,) of the exact rows.
    """
    n_chunk, n_head = peaks.shape
    for h in range(n_head):
        top = peak[h]
        for chunk in range(n_chunk):
            top = max(top, peaks[chunk, h])
        total = mass[h] * np.exp(peak[h] - top)
        for chunk in range(n_chunk):
            factors[chunk, h] = np.exp(peaks[chunk, h] - top)
            total += factors[chunk, h] * masses[chunk, h]
        for chunk in range(n_chunk):
            factors[chunk, h] /= total


@njit(cache=True, nogil=True)
def _importance(start, stop, scores, factors, n_front, n_back, n_latent, keys):
    """Sort keys, int32, of latents start .. stop: the order of their scores, summed over heads.

    The first ``n_front`` and last ``n_back`` latents come first in that order.
    """
    total = np.empty(CHUNK, np.float32)
    weighted_sum(
        scores.ctypes.data + 4 * start, scores.strides[0], factors.ctypes.data, scores.shape[0],
        stop - start, total.ctypes.data,
    )  # fmt: skip
    for j in range(start, min(n_front, stop)):
        total[j - start] = np.float32(np.inf)
    for j in range(max(start, n_latent - n_back), stop):
        total[j - start] = np.float32(np.inf)
    order_keys(total, keys[start:stop], stop - start)


@njit(cache=True, nogil=True)
def _attend_piece(q, basis, latents, chosen, k, v, peak, mass, acc, buffer):
    """Softmax state of all heads over at most PIECE chosen latents; k, v: room for these rows."""
    rows = RowPointers(
        k.ctypes.data, v.ctypes.data, k.strides[0], v.strides[0], k.strides[1], v.strides[1]
    )
    reconstruct_rows(chosen, basis, latents, rows, 0)
    for g in range(basis.n_kv):
        _attend(q, basis.n_kv, g, rows, 0, len(chosen), 0, peak, mass, acc, buffer)


@njit(cache=True, nogil=True)
def _attend_pieces(counter, q, basis, latents, chosen, peak, mass, acc, n_threads):
    """Takes pieces of the chosen rows: reconstructs them and attends to them.

    peak, mass f32 (1 + pieces, H), acc (1 + pieces, H, d_v'); entry 0 is that of the exact rows.
    """
    k = np.empty((basis.n_kv, PIECE, q.shape[1]), np.uint16)
    v = np.empty((basis.n_kv, PIECE, acc.shape[2]), np.uint16)
    buffer = np.empty((TILE, ATTENDED_AT_ONCE + PAD), np.float32)
    piece = next_task(counter)
    while piece < peak.shape[0] - 1:
        part = chosen[piece * PIECE : (piece + 1) * PIECE]
        following = (piece + n_threads) * PIECE  # most likely this thread's next one
        prefetch_rows(chosen[following : following + PIECE], basis, latents)
        at = piece + 1
        _attend_piece(q, basis, latents, part, k, v, peak[at], mass[at], acc[at], buffer)
        piece = next_task(counter)


@njit(cache=True, nogil=True, fastmath={"contract", "nsz"})
def _merge(peak, mass, acc, out):
    """Softmax-weighted mean of the pieces: peak, mass (S, H), acc (S, H, d_v) -> out (H, d_v)."""
    for h in range(out.shape[0]):
        top = peak[:, h].max()
        total = np.float32(0)
        for piece in range(len(peak)):
            total += np.float32(np.exp(peak[piece, h] - top)) * mass[piece, h]
        out[h] = 0
        for piece in range(len(peak)):
            weight = np.float32(np.exp(peak[piece, h] - top)) / total
            for c in range(out.shape[1]):
                out[h, c] += weight * acc[piece, h, c]


@njit(cache=True, nogil=True, parallel=PRANGE_ONLY)
def sals_step(
    q, q_nope, scale, exact, exact_rows, leaving, basis, damp, latents, n_latent, n_front, n_back,
    n_critical, by_head, chosen, out, n_threads,
):  # fmt: skip
    """One token's attention over exact rows and chosen latents; returns how many were chosen.

    q, q_nope f32 (H, d'). exact: f16 rows, of which ``exact_rows`` int32 take part. leaving: the
    row that leaves the window and becomes the last latent first, or -1. damp f32 (pairs,),
    rope_scale included. Of the n_latent latents the first n_front and last n_back are always
    chosen, and the n_critical best others; chosen int32 (>= all of these,) is filled ascending.
    by_head: one softmax a head (brope), otherwise the paper's sum. out f32 (H, d_v').
    """
    n_head = q.shape[0]
    if leaving >= 0:
        last = n_latent - 1
        encode_rows(exact, leaving, latents.first + last, 1, basis, latents, last)
    scaled = scaled_copy(q, scale)
    n_chunk = (n_latent + CHUNK - 1) // CHUNK
    n_set = n_head if by_head else 1
    scores = np.empty((n_set, (n_latent + PAIR - 1) // PAIR * PAIR), np.float32)
    peaks = np.empty((n_chunk, n_set), np.float32)
    masses = np.empty((n_chunk, n_set), np.float32)
    n_chosen = min(n_latent, n_critical + n_front + n_back)
    n_piece = (n_chosen + PIECE - 1) // PIECE
    peak = np.empty((n_piece + 1, n_head), np.float32)
    mass = np.empty((n_piece + 1, n_head), np.float32)
    acc = np.empty((n_piece + 1, n_head, out.shape[1]), np.float32)
    summed = np.empty(0, np.float32)
    n_span = (n_latent + SPAN - 1) // SPAN
    if not by_head:
        summed = summed_query(q_nope, basis, latents.score_rank)
        n_span = 0
    queries = np.empty((n_span, n_head, latents.score_rank, LANES), np.float32)
    counter = np.zeros(3, np.int64)
    for _thread in prange(n_threads):
        _first_tasks(
            counter[0:1], scaled, exact, exact_rows, basis, damp, latents, queries, peak[0],
            mass[0], acc[0],
        )  # fmt: skip
    for _thread in prange(n_threads):
        _score_tasks(counter[1:2], queries, summed, latents, n_latent, scores, peaks, masses)
    factors = np.ones((n_chunk, n_set), np.float32)
    if by_head:
        _head_factors(peaks, masses, peak[0], mass[0], factors)
    keys = np.empty(n_latent, np.int32)
    for chunk in prange(n_chunk):
        start, stop = chunk * CHUNK, min(n_latent, (chunk + 1) * CHUNK)
        _importance(start, stop, scores, factors[chunk], n_front, n_back, n_latent, keys)
    select_largest(keys, n_latent, n_chosen, chosen)
    for _thread in prange(n_threads):
        _attend_pieces(
            counter[2:3], scaled, basis, latents, chosen[:n_chosen], peak, mass, acc, n_threads
        )
    _merge(peak, mass, acc, out)
    return n_chosen
