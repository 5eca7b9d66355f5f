"""Decode attention over an f16 KV cache: all rows, or rows listed by index, with online softmax.

K and V of one layer lie as f16 (kv head, capacity, row) with rows padded to a multiple of 16
elements, so that one row is a few whole vectors wherever it is: a scan streams and a subset reads
only what it selected. A key row is loaded and widened once for a tile of up to four query heads of
its GQA group, and the dot products of a tile are summed across lanes together (emit.sum_many).
"""

from __future__ import annotations

import numpy as np
from llvmlite import ir
from numba import njit, prange, types
from numba.extending import intrinsic

from sparsekv_cli.cpu import emit
from sparsekv_cli.cpu.emit import F32, I32, I64, LANES, VF, VI, const, load, next_task, splat
from sparsekv_cli.cpu.parallel import PRANGE_ONLY

BLOCK = 256  # keys whose scores are kept at a time: K and V of a block stay in the L2 cache
PAD = 32  # floats that a score buffer needs behind its last score
AHEAD_SCAN, AHEAD_GATHER = 96, 24  # rows between a load and its prefetch
TILE = 4  # query heads that share a loaded row
ONE_THREAD_BELOW = 160  # rows under which starting threads costs more than they save
NEGATIVE_INFINITY = np.float32(-np.inf)


# --- intrinsics ---------------------------------------------------------------------------------


def _row_address(b, base, row_bytes, idx, j, gather):
    """Address of row j (of row idx[j] when gathering; idx is the address of int32)."""
    if gather:
        j = b.sext(load(b, I32, b.add(idx, b.mul(j, I64(4)))), I64)
    return b.add(base, b.mul(j, row_bytes))


@intrinsic
def tile_scores(typingctx, tile, gather, q, k, row_bytes, idx, count, d, out, out_stride):
    """out[t, j] = q[t] . k[row j], t < tile, j < count; q f32 (tile, d), k f16, out f32.

    Addresses are i64; ``out_stride`` in floats. ``gather`` = 1: row j is idx[j] (int32). Writes up
    to 15 floats behind out[t, count). d is a multiple of 16.
    """
    if not isinstance(tile, types.IntegerLiteral) or not isinstance(gather, types.IntegerLiteral):
        return None

    def codegen(context, b, signature, args):
        tile_, gather_ = (signature.args[i].literal_value for i in (0, 1))
        _, _, q, k, row_bytes, idx, count, d, out, out_stride = args
        n_keys = LANES // tile_
        last = b.sub(count, I64(1))

        def group(j, carried):
            rows = []
            for i in range(n_keys):
                at = b.add(j, I64(i))
                at = b.select(b.icmp_signed("<", at, last), at, last)
                rows.append(_row_address(b, k, row_bytes, idx, at, gather_))

            ahead = _rows_ahead(b, k, row_bytes, idx, j, n_keys, last, gather_)

            def dims(c, sums):
                for row in ahead:
                    emit.prefetch(b, b.add(row, b.mul(c, I64(2))))
                keys = [emit.load_half_lanes(b, b.add(row, b.mul(c, I64(2)))) for row in rows]
                new = []
                for t in range(tile_):
                    at = b.add(q, b.mul(b.add(b.mul(I64(t), d), c), I64(4)))
                    query = load(b, VF, at)
                    for i in range(n_keys):
                        new.append(emit.fma(b, keys[i], query, sums[t * n_keys + i]))
                return new

            zero = const(F32, 0.0)
            sums = emit.loop(b, I64(0), d, LANES, [zero] * (tile_ * n_keys), dims)
            sums += [zero] * (LANES - len(sums))
            dots = emit.sum_many(b, sums)
            for t in range(tile_):
                at = b.add(out, b.mul(b.add(b.mul(I64(t), out_stride), j), I64(4)))
                part = emit.shuffle(b, dots, dots, range(t * n_keys, (t + 1) * n_keys))
                emit.store(b, part, at)
            return []

        emit.loop(b, I64(0), count, n_keys, [], group)
        return context.get_dummy_value()

    i64 = types.int64
    return types.void(tile, gather, i64, i64, i64, i64, i64, i64, i64, i64), codegen


@intrinsic
def tile_values(typingctx, tile, gather, p, p_stride, v, row_bytes, idx, count, d, acc):
    """acc[t] += sum over j < count of p[t, j] v[row j]; acc f32 (tile, d), addresses as i64."""
    if not isinstance(tile, types.IntegerLiteral) or not isinstance(gather, types.IntegerLiteral):
        return None

    def codegen(context, b, signature, args):
        tile_, gather_ = (signature.args[i].literal_value for i in (0, 1))
        _, _, p, p_stride, v, row_bytes, idx, count, d, acc = args

        def chunk(c, n_vectors):
            """Accumulates dims c .. c + 16 n_vectors."""
            unroll = max(1, 8 // (tile_ * n_vectors))
            acc_at = [
                b.add(acc, b.mul(b.add(b.add(b.mul(I64(t), d), c), I64(LANES * i)), I64(4)))
                for t in range(tile_)
                for i in range(n_vectors)
            ]

            def key(j, sums):
                row = _row_address(b, v, row_bytes, idx, j, gather_)
                values = [
                    emit.load_half_lanes(b, b.add(row, b.mul(b.add(c, I64(LANES * i)), I64(2))))
                    for i in range(n_vectors)
                ]
                new = []
                for t in range(tile_):
                    weight_at = b.add(p, b.mul(b.add(b.mul(I64(t), p_stride), j), I64(4)))
                    weight = splat(b, load(b, F32, weight_at))
                    for i in range(n_vectors):
                        new.append(emit.fma(b, values[i], weight, sums[t * n_vectors + i]))
                return new

            size = len(acc_at)

            last = b.sub(count, I64(1))

            def keys(j, sums):
                for row in _rows_ahead(b, v, row_bytes, idx, j, unroll, last, gather_):
                    for line in range(0, 2 * LANES * n_vectors, 64):
                        emit.prefetch(b, b.add(row, b.mul(b.add(c, I64(line // 2)), I64(2))))
                new = []
                for u in range(unroll):
                    new += key(b.add(j, I64(u)), sums[u * size : (u + 1) * size])
                return new

            zero = const(F32, 0.0)
            whole = b.sub(count, b.srem(count, I64(unroll)))
            start = [load(b, VF, at) for at in acc_at] + [zero] * (size * (unroll - 1))
            sums = emit.loop(b, I64(0), whole, unroll, start, keys)
            for u in range(1, unroll):
                sums[:size] = [b.fadd(sums[i], sums[u * size + i]) for i in range(size)]
            sums = emit.loop(b, whole, count, 1, sums[:size], key)
            for at, value in zip(acc_at, sums, strict=True):
                emit.store(b, value, at)

        def wide(c, carried):
            chunk(c, 4)
            return []

        def narrow(c, carried):
            chunk(c, 1)
            return []

        whole = b.sub(d, b.srem(d, I64(64)))
        emit.loop(b, I64(0), whole, 64, [], wide)
        emit.loop(b, whole, d, LANES, [], narrow)
        return context.get_dummy_value()

    i64 = types.int64
    return types.void(tile, gather, i64, i64, i64, i64, i64, i64, i64, i64), codegen


def _exp_lanes(b: ir.IRBuilder, x: ir.Value) -> ir.Value:
    """e^x for x <= 0, <16 x float>, within 2 units in the last place; 0 below -87.

    Cody-Waite reduction x = n ln 2 + r and a polynomial of degree 6 in r (Cephes' expf).
    """
    x = emit.call_named(b, "llvm.maxnum.v16f32", VF, x, const(F32, -87.5))
    n = emit.fma(b, x, const(F32, 1.4426950408889634), const(F32, 0.5))
    n = emit.call_named(b, "llvm.floor.v16f32", VF, n)
    r = emit.fma(b, n, const(F32, -0.693359375), x)
    r = emit.fma(b, n, const(F32, 2.12194440e-4), r)
    y = const(F32, 1.9875691500e-4)
    for c in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 0.5):
        y = emit.fma(b, y, r, const(F32, c))
    y = b.fadd(emit.fma(b, y, b.fmul(r, r), r), const(F32, 1.0))
    power = b.shl(b.add(b.fptosi(n, VI), const(I32, 127)), const(I32, 23))
    y = b.fmul(y, b.bitcast(power, VF))
    return b.select(b.fcmp_ordered(">", x, const(F32, -87.0)), y, const(F32, 0.0))


@intrinsic
def exp_in_place(typingctx, scores, count, peak):
    """scores[j] = e^(scores[j] - peak), j < count rounded up to 16; returns their sum (f32)."""

    def codegen(context, b, signature, args):
        scores, count, peak = args
        peak_lanes = splat(b, peak)

        def body(j, sums):
            at = b.add(scores, b.mul(j, I64(4)))
            y = _exp_lanes(b, b.fsub(load(b, VF, at), peak_lanes))
            emit.store(b, y, at)
            return [b.fadd(sums[0], y)]

        return emit.sum_lanes(b, emit.loop(b, I64(0), count, LANES, [const(F32, 0.0)], body)[0])

    return types.float32(types.int64, types.int64, types.float32), codegen


@intrinsic
def max_of(typingctx, scores, count):
    """The largest of scores[0 .. count rounded up to 16) (f32)."""

    def codegen(context, b, signature, args):
        scores, count = args

        def body(j, best):
            value = load(b, VF, b.add(scores, b.mul(j, I64(4))))
            return [emit.call_named(b, "llvm.maxnum.v16f32", VF, best[0], value)]

        return emit.max_lanes(b, emit.loop(b, I64(0), count, LANES, [const(F32, -np.inf)], body)[0])

    return types.float32(types.int64, types.int64), codegen


@intrinsic
def store_halves(typingctx, source, target, count):
    """target[i] = f16(source[i]), i < count (a multiple of 16); f32 source, addresses."""

    def codegen(context, b, signature, args):
        source, target, count = args

        def body(j, carried):
            value = load(b, VF, b.add(source, b.mul(j, I64(4))))
            emit.store(b, b.fptrunc(value, emit.vec(emit.F16)), b.add(target, b.mul(j, I64(2))))
            return []

        emit.loop(b, I64(0), count, LANES, [], body)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), codegen


def _rows_ahead(b, base, row_bytes, idx, j, n_rows, last, gather):
    """Addresses of n_rows rows from j + AHEAD on; in a list, of its row ``last`` at most."""
    rows = []
    for i in range(n_rows):
        at = b.add(j, I64((AHEAD_GATHER if gather else AHEAD_SCAN) + i))
        if gather:
            at = b.select(b.icmp_signed("<", at, last), at, last)
        rows.append(_row_address(b, base, row_bytes, idx, at, gather))
    return rows


# --- one tile of heads over one list of rows ------------------------------------------------------


@njit(cache=True, nogil=True)
def scores_any(tile, gather, q, k, row_bytes, idx, count, d, out, out_stride):
    """``tile_scores`` for a tile of 1 to 4 heads that is known at run time only."""
    if gather:
        if tile == 1:
            tile_scores(1, 1, q, k, row_bytes, idx, count, d, out, out_stride)
        elif tile == 2:
            tile_scores(2, 1, q, k, row_bytes, idx, count, d, out, out_stride)
        elif tile == 3:
            tile_scores(3, 1, q, k, row_bytes, idx, count, d, out, out_stride)
        else:
            tile_scores(4, 1, q, k, row_bytes, idx, count, d, out, out_stride)
    elif tile == 1:
        tile_scores(1, 0, q, k, row_bytes, idx, count, d, out, out_stride)
    elif tile == 2:
        tile_scores(2, 0, q, k, row_bytes, idx, count, d, out, out_stride)
    elif tile == 3:
        tile_scores(3, 0, q, k, row_bytes, idx, count, d, out, out_stride)
    else:
        tile_scores(4, 0, q, k, row_bytes, idx, count, d, out, out_stride)


@njit(cache=True, nogil=True)
def values_any(tile, gather, p, p_stride, v, row_bytes, idx, count, d, acc):
    """``tile_values`` for a tile of 1 to 4 heads that is known at run time only."""
    if gather:
        if tile == 1:
            tile_values(1, 1, p, p_stride, v, row_bytes, idx, count, d, acc)
        elif tile == 2:
            tile_values(2, 1, p, p_stride, v, row_bytes, idx, count, d, acc)
        elif tile == 3:
            tile_values(3, 1, p, p_stride, v, row_bytes, idx, count, d, acc)
        else:
            tile_values(4, 1, p, p_stride, v, row_bytes, idx, count, d, acc)
    elif tile == 1:
        tile_values(1, 0, p, p_stride, v, row_bytes, idx, count, d, acc)
    elif tile == 2:
        tile_values(2, 0, p, p_stride, v, row_bytes, idx, count, d, acc)
    elif tile == 3:
        tile_values(3, 0, p, p_stride, v, row_bytes, idx, count, d, acc)
    else:
        tile_values(4, 0, p, p_stride, v, row_bytes, idx, count, d, acc)


@njit(cache=True, nogil=True)
def scaled_copy(q, scale):
    """q * scale in a new array (numba keeps array expressions out of prange loops)."""
    return q * scale


@njit(cache=True, nogil=True)
def attend_tile(q, k, v, k_row, v_row, gather, idx, count, peak, mass, acc, scores):
    """Folds ``count`` rows into the running softmax of a tile of heads.

    q f32 (tile, d) scaled by 1/sqrt(d); k, v: addresses of f16 rows of k_row, v_row bytes; idx:
    address of int32 row numbers (``gather``), else rows 0..count. State: peak, mass f32 (tile,),
    acc f32 (tile, d_v), the numerators with respect to peak. scores: f32 (tile, BLOCK + PAD).
    """
    tile, d = q.shape
    stride = scores.shape[1]
    for start in range(0, count, BLOCK):
        size = min(BLOCK, count - start)
        at = idx + 4 * start
        k_at, v_at = k, v
        if not gather:
            k_at, v_at = k + start * k_row, v + start * v_row
        scores_any(
            tile, gather, q.ctypes.data, k_at, k_row, at, size, d, scores.ctypes.data, stride
        )
        for t in range(tile):
            for j in range(size, size + LANES):
                scores[t, j] = NEGATIVE_INFINITY
            address = scores.ctypes.data + 4 * t * stride
            new_peak = max(peak[t], max_of(address, size))
            old = np.float32(np.exp(peak[t] - new_peak))
            mass[t] = mass[t] * old + exp_in_place(address, size, new_peak)
            peak[t] = new_peak
            for c in range(acc.shape[1]):
                acc[t, c] *= old
        values_any(
            tile, gather, scores.ctypes.data, stride, v_at, v_row, at, size, acc.shape[1],
            acc.ctypes.data,
        )  # fmt: skip


# --- whole layers ---------------------------------------------------------------------------------


@njit(cache=True, nogil=True)
def n_key_splits(n, n_kv_head, n_threads):
    """Pieces that a kv head's keys are cut into, so that threads can share the work evenly."""
    if n_threads == 1:
        return 1
    return min(max(1, n // BLOCK), -(-4 * n_threads // n_kv_head))


@njit(cache=True, nogil=True)
def _attend_piece(
    q, k, v, k_row, v_row, gather, idx, count, scale, whole, target, peak_out, mass_out, scores
):
    """A tile of heads over one list of rows, in memory of this thread until the end.

    target f32 (tile, d_v): the output (``whole``: these are all rows), or numerators with respect
    to the peaks and masses written at peak_out, mass_out f32 (tile,).
    """
    tile, d_v = target.shape
    peak = np.full(tile, NEGATIVE_INFINITY, np.float32)
    mass = np.zeros(tile, np.float32)
    acc = np.zeros((tile, d_v), np.float32)
    scaled = scaled_copy(q, scale)
    attend_tile(scaled, k, v, k_row, v_row, gather, idx, count, peak, mass, acc, scores)
    for t in range(tile):
        factor = np.float32(1) / mass[t] if whole else np.float32(1)
        for c in range(d_v):
            target[t, c] = acc[t, c] * factor
        if not whole:
            peak_out[t] = peak[t]
            mass_out[t] = mass[t]


@njit(cache=True, nogil=True)
def _attend_pieces(
    counter, q, k, v, k_head, v_head, k_row, v_row, n, n_kv_head, scale, n_split, peak, mass, acc
):
    """Takes (kv head, split) tasks until there are none; see ``attend_dense``."""
    group = q.shape[0] // n_kv_head
    scores = np.empty((TILE, BLOCK + PAD), np.float32)
    task = next_task(counter)
    while task < n_kv_head * n_split:
        kv_head, split = task // n_split, task % n_split
        first, last = split * n // n_split, (split + 1) * n // n_split
        for h in range(kv_head * group, (kv_head + 1) * group, TILE):
            end = min(h + TILE, (kv_head + 1) * group)
            _attend_piece(
                q[h:end], k + kv_head * k_head + first * k_row,
                v + kv_head * v_head + first * v_row, k_row, v_row, 0, 0, last - first, scale,
                n_split == 1, acc[split, h:end], peak[split, h:end], mass[split, h:end], scores,
            )  # fmt: skip
        task = next_task(counter)


@njit(cache=True, nogil=True, parallel=PRANGE_ONLY)
def attend_dense(q, k, v, k_head, v_head, k_row, v_row, n, n_kv_head, scale, out, n_threads):
    """Attention of one token over rows 0..n of every kv head.

    q f32 (H, d); k, v: addresses; k_head, v_head: bytes between kv heads; out f32 (H, d_v). Query
    head h belongs to kv head h // (H / G). Keys are split between threads so that they share the
    work evenly; the pieces are merged by their peaks and masses. Short contexts stay on one thread.
    """
    n_head, d_v = out.shape
    if n < ONE_THREAD_BELOW:
        n_threads = 1
    n_split = n_key_splits(n, n_kv_head, n_threads)
    peak = np.empty((n_split, n_head), np.float32)
    mass = np.empty((n_split, n_head), np.float32)
    acc = out.reshape(1, n_head, d_v)
    if n_split > 1:
        acc = np.empty((n_split, n_head, d_v), np.float32)
    counter = np.zeros(1, np.int64)
    if n_threads == 1:
        _attend_pieces(
            counter, q, k, v, k_head, v_head, k_row, v_row, n, n_kv_head, scale, n_split, peak,
            mass, acc,
        )  # fmt: skip
    else:
        for _thread in prange(n_threads):
            _attend_pieces(
                counter, q, k, v, k_head, v_head, k_row, v_row, n, n_kv_head, scale, n_split, peak,
                mass, acc,
            )  # fmt: skip
    if n_split > 1:
        for h in range(n_head):
            _merge(peak[:, h], mass[:, h], acc[:, h], out[h])


@njit(cache=True, nogil=True, fastmath={"contract", "nsz"})
def _merge(peak, mass, acc, out):
    """The softmax-weighted mean from pieces: peak, mass (S,), acc (S, d_v) -> out (d_v,)."""
    top = peak.max()
    total = np.float32(0)
    for split in range(peak.shape[0]):
        total += np.float32(np.exp(peak[split] - top)) * mass[split]
    out[:] = 0
    for split in range(peak.shape[0]):
        weight = np.float32(np.exp(peak[split] - top)) / total
        for c in range(out.shape[0]):
            out[c] += weight * acc[split, c]


@njit(cache=True, nogil=True, parallel=PRANGE_ONLY)
def attend_rows(
    q, k, v, k_head, v_head, k_row, v_row, idx, counts, n_kv_head, scale, out, n_threads
):
    """Attention of one token over listed rows: idx int32 (U, m), counts int64 (U,).

    U is the number of lists: H (one a query head) or G (one a kv head, shared by its group).
    """
    n_list = idx.shape[0]
    heads_a_list = q.shape[0] // n_list
    group = q.shape[0] // n_kv_head
    counter = np.zeros(1, np.int64)
    for _thread in prange(n_threads):
        scores = np.empty((TILE, BLOCK + PAD), np.float32)
        unit = next_task(counter)
        while unit < n_list:
            for h in range(unit * heads_a_list, (unit + 1) * heads_a_list, TILE):
                end = min(h + TILE, (unit + 1) * heads_a_list)
                kv_head = h // group
                _attend_piece(
                    q[h:end], k + kv_head * k_head, v + kv_head * v_head, k_row, v_row, 1,
                    idx[unit].ctypes.data, counts[unit], scale, True, out[h:end], out[0], out[0],
                    scores,
                )  # fmt: skip
            unit = next_task(counter)


@njit(cache=True, nogil=True)
def append_row(k_new, v_new, k, v, k_head, v_head, k_row, v_row, position):
    """Writes one token's K and V, f32 (G, d), as f16 rows at ``position``; d multiples of 16."""
    for kv_head in range(k_new.shape[0]):
        at = k + kv_head * k_head + position * k_row
        store_halves(k_new[kv_head].ctypes.data, at, k_new.shape[1])
        at = v + kv_head * v_head + position * v_row
        store_halves(v_new[kv_head].ctypes.data, at, v_new.shape[1])


@njit(cache=True, nogil=True, parallel=PRANGE_ONLY)
def score_rows(q, k, k_head, k_row, n, n_kv_head, scale, out, n_threads):
    """out[h, j] = scale q[h] . k[j] for j < n; q f32 (H, d), out f32 (H, >= n + PAD)."""
    n_head, d = q.shape
    group = n_head // n_kv_head
    n_split = n_key_splits(n, n_kv_head, n_threads)
    counter = np.zeros(1, np.int64)
    for _thread in prange(n_threads):
        part = np.empty((TILE, BLOCK + PAD), np.float32)
        task = next_task(counter)
        while task < n_kv_head * n_split:
            kv_head, split = task // n_split, task % n_split
            first, last = split * n // n_split, (split + 1) * n // n_split
            for h in range(kv_head * group, (kv_head + 1) * group, TILE):
                end = min(h + TILE, (kv_head + 1) * group)
                scaled = scaled_copy(q[h:end], scale)
                for start in range(first, last, BLOCK):
                    size = min(BLOCK, last - start)
                    at = k + kv_head * k_head + start * k_row
                    scores_any(
                        end - h, 0, scaled.ctypes.data, at, k_row, 0, size, d, part.ctypes.data,
                        part.shape[1],
                    )  # fmt: skip
                    out[h:end, start : start + size] = part[: end - h, :size]
            task = next_task(counter)


# --- numpy references -----------------------------------------------------------------------------


def attend_rows_ref(q, k, v, rows, scale):
    """Softmax attention in f64: q (H, d), k (G, n, d), v (G, n, d_v), rows: one int list a head."""
    group = q.shape[0] // k.shape[0]
    out = np.empty((q.shape[0], v.shape[2]))
    for h, row in enumerate(rows):
        s = k[h // group, row].astype(np.float64) @ q[h].astype(np.float64) * scale
        p = np.exp(s - s.max())
        out[h] = p @ v[h // group, row].astype(np.float64) / p.sum()
    return out


def attend_dense_ref(q, k, v, scale):
    """``attend_rows_ref`` over all rows."""
    return attend_rows_ref(q, k, v, [np.arange(k.shape[1])] * q.shape[0], scale)
