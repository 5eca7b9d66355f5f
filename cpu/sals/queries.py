"""SALS' queries for blocks of tokens, in latent space and as bytes.

With ``score=brope`` each block of 128 tokens has its own queries. RoPE rotates a query to the
distance of the block's centre. Each pair is damped: it is multiplied by its mean cosine over the
block. Queries are made for a span of sixteen blocks at a time, one block a lane. They are rotated,
rounded to bytes, projected to latent space by products of bytes, and rounded again.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numba import types

from sparsekv_cli.cpu.attention import byte_scores
from sparsekv_cli.cpu.attention.flash import larger
from sparsekv_cli.cpu.jit import llvm
from sparsekv_cli.cpu.jit.emitter import emitter
from sparsekv_cli.cpu.jit.kernel import njit
from sparsekv_cli.cpu.jit.value import F32, I32, LANES, VF, VI, Value, const, load, select, store
from sparsekv_cli.cpu.sals.latent import LatentBasis
from sparsekv_cli.cpu.sals.vectors import cos_sin, rotate_pair
from sparsekv_cli.cpu.vector.declared import f32, f64, i32, i64

ROPE_BLOCK = 128  # tokens that share a query
SPAN = LANES * ROPE_BLOCK  # tokens whose queries are made together
LARGEST = np.float32(127)  # largest byte of a query
TINY = np.float32(1e-30)


def damping(theta: np.ndarray, block: int) -> np.ndarray:
    """Returns each pair's mean cosine over the angles within a block, from the integral; f32.

    It is 0 for pairs that rotate by a full circle or more within a block.
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
    """Returns scores (H, n) before 1/sqrt(d), block by block, of q_nope (H, d) at ``position``.

    latents (n, r*): of the positions from ``first`` on; decode D[:, :r*] (G d, r*). With block = 1
    and r* = G d the scores are the exact q . k.
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
    """Returns the paper's scores (n,): pre-RoPE logits summed over the heads."""
    n_head, d = q_nope.shape
    n_kv = len(decode) // d
    summed = q_nope.reshape(n_kv, n_head // n_kv, d).sum(1).reshape(-1)
    return latents @ (decode.T @ summed)


class BlockBasis(NamedTuple):
    """Tables for the queries of blocks, a part of SALSState; only dims whose damping is not 0.

    The first elements of these pairs come first, then their second elements, then the dims after
    the pairs.
    """

    # D^T as bytes, a scale a row: (G, r*, words + 1), see ``_round_rows``.
    decode: np.ndarray = i32("n_kv", "score_rank", "block_words")
    scales: np.ndarray = f32("n_kv", "score_rank")
    dims: np.ndarray = i64("n_block_dims")
    turns: np.ndarray = f64("n_block_pairs")  # theta / 2 pi
    damp: np.ndarray = f32("n_block_pairs")  # rope_scale included


def make_block_basis(basis: LatentBasis, theta: np.ndarray, r_star: int) -> BlockBasis:
    """Returns the part of ``basis`` that scores of the first r* columns need."""
    damp = damping(theta, ROPE_BLOCK)
    pairs = np.flatnonzero(damp)
    dims = np.concatenate([pairs, pairs + len(theta), np.arange(2 * len(theta), basis.d)])
    width = (basis.decode.shape[1] - LANES) // basis.n_kv
    columns = (width * np.arange(basis.n_kv)[:, None] + dims).reshape(-1)
    decode = basis.decode[:r_star, columns].reshape(r_star, basis.n_kv, -1).swapaxes(0, 1)
    words, scales = _round_rows(decode)
    turns = theta[pairs] / (2 * np.pi)
    damp = damp[pairs] * basis.rope_scale
    return BlockBasis(words, scales, dims.astype(np.int64), turns, damp)


def _round_rows(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Rounds x f32 (.., columns) to bytes; returns words and scales f32 (..), a scale a row.

    words int32 (.., words + 1): four bytes each, then minus the sum that ZERO adds to a product.
    """
    scales = np.maximum(np.abs(x).max(-1), TINY) / LARGEST
    whole = np.rint(np.ascontiguousarray(x) / scales[..., None]).astype(np.int8)
    whole = np.pad(whole, [(0, 0)] * (x.ndim - 1) + [(0, -x.shape[-1] % 4)])
    offsets = -byte_scores.ZERO * whole.sum(-1, dtype=np.int32, keepdims=True)
    return np.concatenate([whole.view(np.int32), offsets], axis=-1), scales.astype(np.float32)


def _packed(columns: Sequence[Value]) -> Value:
    """Packs the low bytes of four <16 x i32> into one, the first one's byte lowest."""
    word = const(I32, 0)
    for i, column in enumerate(columns):
        word = word | (column & 255) << 8 * i
    return word


def _rounded(x: Value) -> Value:
    return x.call("rint").to(VI)


@emitter
def _pack_turned(turned, n_words, tile):
    """Rounds rotated f32 (4 words, 16) within 127 to a tile of bytes (words, 16, 4); addresses."""

    @llvm.every(n_words)
    def word(w):
        at = turned + w * (4 * byte_scores.LINE)
        columns = [_rounded(load(VF, at, byte_scores.LINE * i)) for i in range(4)]
        store(_packed(columns) ^ 0x80808080 - (1 << 32), tile + w * byte_scores.LINE)


@emitter(n_rows=range(1, byte_scores.MAX_QUERIES + 1), unit=types.float32)
def _project(n_rows, words, n_words, scales, unit, tile, out):
    """Multiplies rows of bytes by a tile of bytes: out[m] = unit * scales[m] * (row m . tile).

    Row m is a row of D^T, as ``_round_rows`` writes it: n_words words of four bytes, then an
    offset. The tile is bytes (n_words, 16, 4), as ``_pack_turned`` writes it: 16 columns of 4
    n_words bytes. out f32 (n_rows, 16). n_rows: at most MAX_QUERIES (attention/byte_scores.py).
    words, scales, tile, out: addresses.
    """
    row = (n_words + 1) * 4
    last = words + n_words * 4

    starts = [load(I32, last + row * m) for m in range(n_rows)]
    products = byte_scores.emit_products(starts, words, row, 4, [tile], n_words)
    for m, (dot,) in enumerate(products):
        factor = (unit * load(F32, scales, 4 * m)).splat()
        store(dot.to(VF) * factor, out, byte_scores.LINE * m)


@emitter
def _round_queries(projected, count, words, n_words, factors):
    """Rounds the queries of sixteen blocks, projected f32 (count, 16), to bytes.

    words int32 (n_words + 1, 16): set to four bytes each, then minus the sum that ZERO adds to a
    score. factors f32 (16,): set to the scale of each block's bytes. Arrays are addresses.
    """

    def column(c):
        return load(VF, projected + c * (4 * LANES))

    def greater(c, peak):
        size = column(c).call("fabs")
        return [larger(size, peak[0])]

    peak = (llvm.loop(0, count, 1, [const(F32, float(TINY))], greater))[0]
    inverse = float(LARGEST) / peak
    store(peak / float(LARGEST), factors)

    def word(w, carried):
        (total,), columns = carried, []
        for i in range(4):
            c = w * 4 + i
            is_there = c < count
            whole = _rounded(column(select(is_there, c, 0)) * inverse)
            columns.append(select(is_there, whole, 0))
            total = total + columns[-1]
        store(_packed(columns), words + w * (4 * LANES))
        return [total]

    total = (llvm.loop(0, n_words, 1, [const(I32, 0)], word))[0]
    offset = total * -byte_scores.ZERO
    store(offset, words + n_words * (4 * LANES))


@njit(cache=True, nogil=True)
def query_units(q, basis):
    """Returns the scale of each query's bytes, f32 (H,). It fits every rotation of the query.

    q f32 (H, d') rotated and scaled; basis: a BlockBasis.
    """
    n_pairs = len(basis.turns)
    units = np.empty(len(q), np.float32)
    for h in range(len(q)):
        largest = TINY
        for i in range(n_pairs):
            a, b = q[h, basis.dims[i]], q[h, basis.dims[i + n_pairs]]
            largest = max(largest, np.sqrt(a * a + b * b) * basis.damp[i])
        for c in range(2 * n_pairs, len(basis.dims)):
            largest = max(largest, abs(q[h, basis.dims[c]]))
        units[h] = largest / LARGEST
    return units


@njit(cache=True, nogil=True)
def block_queries(q, units, first, n_kv, basis, words, factors):
    """Makes the queries of sixteen blocks from position ``first`` on, in latent space, as bytes.

    q f32 (H, d') rotated and scaled; units: ``query_units`` of q; basis: a BlockBasis. words int32
    (H, words + 1, 16), factors f32 (H, 16): set, a block a lane, as in ``_round_queries``.
    """
    group = q.shape[0] // n_kv
    r_star, n_pairs, n_dims = basis.decode.shape[1], len(basis.turns), len(basis.dims)
    n_words = basis.decode.shape[2] - 1
    centres = np.empty(LANES)
    for lane in range(LANES):
        centres[lane] = first + lane * ROPE_BLOCK + (ROPE_BLOCK - 1) / 2
    cosines = np.empty((n_pairs, LANES), np.float32)
    sines = np.empty((n_pairs, LANES), np.float32)
    for i in range(n_pairs):
        cos_sin(centres, basis.turns[i], LANES, cosines[i], sines[i])
    turned = np.zeros((4 * n_words, LANES), np.float32)
    tile = np.empty((n_words, LANES), np.int32)
    projected = np.empty((r_star, LANES), np.float32)
    for h in range(q.shape[0]):
        g, unit = h // group, units[h]
        for i in range(n_pairs):
            factor = basis.damp[i] / unit
            rotate_pair(
                q[h, basis.dims[i]] * factor, q[h, basis.dims[i + n_pairs]] * factor, cosines[i],
                sines[i], turned[i], turned[i + n_pairs],
            )  # fmt: skip
        for c in range(2 * n_pairs, n_dims):
            turned[c] = q[h, basis.dims[c]] / unit
        _pack_turned(turned, n_words, tile)
        for r in range(0, r_star, byte_scores.MAX_QUERIES):
            _project(
                min(byte_scores.MAX_QUERIES, r_star - r), basis.decode[g, r], n_words,
                basis.scales[g, r:], unit, tile, projected[r],
            )  # fmt: skip
        _round_queries(projected, r_star, words[h], words.shape[1] - 1, factors[h])


@njit(cache=True, nogil=True, fastmath={"reassoc", "contract", "nsz"})
def _dot(a, b):
    total = np.float32(0)
    for i in range(a.shape[0]):
        total += a[i] * b[i]
    return total


@njit(cache=True, nogil=True)
def summed_query(q_nope, basis, r_star):
    """Returns the paper's q~ f32 (r*,): the projected sum of the pre-RoPE queries f32 (H, d')."""
    n_head, d_padded = q_nope.shape
    by_kv_head = np.zeros(basis.n_kv * d_padded, np.float32)
    for h in range(n_head):
        at = h * basis.n_kv // n_head * d_padded
        for c in range(d_padded):
            by_kv_head[at + c] += q_nope[h, c]
    summed = np.empty(r_star, np.float32)
    for c in range(r_star):
        summed[c] = _dot(by_kv_head, basis.decode[c])
    return summed


@njit(cache=True, nogil=True)
def summed_queries(q_nope, basis, r_star, words, factors):
    """Rounds ``summed_query`` to bytes, for all sixteen blocks of the single head 0."""
    summed = summed_query(q_nope, basis, r_star)
    projected = np.empty((r_star, LANES), np.float32)
    for c in range(r_star):
        projected[c] = summed[c]
    _round_queries(projected, r_star, words[0], words.shape[1] - 1, factors[0])
