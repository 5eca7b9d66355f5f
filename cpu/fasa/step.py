"""FASA's decode step of a layer: scan all keys' dominant chunks, then attend to the best rows.

The arguments are a record of ``FASA`` and addresses, because an array as an argument costs half a
microsecond.
"""

import numpy as np
from numba import carray, prange

from sparsekv_cli.cpu.attention.decode import n_key_splits
from sparsekv_cli.cpu.attention.softmax import NEGATIVE_INFINITY
from sparsekv_cli.cpu.attention.store import store_halves
from sparsekv_cli.cpu.fasa.attend import attend_split_rows
from sparsekv_cli.cpu.fasa.chunks import BLOCK, choose_rows, score_pieces
from sparsekv_cli.cpu.jit.kernel import njit
from sparsekv_cli.cpu.jit.llvm import next_task
from sparsekv_cli.cpu.jit.pointers import (
    address,
    float_pointer,
    half_pointer,
    index_pointer,
    record_at,
)
from sparsekv_cli.cpu.jit.threads import PRANGE_ONLY

# The arguments of a step of one layer's cache: sizes, and addresses of contiguous arrays. H: heads,
# G: kv heads; f16 as u16.
FASA = np.dtype(
    [
        *(
            (name, np.int64)
            for name in (
                *("n_head", "n_kv"),
                "width",  # elements of a query and of a new key, padded
                "d_v",  # elements of a value, padded
                *("d", "n_dom"),  # dims of a key; dominant dims
                "d_rest",  # elements of a row of the other dims, padded
                "dims",  # int32 (G, d): a permutation of the dims, the dominant ones first
                "dom",  # u16 (G, n_block, n_dom, 16), see fasa/split.py
                "n_block",
                "rest",  # u16 (G, capacity, d_rest)
                "v",  # u16 (G, capacity, d_v)
                "capacity",
                "sinks",  # f32 (H,): scores without values; n_scored_sinks is H or 0
                "n_scored_sinks",
                "n",  # rows, with the current token's
                "n_fac",  # rows that a head attends to
                *("n_sinks", "n_recent"),  # first and last rows, to which every head attends
                "n_threads",
            )
        ),
        ("scale", np.float32),
        ("softcap", np.float32),  # 0 for none
    ]
)
_record = record_at(FASA)


@njit(cache=True, nogil=True)
def _dominant_keys(this):
    return carray(half_pointer(this.dom), (this.n_kv, this.n_block, this.n_dom, BLOCK))


@njit(cache=True, nogil=True)
def _other_keys(this):
    return carray(half_pointer(this.rest), (this.n_kv, this.capacity, this.d_rest))


@njit(cache=True, nogil=True)
def _values(this):
    return carray(half_pointer(this.v), (this.n_kv, this.capacity, this.d_v))


@njit(cache=True, nogil=True)
def append_split_row(k_new, v_new, position, dims, dom, rest, v):
    """Writes one token's K and V, f32 (G, d padded to 16), as f16 at ``position``."""
    n_dom, d = dom.shape[2], dims.shape[1]
    halves = np.empty(k_new.shape[1], np.uint16)
    for head in range(k_new.shape[0]):
        store_halves(k_new[head].ctypes.data, halves.ctypes.data, k_new.shape[1])
        for c in range(n_dom):
            dom[head, position // BLOCK, c, position % BLOCK] = halves[dims[head, c]]
        for c in range(d - n_dom):
            rest[head, position, c] = halves[dims[head, n_dom + c]]
        for c in range(d - n_dom, rest.shape[2]):
            rest[head, position, c] = 0
        store_halves(v_new[head].ctypes.data, v[head, position].ctypes.data, v_new.shape[1])


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


@njit(cache=True, nogil=True)
def _attend_heads(counter, at, q_dom, q_rest, best, rows, out):
    """Takes query heads until none is left; chooses the rows of each and attends to them."""
    this = _record(at)
    n_head, group = this.n_head, this.n_head // this.n_kv
    dom, rest, v = _dominant_keys(this), _other_keys(this), _values(this)
    sinks = carray(float_pointer(this.sinks), this.n_scored_sinks)
    scores = np.empty(this.n_fac, np.float32)
    h = next_task(counter)
    while h < n_head:
        kv = h // group
        choose_rows(
            q_dom[h], dom[kv], best[h], this.n, this.n_sinks, this.n_recent, rows[h], scores
        )
        sink = sinks[h] if len(sinks) else NEGATIVE_INFINITY
        attend_split_rows(
            q_rest[h], rest[kv], v[kv], rows[h], scores, this.scale, this.softcap, sink, out[h]
        )
        h = next_task(counter)


@njit(cache=True, nogil=True, parallel=PRANGE_ONLY)
def fasa_step(at, q, k, v, rows, out):
    """Runs a layer's decode step: adds a token as row n - 1, scores all, attends to the best.

    Arguments are addresses: of a record of ``FASA``, of q f32 (H, width), k (G, width), v (G, d_v)
    and out f32 (H, d_v). rows int32 (H, n_fac) is set to the rows attended to, ascending.
    """
    this = _record(at)
    n, n_head, n_kv, n_threads = this.n, this.n_head, this.n_kv, this.n_threads
    dom, dims = _dominant_keys(this), carray(index_pointer(this.dims), (n_kv, this.d))
    k_new = carray(float_pointer(k), (n_kv, this.width))
    v_new = carray(float_pointer(v), (n_kv, this.d_v))
    append_split_row(k_new, v_new, n - 1, dims, dom, _other_keys(this), _values(this))
    q_dom = np.empty((n_head, this.n_dom), np.float32)
    q_rest = np.empty((n_head, this.d_rest), np.float32)
    _split_queries(carray(float_pointer(q), (n_head, this.width)), dims, q_dom, q_rest)
    best = np.empty((n_head, (n + BLOCK - 1) // BLOCK), np.float32)
    n_split = n_key_splits(n, n_kv, n_threads)
    chosen = carray(index_pointer(rows), (n_head, this.n_fac))
    attended = carray(float_pointer(out), (n_head, this.d_v))
    pieces, heads = np.zeros(1, np.int64), np.zeros(1, np.int64)
    for _thread in prange(n_threads):
        score_pieces(pieces, q_dom, dom, n_split, best)
    for _thread in prange(n_threads):
        _attend_heads(heads, at, q_dom, q_rest, best, chosen, attended)


class FASAStep:
    """Runs the steps of one layer's cache. The caller keeps all arrays alive.

    dims: see ``FASA``. sinks f32 (H,), or empty.
    """

    def __init__(
        self, n_head: int, dims: np.ndarray, scale: np.float32, softcap: np.float32,
        sinks: np.ndarray, n_threads: int,
    ) -> None:  # fmt: skip
        assert dims.flags.c_contiguous and sinks.flags.c_contiguous
        self._record = record = np.zeros((), FASA)
        self._at = address(record)  # cached, because numpy describes all fields each time
        record["n_head"], record["n_threads"] = n_head, n_threads
        record["n_kv"], record["d"] = dims.shape
        record["dims"] = address(dims)
        record["scale"], record["softcap"] = scale, softcap
        record["sinks"], record["n_scored_sinks"] = address(sinks), len(sinks)

    def use_rows(self, dom: np.ndarray, rest: np.ndarray, v: np.ndarray) -> None:
        """Sets the arrays of K and V. Call it again after each change of the arrays."""
        record = self._record
        assert dom.flags.c_contiguous and rest.flags.c_contiguous and v.flags.c_contiguous
        assert rest.shape[1] == v.shape[1]
        record["dom"], record["rest"], record["v"] = address(dom), address(rest), address(v)
        record["n_block"], record["n_dom"] = dom.shape[1:3]
        record["capacity"], record["d_rest"] = rest.shape[1:]
        record["d_v"] = v.shape[2]

    def run(
        self, q: np.ndarray, k: np.ndarray, v: np.ndarray, n: int, forced: tuple[int, int],
        rows: np.ndarray, out: np.ndarray,
    ) -> None:  # fmt: skip
        """Runs the step to n rows; f32 q (H, 1, width), k (G, 1, width), v (G, 1, d_v), contiguous.

        forced: numbers of first and last rows to which every head attends; fewer than n. rows int32
        (H, n_fac) and out f32 (H, d_v) are set.
        """
        record = self._record
        assert q.flags.c_contiguous and k.flags.c_contiguous and v.flags.c_contiguous
        record["n"], record["n_fac"], record["width"] = n, rows.shape[1], q.shape[2]
        record["n_sinks"], record["n_recent"] = forced
        fasa_step(self._at, address(q), address(k), address(v), address(rows), address(out))
