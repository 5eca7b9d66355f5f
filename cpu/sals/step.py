"""One decode step of SALS for a whole layer: score in latent space, select, reconstruct, attend.

sals/scores.py scores the latents. Selected latents are reconstructed as f16 rows of K and V. The
kernels of attention/decode.py attend to them and to the exact rows. The arguments are a record of
``SALS`` and addresses, because an array as an argument costs half a microsecond.
"""

import numpy as np
from numba import carray, prange

from sparsekv_cli.cpu.attention.decode import BLOCK as ATTENDED_AT_ONCE
from sparsekv_cli.cpu.attention.decode import (
    TILE,
    attend_heads,
    begin_softmax,
    merge_pieces,
    scaled_copy,
)
from sparsekv_cli.cpu.attention.select import order_keys, select_largest
from sparsekv_cli.cpu.attention.tile import PAD
from sparsekv_cli.cpu.jit.kernel import njit
from sparsekv_cli.cpu.jit.llvm import LANES, next_task
from sparsekv_cli.cpu.jit.pointers import (
    address,
    addresses_of,
    double_pointer,
    float_pointer,
    index_pointer,
    integer_pointer,
    record_at,
)
from sparsekv_cli.cpu.jit.threads import PRANGE_ONLY
from sparsekv_cli.cpu.sals.latent import (
    PIECE,
    LatentBasis,
    Latents,
    RowPointers,
    assign_slots,
    encode_rows,
    prefetch_rows,
    reconstruct_rows,
    words_of,
)
from sparsekv_cli.cpu.sals.queries import (
    SPAN,
    BlockBasis,
    block_queries,
    query_units,
    summed_queries,
)
from sparsekv_cli.cpu.sals.scores import (
    CHUNK,
    head_biases,
    importance,
    prefetch_samples,
    sample_span,
)


def _fields(names: tuple[str, ...]) -> list[tuple[str, type]]:
    return [(name, np.int64) for name in names]


ROWS = np.dtype(_fields(RowPointers._fields))
# The arguments of a step of one layer's cache: sizes, and addresses of contiguous arrays. H: heads,
# G: kv heads; d', d_v': head sizes of K and V, padded.
SALS = np.dtype(
    [
        ("exact", ROWS),  # the sinks and the last rows
        ("rows", ROWS),  # reconstructed rows
        ("latents", _fields(Latents._fields)),
        ("basis", _fields(("encode", "decode", "turns"))),  # addresses, see LatentBasis
        ("blocks", _fields(BlockBasis._fields)),  # addresses
        *_fields(
            (
                *("n_head", "n_kv"),
                *("d", "d_v", "n_pairs"),  # of the basis
                *("width", "width_v"),  # d', d_v'
                "encode_columns",
                "decode_columns",
                "n_turns",
                *("block_words", "n_dims", "block_pairs"),  # sizes of the BlockBasis
                "by_head",  # one softmax a head (brope), otherwise the paper's sum
                "sinks",  # f32 (n_scored_sinks,): scores without values
                "n_scored_sinks",  # H or 0
                "n_threads",
                "exact_rows",  # int32 (n_exact,): the exact rows that take part
                "n_exact",
                "leaving",  # the row that leaves the window and becomes the last latent, or -1
                "n_latent",
                *("n_front", "n_back"),  # first and last latents that are always chosen
                "n_chosen",  # all that are chosen
                "kept",  # int32 (n_kept,): the latents that ``rows`` holds, or -1
                "n_kept",
            )
        ),
        ("rope_scale", np.float32),
        ("scale", np.float32),
        ("softcap", np.float32),  # 0 for none
    ]
)
_record = record_at(SALS)


@njit(cache=True, nogil=True)
def _latents(this):
    at = this.latents
    return Latents(
        at.score, at.records, at.record, at.rank, at.score_rank, at.bits, at.head_bytes, at.first
    )


@njit(cache=True, nogil=True)
def _rows(at):
    return RowPointers(at.k, at.v, at.k_head, at.v_head, at.k_row, at.v_row)


@njit(cache=True, nogil=True)
def _basis(this):
    at = this.basis
    return LatentBasis(
        carray(float_pointer(at.encode), (this.n_kv * this.width, this.encode_columns)),
        carray(float_pointer(at.decode), (this.latents.rank, this.decode_columns)),
        carray(double_pointer(at.turns), this.n_turns),
        this.n_pairs, this.rope_scale, this.d, this.d_v, this.n_kv,
    )  # fmt: skip


@njit(cache=True, nogil=True)
def _blocks(this):
    at, shape = this.blocks, (this.n_kv, this.latents.score_rank)
    return BlockBasis(
        carray(index_pointer(at.decode), (shape[0], shape[1], this.block_words)),
        carray(float_pointer(at.scales), shape),
        carray(integer_pointer(at.dims), this.n_dims),
        carray(double_pointer(at.turns), this.block_pairs),
        carray(float_pointer(at.damp), this.block_pairs),
    )


@njit(cache=True, nogil=True)
def _scored_sinks(this):
    return carray(float_pointer(this.sinks), this.n_scored_sinks)


@njit(cache=True, nogil=True)
def _attend(this, q, g, rows, idx, count, sinks, peak, mass, acc, buffer):
    """Computes the softmax state of kv head g's query heads over ``count`` rows.

    this: a record of ``SALS``. q f32 (H, d') scaled. rows: RowPointers. idx: address of int32 rows.
    sinks f32 (H,): scores without values, or empty. peak, mass f32 (H,), acc f32 (H, d_v'): set.
    """
    group = q.shape[0] // this.n_kv
    heads = slice(g * group, (g + 1) * group)
    begin_softmax(sinks[heads], peak[heads], mass[heads])
    acc[heads] = 0
    attend_heads(
        q[heads], rows.k + g * rows.k_head, rows.v + g * rows.v_head, rows.k_row, rows.v_row, 1,
        idx, count, this.softcap, peak[heads], mass[heads], acc[heads], buffer,
    )  # fmt: skip


@njit(cache=True, nogil=True)
def _first_tasks(counter, at, q, units, words, factors, peak, mass, acc, peaks, masses):
    """Runs tasks: a kv head's attention over the exact rows, or a span's queries and samples.

    at: the record's address. units: ``query_units`` of q. peak, mass, acc: see ``_attend``. peaks,
    masses f32 (spans, H): the spans' parts of the heads' softmax sums. Without by_head there are no
    spans.
    """
    this = _record(at)
    exact, latents, blocks, n_kv = _rows(this.exact), _latents(this), _blocks(this), this.n_kv
    sinks, softcap, n_latent = _scored_sinks(this), this.softcap, this.n_latent
    buffer = np.empty((TILE, ATTENDED_AT_ONCE + PAD), np.float32)
    task = next_task(counter)
    while task < n_kv + len(peaks):
        span = task - n_kv
        if span < 0:
            _attend(
                this, q, task, exact, this.exact_rows, this.n_exact, sinks, peak, mass, acc, buffer
            )
        else:
            first = latents.first + span * SPAN
            prefetch_samples(span, latents, n_latent)
            block_queries(q, units, first, n_kv, blocks, words[span], factors[span])
            sample_span(span, words, factors, latents, n_latent, softcap, peaks[span], masses[span])
        task = next_task(counter)


@njit(cache=True, nogil=True)
def _score_tasks(counter, at, words, factors, bias, keys):
    """Runs tasks, each a chunk of latents: keys int32 (n_latent,) sort by importance.

    The first ``n_front`` and last ``n_back`` latents get the largest keys.
    """
    this = _record(at)
    latents, n_latent, n_front, n_back = _latents(this), this.n_latent, this.n_front, this.n_back
    softcap, weight = this.softcap, np.empty(CHUNK, np.float32)
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
def _reconstruct_tasks(counter, at, missing, slots):
    """Runs tasks, each a piece of ``missing``: reconstructs it as rows ``slots`` of ``rows``."""
    this = _record(at)
    basis, latents, rows, n_threads = _basis(this), _latents(this), _rows(this.rows), this.n_threads
    n = len(missing)
    start = next_task(counter) * PIECE
    while start < n:
        stop, following = min(n, start + PIECE), start + n_threads * PIECE
        prefetch_rows(missing[following : following + PIECE], latents)
        reconstruct_rows(missing[start:stop], slots[start:stop], basis, latents, rows)
        start = next_task(counter) * PIECE


@njit(cache=True, nogil=True)
def _attend_tasks(counter, at, q, slots, peak, mass, acc):
    """Runs tasks, each a kv head and a part of the chosen rows: computes their softmax state.

    peak, mass f32 (1 + parts, H), acc f32 (1 + parts, H, d_v'). Entry 0 is the state of the exact
    rows and the sinks.
    """
    this = _record(at)
    rows, no_sinks = _rows(this.rows), _scored_sinks(this)[:0]
    buffer = np.empty((TILE, ATTENDED_AT_ONCE + PAD), np.float32)
    n_part = len(peak) - 1
    task = next_task(counter)
    while task < n_part * this.n_kv:
        g, part = task // n_part, task % n_part
        first, last = part * len(slots) // n_part, (part + 1) * len(slots) // n_part
        _attend(
            this, q, g, rows, slots[first:].ctypes.data, last - first, no_sinks, peak[part + 1],
            mass[part + 1], acc[part + 1], buffer,
        )  # fmt: skip
        task = next_task(counter)


@njit(cache=True, nogil=True, parallel=PRANGE_ONLY)
def sals_step(at, q, q_nope, chosen, out):
    """Computes one token's attention over exact rows and chosen latents.

    Returns the number of latents that it reconstructed. Arguments are addresses. at: of a record of
    ``SALS``. q, q_nope: f32 (H, d'). chosen: int32 (n_chosen,), set in ascending order. out: f32
    (H, d_v'). The softmax that weighs latents has the attention's softcap and sinks. A chosen
    latent that ``rows`` already holds is not reconstructed again.
    """
    this = _record(at)
    n_head, n_latent, n_chosen = this.n_head, this.n_latent, this.n_chosen
    by_head, n_threads = this.by_head != 0, this.n_threads
    basis, latents = _basis(this), _latents(this)
    if this.leaving >= 0:
        last = n_latent - 1
        encode_rows(_rows(this.exact), this.leaving, latents.first + last, 1, basis, latents, last)
    scaled = scaled_copy(carray(float_pointer(q), (n_head, this.width)), this.scale)
    n_part = (n_chosen + ATTENDED_AT_ONCE - 1) // ATTENDED_AT_ONCE
    peak = np.empty((n_part + 1, n_head), np.float32)
    mass = np.empty((n_part + 1, n_head), np.float32)
    acc = np.empty((n_part + 1, n_head, this.width_v), np.float32)
    n_span = (n_latent + SPAN - 1) // SPAN
    n_word = words_of(latents.score_rank) + 1
    words = np.empty((n_span, n_head if by_head else 1, n_word, LANES), np.int32)
    factors = np.empty((n_span, words.shape[1], LANES), np.float32)
    # The last entry is the exact rows' part of the heads' softmax sums.
    peaks = np.empty((n_span + 1 if by_head else 0, n_head), np.float32)
    masses = np.empty(peaks.shape, np.float32)
    units = query_units(scaled, _blocks(this))
    counter = np.zeros(4, np.int64)
    for _thread in prange(n_threads):
        _first_tasks(
            counter[0:1], at, scaled, units, words, factors, peak[0], mass[0], acc[0], peaks[:-1],
            masses[:-1],
        )  # fmt: skip
    bias = np.empty(peaks.shape[1] if by_head else 0, np.float32)
    if by_head:
        peaks[n_span], masses[n_span] = peak[0], mass[0]
        head_biases(peaks, masses, bias)
    else:
        before = carray(float_pointer(q_nope), (n_head, this.width))
        for span in range(n_span):
            summed_queries(before, basis, latents.score_rank, words[span], factors[span])
    keys = np.empty(n_latent, np.int32)
    for _thread in prange(n_threads):
        _score_tasks(counter[1:2], at, words, factors, bias, keys)
    best = carray(index_pointer(chosen), n_chosen)
    select_largest(keys, n_latent, n_chosen, best)
    slots = np.empty(n_chosen, np.int32)
    missing = np.empty(n_chosen, np.int32)
    missing_slots = np.empty(n_chosen, np.int32)
    kept = carray(index_pointer(this.kept), this.n_kept)
    n_new = assign_slots(best, kept, slots, missing, missing_slots)
    for _thread in prange(n_threads):
        _reconstruct_tasks(counter[2:3], at, missing[:n_new], missing_slots)
    for _thread in prange(n_threads):
        _attend_tasks(counter[3:4], at, scaled, slots, peak, mass, acc)
    attended = carray(float_pointer(out), (n_head, this.width_v))
    for h in range(n_head):
        merge_pieces(peak[:, h], mass[:, h], acc[:, h], attended[h])
    return n_new


class SALSStep:
    """Runs the steps of one layer's cache. The caller keeps all arrays alive.

    sinks f32 (H,): scores without values, or empty. by_head: see ``SALS``.
    """

    def __init__(
        self, n_head: int, basis: LatentBasis, blocks: BlockBasis, scale: np.float32,
        softcap: np.float32, sinks: np.ndarray, by_head: bool, n_threads: int,
    ) -> None:  # fmt: skip
        matrices = basis[:3]
        assert all(array.flags.c_contiguous for array in (*matrices, *blocks, sinks))
        self._record = record = np.zeros((), SALS)
        self._at = address(record)  # cached, because numpy describes all fields each time
        record["basis"], record["blocks"] = addresses_of(matrices), addresses_of(blocks)
        record["n_head"], record["n_kv"], record["n_threads"] = n_head, basis.n_kv, n_threads
        record["d"], record["d_v"], record["n_pairs"] = basis.d, basis.d_v, basis.n_pairs
        record["encode_columns"], record["decode_columns"] = (
            basis.encode.shape[1],
            basis.decode.shape[1],
        )
        record["width"] = len(basis.encode) // basis.n_kv
        record["n_turns"] = len(basis.turns)
        record["block_words"], record["n_dims"] = blocks.decode.shape[2], len(blocks.dims)
        record["block_pairs"], record["by_head"] = len(blocks.turns), by_head
        record["sinks"], record["n_scored_sinks"] = address(sinks), len(sinks)
        record["rope_scale"], record["scale"], record["softcap"] = basis.rope_scale, scale, softcap

    def use_latents(self, latents: Latents, leaving: int, n_latent: int) -> None:
        """Sets the next step's latents. leaving: the exact row that becomes the last one, or -1."""
        record = self._record
        record["latents"] = latents
        record["leaving"], record["n_latent"] = leaving, n_latent

    def use_rows(self, exact: np.ndarray, exact_rows: np.ndarray, rows: np.ndarray) -> None:
        """Sets the layouts (attention/rows.py) of exact and of reconstructed rows.

        exact_rows int32: the exact rows that take part.
        """
        n_fields, record = len(RowPointers._fields), self._record
        record["exact"] = tuple(exact[:n_fields].tolist())
        record["rows"] = tuple(rows[:n_fields].tolist())
        record["exact_rows"], record["n_exact"] = address(exact_rows), len(exact_rows)

    def run(
        self, q: np.ndarray, q_nope: np.ndarray, n_front: int, n_back: int, chosen: np.ndarray,
        kept: np.ndarray, out: np.ndarray,
    ) -> int:  # fmt: skip
        """Runs the step for f32 q, q_nope (H, 1, d'), contiguous; returns ``sals_step``'s number.

        n_front, n_back, chosen, kept, out: see ``SALS`` and ``sals_step``. kept has a slot for each
        chosen latent.
        """
        record = self._record
        assert q.flags.c_contiguous and q_nope.flags.c_contiguous and out.flags.c_contiguous
        record["n_front"], record["n_back"], record["n_chosen"] = n_front, n_back, len(chosen)
        record["kept"], record["n_kept"], record["width_v"] = address(kept), len(kept), out.shape[1]
        n_new: int = sals_step(self._at, address(q), address(q_nope), address(chosen), address(out))
        return n_new
