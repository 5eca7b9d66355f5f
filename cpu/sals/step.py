"""One decode step of SALS for a whole layer: score in latent space, select, reconstruct, attend.

The scores are those of sals/scores.py. Selected rows are reconstructed as f16 K and V; the kernels
of attention/decode.py attend to them and to the exact rows.
"""

from __future__ import annotations

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
from sparsekv_cli.cpu.attention.select import order_keys, select_largest
from sparsekv_cli.cpu.attention.tile import PAD
from sparsekv_cli.cpu.jit.llvm import LANES, next_task
from sparsekv_cli.cpu.jit.threads import PRANGE_ONLY
from sparsekv_cli.cpu.sals.latent import (
    PIECE,
    assign_slots,
    encode_rows,
    prefetch_rows,
    reconstruct_rows,
    words_of,
)
from sparsekv_cli.cpu.sals.queries import SPAN, block_queries, query_units, summed_queries
from sparsekv_cli.cpu.sals.scores import (
    CHUNK,
    head_biases,
    importance,
    prefetch_samples,
    sample_span,
)


@njit(cache=True, nogil=True)
def _attend(q, n_kv, g, rows, idx, count, gather, softcap, sinks, peak, mass, acc, buffer):
    """Softmax state of kv head g's query heads over ``count`` rows; q f32 (H, d') scaled.

    peak, mass f32 (H,), acc f32 (H, d_v'); idx: address of int32 rows (``gather``). softcap: 0 for
    none; sinks f32 (H,): scores without values, or empty.
    """
    group = q.shape[0] // n_kv
    heads = slice(g * group, (g + 1) * group)
    begin_softmax(sinks[heads], peak[heads], mass[heads])
    acc[heads] = 0
    for h in range(g * group, (g + 1) * group, TILE):
        end = min(h + TILE, (g + 1) * group)
        attend_tile(
            q[h:end], rows.k + g * rows.k_head, rows.v + g * rows.v_head, rows.k_row, rows.v_row,
            gather, idx, count, softcap, peak[h:end], mass[h:end], acc[h:end], buffer,
        )  # fmt: skip


@njit(cache=True, nogil=True)
def _first_tasks(
    counter, q, units, softcap, sinks, exact, exact_rows, basis, blocks, latents, n_latent, words,
    factors, peak, mass, acc, peaks, masses
):  # fmt: skip
    """Takes tasks: attention over the exact rows of each kv head, then the queries of each span.

    units: of q, see ``query_units``. softcap, sinks, peak, mass, acc: see ``_attend``. peaks,
    masses f32 (spans, H): what the spans add to the heads' softmax sums. by_head is False: there
    are no queries of spans.
    """
    buffer = np.empty((TILE, ATTENDED_AT_ONCE + PAD), np.float32)
    task = next_task(counter)
    while task < basis.n_kv + len(peaks):
        span = task - basis.n_kv
        if span < 0:
            _attend(
                q, basis.n_kv, task, exact, exact_rows.ctypes.data, len(exact_rows), 1, softcap,
                sinks, peak, mass, acc, buffer,
            )  # fmt: skip
        else:
            first = latents.first + span * SPAN
            prefetch_samples(span, latents, n_latent)
            block_queries(q, units, first, basis.n_kv, blocks, words[span], factors[span])
            sample_span(span, words, factors, latents, n_latent, softcap, peaks[span], masses[span])
        task = next_task(counter)


@njit(cache=True, nogil=True)
def _score_tasks(counter, words, factors, bias, softcap, latents, n_latent, n_front, n_back, keys):
    """Takes chunks of latents: keys int32 (n_latent,) get the order of their importance.

    The first ``n_front`` and last ``n_back`` latents come first in that order.
    """
    weight = np.empty(CHUNK, np.float32)
    chunk = next_task(counter)
    while chunk * CHUNK < n_latent:
        start, stop = chunk * CHUNK, min(n_latent, (chunk + 1) * CHUNK)
        importance(start, stop, words, factors, bias, softcap, latents, weight)
        for j in range(start, min(n_front, stop)):
            weight[j - start] = np.float32(np.inf)
        for j in range(max(start, n_latent - n_back), stop):
            weight[j - start] = np.float32(np.inf)
        order_keys(weight, keys[start:stop], stop - start)
        chunk = next_task(counter)


@njit(cache=True, nogil=True)
def _reconstruct_tasks(counter, missing, slots, basis, latents, rows, n_threads):
    """Takes pieces of the latents that have to be reconstructed, as rows ``slots`` of ``rows``."""
    n = len(missing)
    start = next_task(counter) * PIECE
    while start < n:
        stop, following = min(n, start + PIECE), start + n_threads * PIECE
        prefetch_rows(missing[following : following + PIECE], latents)
        reconstruct_rows(missing[start:stop], slots[start:stop], basis, latents, rows)
        start = next_task(counter) * PIECE


@njit(cache=True, nogil=True)
def _attend_tasks(counter, q, softcap, none, n_kv, rows, slots, peak, mass, acc):
    """Takes tasks, a kv head and a part of the chosen rows: their softmax state.

    peak, mass f32 (1 + parts, H), acc (1 + parts, H, d_v'); entry 0 is that of the exact rows, in
    which the sinks are. none: no sinks, f32 (0,).
    """
    buffer = np.empty((TILE, ATTENDED_AT_ONCE + PAD), np.float32)
    n_part = len(peak) - 1
    task = next_task(counter)
    while task < n_part * n_kv:
        g, part = task // n_part, task % n_part
        first, last = part * len(slots) // n_part, (part + 1) * len(slots) // n_part
        _attend(
            q, n_kv, g, rows, slots[first:].ctypes.data, last - first, 1, softcap, none,
            peak[part + 1], mass[part + 1], acc[part + 1], buffer,
        )  # fmt: skip
        task = next_task(counter)


@njit(cache=True, nogil=True, parallel=PRANGE_ONLY)
def sals_step(
    q, q_nope, scale, softcap, sinks, exact, exact_rows, leaving, basis, blocks, latents, n_latent,
    n_front, n_back, n_critical, by_head, chosen, rows, kept, out, n_threads,
):  # fmt: skip
    """One token's attention over exact rows and chosen latents; returns how many are new.

    q, q_nope f32 (H, d'). softcap, sinks: see ``_attend``; the softmax that weighs latents has
    both, as the attention has. exact: f16 rows, of which ``exact_rows`` int32 take part. leaving:
    the row that leaves the window and becomes the last latent first, or -1. blocks: a BlockBasis.
    Of the n_latent latents the first n_front and last n_back are always chosen, and the n_critical
    best others; chosen int32 (all of these,) is filled ascending. by_head: one softmax a head
    (brope), otherwise the paper's sum. rows: f16, reconstructed from the latents ``kept`` int32 (>=
    len(chosen),), or -1; they become those that are chosen. out f32 (H, d_v').
    """
    n_head = q.shape[0]
    if leaving >= 0:
        last = n_latent - 1
        encode_rows(exact, leaving, latents.first + last, 1, basis, latents, last)
    scaled = scaled_copy(q, scale)
    n_chosen = len(chosen)
    n_part = (n_chosen + ATTENDED_AT_ONCE - 1) // ATTENDED_AT_ONCE
    peak = np.empty((n_part + 1, n_head), np.float32)
    mass = np.empty((n_part + 1, n_head), np.float32)
    acc = np.empty((n_part + 1, n_head, out.shape[1]), np.float32)
    n_span = (n_latent + SPAN - 1) // SPAN
    n_word = words_of(latents.score_rank) + 1
    words = np.empty((n_span, n_head if by_head else 1, n_word, LANES), np.int32)
    factors = np.empty((n_span, words.shape[1], LANES), np.float32)
    # The exact rows' part of the heads' softmax sums comes last.
    peaks = np.empty((n_span + 1 if by_head else 0, n_head), np.float32)
    masses = np.empty(peaks.shape, np.float32)
    units = query_units(scaled, blocks)
    counter = np.zeros(4, np.int64)
    for _thread in prange(n_threads):
        _first_tasks(
            counter[0:1], scaled, units, softcap, sinks, exact, exact_rows, basis, blocks, latents,
            n_latent, words, factors, peak[0], mass[0], acc[0], peaks[:-1], masses[:-1],
        )  # fmt: skip
    bias = np.empty(peaks.shape[1] if by_head else 0, np.float32)
    if by_head:
        peaks[n_span], masses[n_span] = peak[0], mass[0]
        head_biases(peaks, masses, bias)
    else:
        for span in range(n_span):
            summed_queries(q_nope, basis, latents.score_rank, words[span], factors[span])
    keys = np.empty(n_latent, np.int32)
    for _thread in prange(n_threads):
        _score_tasks(
            counter[1:2], words, factors, bias, softcap, latents, n_latent, n_front, n_back, keys
        )
    select_largest(keys, n_latent, n_chosen, chosen)
    slots = np.empty(n_chosen, np.int32)
    missing = np.empty(n_chosen, np.int32)
    missing_slots = np.empty(n_chosen, np.int32)
    n_new = assign_slots(chosen, kept, slots, missing, missing_slots)
    for _thread in prange(n_threads):
        _reconstruct_tasks(
            counter[2:3], missing[:n_new], missing_slots, basis, latents, rows, n_threads
        )
    for _thread in prange(n_threads):
        _attend_tasks(
            counter[3:4], scaled, softcap, sinks[:0], basis.n_kv, rows, slots, peak, mass, acc
        )
    for h in range(n_head):
        merge_pieces(peak[:, h], mass[:, h], acc[:, h], out[h])
    return n_new
