"""One decode step of SALS for a whole layer: score in latent space, select, reconstruct, attend.

sals/scores.py scores the latents. Selected latents are reconstructed as f16 rows of K and V. The
kernels of attention/decode.py attend to them and to the exact rows. this: a view of SALSState.
work: of SALSWork.
"""

import numpy as np
from numba import carray

from sparsekv_cli.cpu.attention.decode import Softmax, attend_heads, begin_softmax, merge_pieces
from sparsekv_cli.cpu.attention.rows import listed_rows
from sparsekv_cli.cpu.attention.select import order_keys, select_largest
from sparsekv_cli.cpu.jit.kernel import njit
from sparsekv_cli.cpu.jit.llvm import keep, tasks_of
from sparsekv_cli.cpu.jit.pointers import integer_pointer
from sparsekv_cli.cpu.sals.latent import (
    PIECE,
    assign_slots,
    encode_rows,
    prefetch_rows,
    reconstruct_rows,
)
from sparsekv_cli.cpu.sals.queries import SPAN, block_queries, query_units, summed_queries
from sparsekv_cli.cpu.sals.scores import (
    CHUNK,
    head_biases,
    importance,
    prefetch_samples,
    sample_span,
)
from sparsekv_cli.cpu.sals.state import SALSBuffers, SALSState, SALSWork
from sparsekv_cli.cpu.vector.put import put, put_scaled
from sparsekv_cli.cpu.vector.run import memory_of, run
from sparsekv_cli.cpu.vector.views import scratch, view

FIRST, SCORE, RECONSTRUCT, ATTEND = range(4)  # the tasks of ``run_thread``, in their order


@njit(cache=True, nogil=True)
def _attend(work, g, n_kv, rows, softcap, sinks, piece, buffer):
    """Computes a piece of the softmax state of kv head g's query heads, over HeadRows.

    work: a SALSWork, which has the queries and gets the state. softcap: 0 for none. sinks f32
    (H,): scores without values, or empty.
    """
    group = work.queries.shape[0] // n_kv
    heads = slice(g * group, (g + 1) * group)
    at = piece, heads
    state = Softmax(peak=work.peak[at], mass=work.mass[at], acc=work.acc[at])
    begin_softmax(sinks[heads], state)
    attend_heads(work.queries[heads], rows, softcap, state, buffer)


@njit(cache=True, nogil=True, forceinline=True)
def _first_tasks(counter, this, work, buffer):
    """Runs tasks: a kv head's attention over the exact rows, or a span's queries and samples.

    Without by_head there are no spans.
    """
    latents, n_kv, n_latent, softcap = this.latents, this.n_kv, this.n_latent, this.softcap
    n_spans = len(work.words) if this.by_head else 0
    words, factors = work.words, work.factors
    for task in tasks_of(counter, n_kv + n_spans):
        span = task - n_kv
        if span < 0:
            rows = listed_rows(this.exact, task, this.exact_rows.ctypes.data, this.n_exact)
            _attend(work, task, n_kv, rows, softcap, this.sinks, 0, buffer)
        else:
            first = latents.first + span * SPAN
            prefetch_samples(span, latents, n_latent)
            block_queries(
                work.queries, work.units, first, n_kv, this.blocks, words[span], factors[span]
            )
            sample_span(
                span, words, factors, latents, n_latent, softcap, work.peaks[span],
                work.masses[span],
            )  # fmt: skip


@njit(cache=True, nogil=True, forceinline=True)
def _score_tasks(counter, this, work, weight):
    """Runs tasks, each a chunk of latents: sets their ``keys``.

    The first ``n_front`` and last ``n_back`` latents get the largest keys. weight f32 (CHUNK,):
    scratch.
    """
    latents, n_latent, n_front, n_back = this.latents, this.n_latent, this.n_front, this.n_back
    words, factors, bias, keys = work.words, work.factors, work.bias, work.keys
    for chunk in tasks_of(counter, (n_latent + CHUNK - 1) // CHUNK):
        start, stop = chunk * CHUNK, min(n_latent, (chunk + 1) * CHUNK)
        importance(start, stop, words, factors, bias, this.softcap, latents, weight)
        for j in range(start, min(n_front, stop)):
            weight[j - start] = np.float32(np.inf)
        for j in range(max(start, n_latent - n_back), stop):
            weight[j - start] = np.float32(np.inf)
        order_keys(weight, keys[start:stop], stop - start)


@njit(cache=True, nogil=True, forceinline=True)
def _reconstruct_tasks(counter, this, work):
    """Runs tasks, each a piece of the missing latents: reconstructs it as rows of ``rows``."""
    basis, latents, rows, n_threads = this.basis, this.latents, this.rows, this.n_threads
    n, slots = this.n_new[0], work.missing_slots
    missing = work.missing[:n]
    for piece in tasks_of(counter, (n + PIECE - 1) // PIECE):
        start = piece * PIECE
        stop, following = min(n, start + PIECE), start + n_threads * PIECE
        prefetch_rows(missing[following : following + PIECE], latents)
        reconstruct_rows(missing[start:stop], slots[start:stop], basis, latents, rows)


@njit(cache=True, nogil=True, forceinline=True)
def _attend_tasks(counter, this, work, buffer):
    """Runs tasks, each a kv head and a piece of the chosen rows: computes their softmax state."""
    no_sinks, slots = this.sinks[:0], work.slots
    n_piece = len(work.peak) - 1
    for task in tasks_of(counter, n_piece * this.n_kv):
        g, piece = task // n_piece, task % n_piece
        first, last = piece * len(slots) // n_piece, (piece + 1) * len(slots) // n_piece
        rows = listed_rows(this.rows, g, slots[first:].ctypes.data, last - first)
        _attend(work, g, this.n_kv, rows, this.softcap, no_sinks, piece + 1, buffer)


@njit(cache=True, nogil=True)
def run_thread(at, task, counter, shared, own):
    """Runs a thread's part of a task; see ``run`` (cpu/vector/run.py)."""
    this, work = view(SALSState, at), scratch(SALSWork, at, shared)
    buffers, tasks = scratch(SALSBuffers, at, own), carray(integer_pointer(counter), 1)
    if task == FIRST:
        _first_tasks(tasks, this, work, buffers.scores)
    elif task == SCORE:
        _score_tasks(tasks, this, work, buffers.weights)
    elif task == RECONSTRUCT:
        _reconstruct_tasks(tasks, this, work)
    else:
        _attend_tasks(tasks, this, work, buffers.scores)


@njit(cache=True, nogil=True)
def sals_step(at):
    """Computes one token's attention over exact rows and chosen latents.

    at: of a record of SALSState. A chosen latent that ``rows`` already holds is not reconstructed
    again.
    """
    this = view(SALSState, at)
    latents, n_threads = this.latents, this.n_threads
    memory = memory_of(SALSWork, SALSBuffers, at, n_threads)
    work = scratch(SALSWork, at, memory.shared)
    if this.leaving >= 0:
        last = this.n_latent - 1
        encode_rows(this.exact, this.leaving, latents.first + last, 1, this.basis, latents, last)
    put_scaled(work.queries, this.q, this.scale)
    put(work.units, query_units(work.queries, this.blocks))
    run(this.thread, n_threads, at, FIRST, memory)
    if this.by_head:
        work.peaks[-1], work.masses[-1] = work.peak[0], work.mass[0]
        head_biases(work.peaks, work.masses, work.bias)
    else:
        for span in range(len(work.words)):
            summed_queries(
                this.q_nope, this.basis, latents.score_rank, work.words[span], work.factors[span]
            )
    run(this.thread, n_threads, at, SCORE, memory)
    select_largest(work.keys, this.n_latent, this.n_chosen, this.chosen)
    this.n_new[0] = assign_slots(
        this.chosen, this.kept, work.slots, work.missing, work.missing_slots
    )
    run(this.thread, n_threads, at, RECONSTRUCT, memory)
    run(this.thread, n_threads, at, ATTEND, memory)
    for h in range(this.n_head):
        merge_pieces(work.peak[:, h], work.mass[:, h], work.acc[:, h], this.out[h])
    keep(memory)
