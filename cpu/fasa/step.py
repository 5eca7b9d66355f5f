"""FASA's decode step of a layer: scan all keys' dominant chunks, then attend to the best rows.

this: a view of FASAState. work: of FASAWork.
"""

import numpy as np
from numba import carray

from sparsekv_cli.cpu.attention.decode import n_key_splits
from sparsekv_cli.cpu.attention.softmax import NEGATIVE_INFINITY
from sparsekv_cli.cpu.attention.store import store_halves
from sparsekv_cli.cpu.fasa.attend import attend_split_rows
from sparsekv_cli.cpu.fasa.chunks import BLOCK, choose_rows, score_pieces
from sparsekv_cli.cpu.fasa.state import FASABuffers, FASAState, FASAWork
from sparsekv_cli.cpu.jit.kernel import njit
from sparsekv_cli.cpu.jit.llvm import tasks_of
from sparsekv_cli.cpu.jit.pointers import integer_pointer
from sparsekv_cli.cpu.vector.run import memory_of, run
from sparsekv_cli.cpu.vector.views import scratch, view

SCORE, ATTEND = range(2)  # the tasks of ``run_thread``, in their order


@njit(cache=True, nogil=True)
def append_split_row(k_new, v_new, position, dims, dom, rest, v):
    """Writes one token's K and V, f32 (G, d padded to 16), as f16 at ``position``.

    An empty v_new is not written: then the values are the rows of ``rest``.
    """
    n_dom, d = dom.shape[2], dims.shape[1]
    halves = np.empty(k_new.shape[1], np.uint16)
    for head in range(k_new.shape[0]):
        store_halves(k_new[head], halves, k_new.shape[1])
        for c in range(n_dom):
            dom[head, position // BLOCK, c, position % BLOCK] = halves[dims[head, c]]
        for c in range(d - n_dom):
            rest[head, position, c] = halves[dims[head, n_dom + c]]
        for c in range(d - n_dom, rest.shape[2]):
            rest[head, position, c] = 0
        if v_new.shape[0]:
            store_halves(v_new[head], v[head, position], v_new.shape[1])


@njit(cache=True, nogil=True)
def _split_queries(q, dims, q_dom, q_rest):
    """Splits q f32 (H, d) into the dominant dims (H, n_dom) and the others (H, d_rest padded)."""
    group = q.shape[0] // dims.shape[0]
    n_dom = q_dom.shape[1]
    for h in range(q.shape[0]):
        order = dims[h // group]
        for c in range(n_dom):
            q_dom[h, c] = q[h, order[c]]
        for c in range(q_rest.shape[1]):
            q_rest[h, c] = q[h, order[n_dom + c]] if n_dom + c < order.shape[0] else 0


@njit(cache=True, nogil=True, forceinline=True)
def _attend_heads(counter, this, work, scores):
    """Takes query heads until none is left; chooses the rows of each and attends to them."""
    group, sinks, rows = this.n_head // this.n_kv, this.sinks, this.rows
    for h in tasks_of(counter, this.n_head):
        kv = h // group
        choose_rows(
            work.q_dom[h], this.dom[kv], work.best[h], this.n, this.n_sinks, this.n_recent, rows[h],
            scores,
        )  # fmt: skip
        sink = sinks[h] if len(sinks) else NEGATIVE_INFINITY
        attend_split_rows(
            work.q_rest[h], this.rest[kv], this.values[kv], rows[h], scores, this.scale,
            this.softcap, sink, this.out[h],
        )  # fmt: skip


@njit(cache=True, nogil=True)
def run_thread(at, task, counter, shared, own):
    """Runs a thread's part of a task; see ``run`` (cpu/vector/run.py)."""
    this, work = view(FASAState, at), scratch(FASAWork, at, shared)
    tasks = carray(integer_pointer(counter), 1)
    if task == SCORE:
        n_split = n_key_splits(this.n, this.n_kv, this.n_threads)
        score_pieces(tasks, work.q_dom, this.dom, n_split, work.best)
    else:
        _attend_heads(tasks, this, work, scratch(FASABuffers, at, own).scores)


@njit(cache=True, nogil=True)
def fasa_step(at):
    """Runs a layer's decode step: adds a token as row n - 1, scores all, attends to the best.

    at: of a record of FASAState.
    """
    this = view(FASAState, at)
    append_split_row(this.k, this.v, this.n - 1, this.dims, this.dom, this.rest, this.values)
    memory = memory_of(FASAWork, FASABuffers, at, this.n_threads)
    work = scratch(FASAWork, at, memory.shared)
    _split_queries(this.q, this.dims, work.q_dom, work.q_rest)
    run(this.thread, this.n_threads, at, SCORE, memory)
    run(this.thread, this.n_threads, at, ATTEND, memory)
