"""SALS' scores of all latents, from bytes, and the importance of each latent.

The importance of a latent is the sum of its softmax weights over the heads. A head's softmax sum is
estimated from a quarter of the latents: two tiles of each block. All latents are then scored once,
and only their importance is kept.
"""

import numpy as np

from sparsekv_cli.cpu.attention import byte_scores
from sparsekv_cli.cpu.attention.flash import LOG2_E, larger
from sparsekv_cli.cpu.attention.softmax import exp_in_place, soften
from sparsekv_cli.cpu.jit.emitter import LITERAL, emitter
from sparsekv_cli.cpu.jit.kernel import njit
from sparsekv_cli.cpu.jit.llvm import prefetch_lines
from sparsekv_cli.cpu.jit.value import F32, I32, LANES, VF, VI, const, load, select, store
from sparsekv_cli.cpu.sals.latent import tile_bytes, words_of
from sparsekv_cli.cpu.sals.queries import ROPE_BLOCK, SPAN
from sparsekv_cli.cpu.vector.put import put

CHUNK = 512  # latents scored at a time
SAMPLED = 1  # index of the pair of tiles, of a block's four, that gives the softmax sums
AHEAD = 4  # pairs of tiles between a load and its prefetch
# The bits of the float 2^y are taken as 2^23 (y + 127). Between two powers of 2 this is a line, not
# a curve. So weights are up to 6% too large.
ONE_POWER = np.float32(1 << 23)
BIAS = np.float32(127 << 23)
MOST_BITS = np.float32(227 << 23)  # 2^100
LARGEST_EXPONENT = np.float32(69)  # largest exponent of e: a sum over the heads stays finite
SCORES, SUM_OF_HEADS, SUMS_BY_HEAD = 0, 1, 2  # kinds of output of ``_score_pair``


@emitter(made=LITERAL, n_heads=range(1, byte_scores.MAX_QUERIES + 1))
def _score_pair(made, n_heads, words, row, n_words, factors, bias, tiles, out, out_row, add):
    """Scores two tiles of latents for at most MAX_QUERIES heads. Arrays are addresses.

    words: a block's queries of the first head; ``row`` bytes later, those of the next head.
    factors: f32, one every 64 bytes. out: f32; ``out_row`` bytes from head to head. SCORES writes
    scores to out[h, :32]. The other kinds make weights e^(score + bias[h]), see ``head_biases``.
    SUM_OF_HEADS writes their sum to out[:32], or adds it if ``add`` is not 0. SUMS_BY_HEAD adds
    each head's weights to out[h, :32].
    """
    size = (n_words + 1) * byte_scores.LINE
    pair = [tiles, tiles + size]
    offset = n_words * (4 * LANES)
    scales = [load(VF, tile + (size - byte_scores.LINE)) for tile in pair]
    has_old = add != 0

    def weights(m, dots):
        """Yields the two vectors of weights of head m."""
        factor = load(F32, factors, 4 * LANES * m) * float(LOG2_E * ONE_POWER)
        factor, shift = factor.splat(), load(F32, bias, 4 * m).splat()
        most = const(F32, float(MOST_BITS))
        for dot, scale in zip(dots, scales, strict=True):
            bits = larger((dot.to(VF) * (scale * factor)) + shift, const(F32, 0.0))
            bits = select(bits < most, bits, most)
            yield bits.to(VI).bitcast(VF)

    starts = [load(I32, words + offset + row * m) for m in range(n_heads)]
    zero = const(F32, 0.0)
    totals = [select(has_old, load(VF, out, 4 * LANES * i), zero) for i in range(2)]
    products = byte_scores.emit_products(starts, words, row, 4 * LANES, pair, n_words)
    for m, dots in enumerate(products):
        place = out + out_row * m
        if made == SCORES:
            factor = load(F32, factors, 4 * LANES * m).splat()
            for i, dot in enumerate(dots):
                store(dot.to(VF) * (scales[i] * factor), place, 4 * LANES * i)
            continue
        for i, weight in enumerate(weights(m, dots)):
            if made == SUM_OF_HEADS:
                totals[i] = totals[i] + weight
            else:
                total = load(VF, place, 4 * LANES * i) + weight
                store(total, place, 4 * LANES * i)
    if made == SUM_OF_HEADS:
        for i, total in enumerate(totals):
            store(total, out, 4 * LANES * i)


@njit(inline="always")
def _of_pair(made, words, factors, bias, latents, at, out, out_row):
    """Runs ``_score_pair`` on the 32 latents from ``at`` on, for all heads.

    out: an address. out_row: bytes from head to head in ``out``, or 0. bias: the address of f32
    (H,), or 0 for SCORES. The function is inlined, because a call costs as much as a head.
    """
    n_head, n_words = words.shape[1], words.shape[2] - 1
    lane, span = 4 * (at % SPAN // ROPE_BLOCK), at // SPAN
    word, factor = words[span].ctypes.data + lane, factors[span].ctypes.data + lane
    tiles = latents.score + at // LANES * tile_bytes(n_words)
    for h in range(0, n_head, byte_scores.MAX_QUERIES):
        _score_pair(
            made, min(byte_scores.MAX_QUERIES, n_head - h), word + h * words.strides[1],
            words.strides[1], n_words, factor + h * factors.strides[1], bias + 4 * h, tiles,
            out + h * out_row, out_row, h,
        )  # fmt: skip


@njit(cache=True, nogil=True)
def scores_of_pair(words, factors, latents, at, out):
    """Writes scores of the 32 latents from ``at`` on to out f32 (H, >= 32)."""
    _of_pair(SCORES, words, factors, 0, latents, at, out.ctypes.data, out.strides[0])


@njit(cache=True, nogil=True)
def _add_weights_of_pair(words, factors, bias, latents, at, sums):
    """Adds weights of the 32 latents from ``at`` on to sums f32 (H, 32); bias f32 (H,)."""
    place, row = sums.ctypes.data, sums.strides[0]
    _of_pair(SUMS_BY_HEAD, words, factors, bias.ctypes.data, latents, at, place, row)


@njit(cache=True, nogil=True)
def capped_weights(words, factors, bias, softcap, latents, at, weights):
    """Writes weights e^(score - log sum) f32 (H, 32) of the 32 latents from ``at`` on.

    A softcap changes the scores after the product. So ``_score_pair`` cannot make the weights.
    bias: see ``head_biases``.
    """
    scores_of_pair(words, factors, latents, at, weights)
    for h in range(len(bias)):
        soften(weights[h], byte_scores.PAIR, softcap)
        log_sum = (BIAS - bias[h]) / (LOG2_E * ONE_POWER)
        for j in range(byte_scores.PAIR):
            weights[h, j] = min(weights[h, j] - log_sum, LARGEST_EXPONENT)
        exp_in_place(weights[h], byte_scores.PAIR, np.float32(0))


@njit(cache=True, nogil=True)
def _pair_to_sample(block, stop):
    """Returns the first of the 32 sampled latents of a block. stop: end of the latents."""
    sampled = block + SAMPLED * byte_scores.PAIR
    return sampled if sampled + byte_scores.PAIR <= stop else block


@njit(cache=True, nogil=True)
def prefetch_samples(span, latents, n_latent):
    """Prefetches what ``sample_span`` reads. Its reads are too short for the CPU's prefetcher."""
    size = tile_bytes(words_of(latents.score_rank))
    start, stop = span * SPAN, min(n_latent, (span + 1) * SPAN)
    for block in range(start, stop, ROPE_BLOCK):
        at = _pair_to_sample(block, stop)
        prefetch_lines(latents.score + at // LANES * size, 2 * size)


@njit(cache=True, nogil=True)
def sample_span(span, words, factors, latents, n_latent, softcap, peak, mass):
    """Estimates a span's part of each head's softmax sum, mass e^peak.

    It scores one pair of tiles of each block. words int32 (spans, H, words + 1, 16), factors f32
    (spans, H, 16): see ``block_queries``. softcap: of the scores, 0 for none. peak, mass f32 (H,)
    are set. The peak is the best score of the first pair.
    """
    start, stop = span * SPAN, min(n_latent, (span + 1) * SPAN)
    n_head, n_scored = words.shape[1], 0
    part = np.empty((n_head, byte_scores.PAIR), np.float32)
    sums = np.zeros((n_head, byte_scores.PAIR), np.float32)
    bias = np.empty(n_head, np.float32)
    for block in range(start, stop, ROPE_BLOCK):
        at = _pair_to_sample(block, stop)
        count = min(byte_scores.PAIR, stop - at)
        if n_scored == 0:
            scores_of_pair(words, factors, latents, at, part)
            for h in range(n_head):
                if softcap:
                    soften(part[h], byte_scores.PAIR, softcap)
                peak[h] = part[h, :count].max()
                bias[h] = BIAS - peak[h] * (LOG2_E * ONE_POWER)
        n_scored += count
        if softcap:
            capped_weights(words, factors, bias, softcap, latents, at, part)
        elif count < byte_scores.PAIR:
            part[:] = 0
            _add_weights_of_pair(words, factors, bias, latents, at, part)
        else:
            _add_weights_of_pair(words, factors, bias, latents, at, sums)
            continue
        for h in range(n_head):
            for j in range(count):
                sums[h, j] += part[h, j]
    for h in range(n_head):
        mass[h] = sums[h].sum() * np.float32(stop - start) / np.float32(n_scored)


@njit(cache=True, nogil=True)
def head_biases(peaks, masses, bias):
    """Sets bias f32 (H,): minus the log of each head's softmax sum, in the units of weights' bits.

    peaks, masses f32 (parts, H): the softmax sum is the sum of mass e^peak over the parts.
    """
    for h in range(len(bias)):
        top = peaks[:, h].max()
        total = np.float32(0)
        for part in range(len(peaks)):
            total += masses[part, h] * np.exp(peaks[part, h] - top)
        bias[h] = BIAS - (top + np.log(total)) * (LOG2_E * ONE_POWER)


@njit(cache=True, nogil=True)
def importance(start, stop, words, factors, bias, softcap, latents, out):
    """Computes the softmax weights of latents, summed over heads, or their scores.

    start, stop: the range of latents. out f32 (>= stop - start rounded up to 32,). bias f32 (H,).
    If it is empty, there is one head, and out gets scores. words, factors, softcap: as in
    ``sample_span``.
    """
    size = tile_bytes(words.shape[2] - 1)
    weights = np.empty((max(1, len(bias)), byte_scores.PAIR), np.float32)
    for at in range(start, stop, byte_scores.PAIR):
        if len(bias) and not softcap:
            prefetch_lines(latents.score + (at // LANES + 2 * AHEAD) * size, 2 * size)
            place = out[at - start :].ctypes.data
            _of_pair(SUM_OF_HEADS, words, factors, bias.ctypes.data, latents, at, place, 0)
            continue
        if len(bias):
            capped_weights(words, factors, bias, softcap, latents, at, weights)
        else:
            scores_of_pair(words, factors, latents, at, weights)
        total = out[at - start : at - start + byte_scores.PAIR]
        put(total, weights[0])
        for h in range(1, len(bias)):
            total += weights[h]
