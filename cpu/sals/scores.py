"""SALS' scores of all latents, by bytes, and how important each latent is to the heads.

With ``score=brope`` each block of 128 tokens has queries of its own: RoPE turns the query to the
distance of the block's centre, and pairs that turn much within a block are damped by their mean
over it, down to none. They are made for a span of sixteen blocks at a time, a block a lane, and
rounded to bytes. The importance of a latent is its softmax weight summed over the heads. A head's
softmax is taken over a quarter of the latents, two tiles of each block; so all latents are scored
once, and nothing is kept of a score but its weight.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit, types
from numba.extending import intrinsic

from sparsekv_cli.cpu.attention import bytes as rows
from sparsekv_cli.cpu.attention.flash import LOG2_E, larger
from sparsekv_cli.cpu.attention.tile import NEGATIVE_INFINITY, soften
from sparsekv_cli.cpu.jit import llvm
from sparsekv_cli.cpu.jit.llvm import (
    F32,
    I32,
    I64,
    LANES,
    VF,
    VI,
    const,
    load,
    prefetch_lines,
    splat,
)
from sparsekv_cli.cpu.sals.latent import LatentBasis, tile_bytes
from sparsekv_cli.cpu.sals.vectors import cos_sin, largest_of, multiply, rotate_pair, weigh

ROPE_BLOCK = 128  # tokens that share a query
SPAN = LANES * ROPE_BLOCK  # tokens whose queries are made together
CHUNK = 512  # latents scored at a time
SAMPLED = 1  # of a block's four pairs of tiles, the one from which softmax sums are taken
AHEAD = 4  # pairs of tiles between a load and its prefetch
LARGEST = np.float32(127)  # of a query's bytes
TINY = np.float32(1e-30)
# e^x = 2^y as the bits of a float: 2^23 (y + 127), where what is behind the point of y runs in a
# line from 1 to 2 instead of a curve. So weights are up to 6% too large.
ONE_POWER = np.float32(1 << 23)
BIAS = np.float32(127 << 23)
MOST_BITS = np.float32(227 << 23)  # 2^100


def damping(theta: np.ndarray, block: int) -> np.ndarray:
    """Mean cosine of each pair's angle within a block, as an integral; f32.

    0 for pairs that turn by more than a circle.
    """
    half_width = theta * block / 2 if block > 1 else np.zeros(len(theta))
    return np.where(half_width < np.pi, np.sinc(half_width / np.pi), 0).astype(np.float32)


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


class BlockBasis(NamedTuple):
    """What makes a block's queries: of the dims that are not damped to nothing.

    These are the dims of some pairs, first elements before second ones, and those behind the pairs.
    """

    decode: np.ndarray  # D^T f32 (r*, G x dims, and more)
    dims: np.ndarray  # int64
    turns: np.ndarray  # theta / 2 pi f64 (pairs,)
    damp: np.ndarray  # f32 (pairs,), rope_scale included


def make_block_basis(basis: LatentBasis, theta: np.ndarray, r_star: int) -> BlockBasis:
    """The part of ``basis`` that scores by the first r* columns need."""
    damp = damping(theta, ROPE_BLOCK)
    pairs = np.flatnonzero(damp)
    dims = np.concatenate([pairs, pairs + len(theta), np.arange(2 * len(theta), basis.d)])
    width = (basis.decode.shape[1] - LANES) // basis.n_kv
    columns = (width * np.arange(basis.n_kv)[:, None] + dims).reshape(-1)
    # Sixteen floats more a row, so that rows do not all fall on the same lines of the L1 cache.
    decode = np.zeros((r_star, len(columns) // LANES * LANES + 2 * LANES), np.float32)
    decode[:, : len(columns)] = basis.decode[:r_star, columns]
    turns = theta[pairs] / (2 * np.pi)
    return BlockBasis(decode, dims.astype(np.int64), turns, damp[pairs] * basis.rope_scale)


# --- queries --------------------------------------------------------------------------------------


@intrinsic
def _round_queries(typingctx, projected, count, words, n_words, factors):
    """Sixteen blocks' queries f32 (count, 16) as bytes.

    words int32 (n_words + 1, 16): four bytes each, then minus the sum of what ZERO adds to a score;
    factors f32 (16,): what a product of bytes is worth. Addresses.
    """

    def codegen(context, b, signature, args):
        projected, count, words, n_words, factors = args

        def column(c):
            return load(b, VF, b.add(projected, b.mul(c, I64(4 * LANES))))

        def greater(c, peak):
            size = llvm.call_named(b, "llvm.fabs.v16f32", VF, column(c))
            return [larger(b, size, peak[0])]

        peak = llvm.loop(b, I64(0), count, 1, [const(F32, float(TINY))], greater)[0]
        inverse = b.fdiv(const(F32, float(LARGEST)), peak)
        llvm.store(b, b.fdiv(peak, const(F32, float(LARGEST))), factors)

        def word(w, carried):
            (total,), packed = carried, const(I32, 0)
            for i in range(4):
                c = b.add(b.mul(w, I64(4)), I64(i))
                is_there = b.icmp_signed("<", c, count)
                x = column(b.select(is_there, c, I64(0)))
                x = llvm.call_named(b, "llvm.rint.v16f32", VF, b.fmul(x, inverse))
                whole = b.select(is_there, b.fptosi(x, VI), const(I32, 0))
                total = b.add(total, whole)
                byte = b.shl(b.and_(whole, const(I32, 255)), const(I32, 8 * i))
                packed = b.or_(packed, byte)
            llvm.store(b, packed, b.add(words, b.mul(w, I64(4 * LANES))))
            return [total]

        total = llvm.loop(b, I64(0), n_words, 1, [const(I32, 0)], word)[0]
        offset = b.mul(total, const(I32, -rows.ZERO))
        llvm.store(b, offset, b.add(words, b.mul(n_words, I64(4 * LANES))))
        return context.get_dummy_value()

    return types.void(*[types.int64] * 5), codegen


@njit(cache=True, nogil=True)
def block_queries(q, first, n_kv, basis, words, factors):
    """The queries of sixteen blocks from position ``first`` on in latent space, as bytes.

    q f32 (H, d') rotated and scaled; basis: a BlockBasis. words int32 (H, words + 1, 16), factors
    f32 (H, 16): a block a lane, see ``_round_queries``.
    """
    group = q.shape[0] // n_kv
    r_star, n_pairs, n_dims = basis.decode.shape[0], len(basis.turns), len(basis.dims)
    centres = np.empty(LANES)
    for lane in range(LANES):
        centres[lane] = first + lane * ROPE_BLOCK + (ROPE_BLOCK - 1) / 2
    cosines = np.empty((n_pairs, LANES), np.float32)
    sines = np.empty((n_pairs, LANES), np.float32)
    for i in range(n_pairs):
        cos_sin(
            centres.ctypes.data, basis.turns[i], LANES, cosines[i].ctypes.data,
            sines[i].ctypes.data,
        )  # fmt: skip
    turned = np.empty((n_dims, LANES), np.float32)
    projected = np.empty((r_star, LANES), np.float32)
    for h in range(q.shape[0]):
        for i in range(n_pairs):
            rotate_pair(
                q[h, basis.dims[i]] * basis.damp[i], q[h, basis.dims[i + n_pairs]] * basis.damp[i],
                cosines[i].ctypes.data, sines[i].ctypes.data, turned[i].ctypes.data,
                turned[i + n_pairs].ctypes.data,
            )  # fmt: skip
        for c in range(2 * n_pairs, n_dims):
            turned[c] = q[h, basis.dims[c]]
        decode = basis.decode.ctypes.data + 4 * (h // group) * n_dims
        multiply(
            r_star, decode, basis.decode.strides[0], 4, turned.ctypes.data, 4 * LANES, n_dims,
            projected.ctypes.data, 4 * LANES,
        )  # fmt: skip
        _round_queries(
            projected.ctypes.data, r_star, words[h].ctypes.data, words.shape[1] - 1,
            factors[h].ctypes.data,
        )  # fmt: skip


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
def summed_queries(q_nope, basis, r_star, words, factors):
    """``summed_query`` as bytes, the same one for sixteen blocks of one head."""
    summed = summed_query(q_nope, basis, r_star)
    projected = np.empty((r_star, LANES), np.float32)
    for c in range(r_star):
        projected[c] = summed[c]
    _round_queries(
        projected.ctypes.data, r_star, words[0].ctypes.data, words.shape[1] - 1,
        factors[0].ctypes.data,
    )  # fmt: skip


# --- scores ---------------------------------------------------------------------------------------


@intrinsic
def _score_pair(
    typingctx, weighs, n_heads, words, row, n_words, factors, bias, tiles, out, out_row, add
):  # fmt: skip
    """Scores of two tiles of latents for at most MAX_QUERIES heads; addresses, rows in bytes.

    words, row: a block's queries of the first head, and to the next head's; factors: f32, 64 bytes
    from head to head. weighs = 0: scores f32 to out[h, :32]. 1: out[:32], f32, is the sum over
    heads of e^(score + bias[h]) by ONE_POWER, bias f32 (n_heads,) being in these units; ``add``: to
    what is there.
    """
    if not isinstance(weighs, types.IntegerLiteral):
        return None

    def codegen(context, b, signature, args):
        weighs_ = signature.args[0].literal_value
        _, n_heads, words, row, n_words, factors, bias, tiles, out, out_row, add = args
        size = b.mul(b.add(n_words, I64(1)), I64(rows.LINE))
        pair = [tiles, b.add(tiles, size)]
        offset = b.mul(n_words, I64(4 * LANES))
        scales = [load(b, VF, b.add(tile, b.sub(size, I64(rows.LINE)))) for tile in pair]
        old = [load(b, VF, out, 4 * LANES * i) for i in range(2)] if weighs_ else []
        has_old = b.icmp_signed("!=", add, I64(0))

        def emit(n):
            starts = [
                load(b, I32, b.add(b.add(words, offset), b.mul(row, I64(m)))) for m in range(n)
            ]
            products = rows.emit_products(b, starts, words, row, 4 * LANES, pair, n_words)
            totals = [b.select(has_old, each, const(F32, 0.0)) for each in old]
            for m, sums in enumerate(products):
                factor = load(b, F32, factors, 4 * LANES * m)
                if weighs_:
                    factor = b.fmul(factor, F32(float(LOG2_E * ONE_POWER)))
                    shift = splat(b, load(b, F32, bias, 4 * m))
                factor = splat(b, factor)
                for i, dots in enumerate(sums):
                    score = b.fmul(b.sitofp(dots, VF), b.fmul(scales[i], factor))
                    if not weighs_:
                        place = b.add(out, b.mul(out_row, I64(m)))
                        llvm.store(b, score, place, 4 * LANES * i)
                        continue
                    bits = larger(b, b.fadd(score, shift), const(F32, 0.0))
                    most = const(F32, float(MOST_BITS))
                    bits = b.select(b.fcmp_ordered("<", bits, most), bits, most)
                    totals[i] = b.fadd(totals[i], b.bitcast(b.fptosi(bits, VI), VF))
            for i, total in enumerate(totals):
                llvm.store(b, total, out, 4 * LANES * i)

        rows.for_each_number(b, n_heads, emit)
        return context.get_dummy_value()

    return types.void(weighs, *[types.int64] * 10), codegen


@njit(cache=True, nogil=True)
def _first_query(words, factors, at):
    """Addresses of the words and the factor of the first head's query for latent ``at``."""
    lane = 4 * (at % SPAN // ROPE_BLOCK)
    span = at // SPAN
    return words[span].ctypes.data + lane, factors[span].ctypes.data + lane


@njit(cache=True, nogil=True)
def scores_of_pair(words, factors, latents, at, out):
    """Scores f32 (H, >= 32) of the 32 latents from ``at`` on."""
    n_head, n_words = words.shape[1], words.shape[2] - 1
    word, factor = _first_query(words, factors, at)
    tiles = latents.score + at // LANES * tile_bytes(n_words)
    for h in range(0, n_head, rows.MAX_QUERIES):
        _score_pair(
            0, min(rows.MAX_QUERIES, n_head - h), word + h * words.strides[1], words.strides[1],
            n_words, factor + h * factors.strides[1], 0, tiles, out[h].ctypes.data, out.strides[0],
            0,
        )  # fmt: skip


@njit(cache=True, nogil=True)
def sample_span(span, words, factors, latents, n_latent, softcap, peak, mass):
    """What a span's latents add to each head's softmax sum, mass e^peak, by a pair of each block.

    words int32 (spans, H, words + 1, 16), factors f32 (spans, H, 16): see ``block_queries``;
    softcap: of the scores, 0 for none; peak, mass f32 (H,).
    """
    start, stop = span * SPAN, min(n_latent, (span + 1) * SPAN)
    n_block = (stop - start + ROPE_BLOCK - 1) // ROPE_BLOCK
    scores = np.empty((words.shape[1], n_block * rows.PAIR), np.float32)
    n_scored = 0
    for block in range(n_block):
        at = start + block * ROPE_BLOCK
        if at + (SAMPLED + 1) * rows.PAIR <= stop:
            at += SAMPLED * rows.PAIR
        to = block * rows.PAIR
        scores_of_pair(words, factors, latents, at, scores[:, to:])
        count = min(rows.PAIR, stop - at)
        scores[:, to + count : to + rows.PAIR] = NEGATIVE_INFINITY
        n_scored += count
    for h in range(words.shape[1]):
        if softcap:
            soften(scores[h].ctypes.data, scores.shape[1], softcap)
        peak[h] = largest_of(scores[h].ctypes.data, scores.shape[1])
        mass[h] = weigh(scores[h].ctypes.data, scores.shape[1], peak[h])
        mass[h] *= np.float32(stop - start) / np.float32(n_scored)


@njit(cache=True, nogil=True)
def head_biases(peaks, masses, bias):
    """bias f32 (H,): minus the logarithm of each head's softmax sum, in the units of weights' bits.

    peaks, masses f32 (parts, H): the sum is that of mass e^peak.
    """
    for h in range(len(bias)):
        top = peaks[:, h].max()
        total = np.float32(0)
        for part in range(len(peaks)):
            total += masses[part, h] * np.exp(peaks[part, h] - top)
        bias[h] = BIAS - (top + np.log(total)) * (LOG2_E * ONE_POWER)


@njit(cache=True, nogil=True)
def importance(start, stop, words, factors, bias, latents, out):
    """Of the latents start .. stop: their softmax weights summed over heads, or their scores.

    out f32 (>= stop - start rounded up to 32,). bias f32 (H,); if it is empty, there is one head,
    and scores are wanted. words, factors: as in ``sample_span``.
    """
    n_head, n_words = words.shape[1], words.shape[2] - 1
    size = tile_bytes(n_words)
    for at in range(start, stop, rows.PAIR):
        if len(bias) == 0:
            scores_of_pair(words, factors, latents, at, out[at - start :].reshape(1, -1))
            continue
        word, factor = _first_query(words, factors, at)
        tiles = latents.score + at // LANES * size
        prefetch_lines(tiles + 2 * AHEAD * size, 2 * size)
        for h in range(0, n_head, rows.MAX_QUERIES):
            _score_pair(
                1, min(rows.MAX_QUERIES, n_head - h), word + h * words.strides[1],
                words.strides[1], n_words, factor + h * factors.strides[1],
                bias[h:].ctypes.data, tiles, out[at - start :].ctypes.data, 0, h,
            )  # fmt: skip
