"""FAEDKV's attention over a transformed segment: no key and no value is ever reconstructed.

A segment is a run of tokens whose K and V were transformed along the tokens and cut to a few
frequencies. Its rows are coefficients in an orthonormal basis of real waves: for every bin that is
kept a cosine row, then for every one but 0 and n/2 a sine row. So a row's dot product with q is the
coefficient of the scores, and the weights' coefficients weigh the value rows:

    scores = waves^T (rows_k . q),    output = (waves p) . rows_v,    p = softmax(scores)

Both turns are FFTs of two query heads at once (faedkv/fft.py), or a product with the waves where a
segment is short, or one number where only the mean is kept. Rows are f16, scaled to its range by a
gain a segment, or f32 where tokens are still added to them. Sinks, recent and waiting rows are
exact.
"""

from __future__ import annotations

import numpy as np
from numba import njit, prange, types
from numba.extending import intrinsic

from sparsekv_cli.cpu.attention.decode import TILE, n_key_splits, scaled_copy, score_rows
from sparsekv_cli.cpu.attention.rows import V_HEAD, V_ROW, V
from sparsekv_cli.cpu.attention.tile import (
    NEGATIVE_INFINITY,
    PAD,
    exp_in_place,
    max_of,
    soften,
    tile_values,
)
from sparsekv_cli.cpu.faedkv.fft import SIZE, ends_in_y, fft
from sparsekv_cli.cpu.jit import llvm
from sparsekv_cli.cpu.jit.llvm import I64, next_task
from sparsekv_cli.cpu.jit.threads import PRANGE_ONLY

# Columns of a table of segments, int64, a row each. LENGTH: of the basis; FILLED: tokens in it;
# FIRST: its first row; N_KEEP: bins. RUNS: address of N_RUNS int64 pairs (first bin, number of
# bins); NUMBERS and TWIDDLES: addresses of the FFT's plan.
KIND, LENGTH, FILLED, FIRST, N_KEEP, RUNS, N_RUNS, NUMBERS, TWIDDLES = range(9)
N_COLUMNS = 9
MEAN, DIRECT, FFT = range(3)  # KIND
FAST = {"reassoc", "contract", "arcp", "nsz"}
ONE_THREAD_BELOW = 512  # rows and scores/8 of a head, under which threads cost more than they save


@intrinsic
def _number(typingctx, address, i):
    """Element i of int64 numbers at an address."""

    def codegen(context, b, signature, args):
        return llvm.load(b, I64, b.add(args[0], b.shl(args[1], I64(3))))

    return types.int64(types.int64, types.int64), codegen


# --- scores -> weights, one or two heads ----------------------------------------------------------


@njit(cache=True, nogil=True)
def _spread(row, z_a, z_b, re, im):
    """The spectrum f32 (n,) of scores_a + i scores_b from the rows' dot products z_a, z_b."""
    n, keep = row[LENGTH], row[N_KEEP]
    single = np.float32(1 / np.sqrt(n))
    double = np.float32(1 / np.sqrt(2.0 * n))
    cosine, sine = 0, keep
    re[:] = 0
    im[:] = 0
    for i in range(row[N_RUNS]):
        first, count = _number(row[RUNS], 2 * i), _number(row[RUNS], 2 * i + 1)
        for k in range(first, first + count):
            if k == 0 or 2 * k == n:
                re[k], im[k] = z_a[cosine] * single, z_b[cosine] * single
                cosine += 1
                continue
            re_a, re_b = z_a[cosine] * double, z_b[cosine] * double
            im_a, im_b = z_a[sine] * double, z_b[sine] * double
            re[k], im[k] = re_a - im_b, im_a + re_b
            re[n - k], im[n - k] = re_a + im_b, re_b - im_a
            cosine += 1
            sine += 1


@njit(cache=True, nogil=True)
def _gather(row, re, im, w_a, w_b):
    """The kept coefficients of the weights of a and b from the spectrum of a + i b."""
    n, keep = row[LENGTH], row[N_KEEP]
    single = np.float32(1 / np.sqrt(n))
    double = np.float32(1 / np.sqrt(2.0 * n))
    cosine, sine = 0, keep
    for i in range(row[N_RUNS]):
        first, count = _number(row[RUNS], 2 * i), _number(row[RUNS], 2 * i + 1)
        for k in range(first, first + count):
            if k == 0 or 2 * k == n:
                w_a[cosine], w_b[cosine] = re[k] * single, im[k] * single
                cosine += 1
                continue
            mirror = n - k
            w_a[cosine], w_b[cosine] = (re[k] + re[mirror]) * double, (im[k] + im[mirror]) * double
            w_a[sine], w_b[sine] = (im[k] - im[mirror]) * double, (re[mirror] - re[k]) * double
            cosine += 1
            sine += 1


@njit(cache=True, nogil=True)
def _plan_numbers(row):
    """The numbers of an FFT segment's plan as an array."""
    numbers = np.empty(_number(row[NUMBERS], SIZE), np.int64)
    for i in range(len(numbers)):
        numbers[i] = _number(row[NUMBERS], i)
    return numbers


@njit(cache=True, nogil=True)
def _fft_scores(row, z_a, z_b, scores_a, scores_b, x_re, x_im):
    """Scores f32 (n,) of two heads over an FFT segment; x f32 (n,) is scratch."""
    plan = _plan_numbers(row)
    y_re, y_im = scores_a, scores_b
    if not ends_in_y(plan):
        x_re, x_im, y_re, y_im = y_re, y_im, x_re, x_im
    _spread(row, z_a, z_b, x_re, x_im)
    fft(  # re and im exchanged: the inverse
        plan, row[TWIDDLES], x_im.ctypes.data, x_re.ctypes.data, y_im.ctypes.data, y_re.ctypes.data
    )


@njit(cache=True, nogil=True)
def _fft_weights(row, p_a, p_b, w_a, w_b, y_re, y_im):
    """Coefficients of two heads' weights p f32 (n,) over an FFT segment; overwrites p and y."""
    plan = _plan_numbers(row)
    fft(plan, row[TWIDDLES], p_a.ctypes.data, p_b.ctypes.data, y_re.ctypes.data, y_im.ctypes.data)
    if ends_in_y(plan):
        _gather(row, y_re, y_im, w_a, w_b)
    else:
        _gather(row, p_a, p_b, w_a, w_b)


@njit(cache=True, nogil=True, fastmath=FAST)
def _direct_scores(basis, z, scores):
    """scores[j] = sum over i of z[i] basis[i, j]"""
    n = basis.shape[1]
    scores[:n] = 0
    for i in range(basis.shape[0]):
        part = z[i]
        for j in range(n):
            scores[j] += part * basis[i, j]


@njit(cache=True, nogil=True, fastmath=FAST)
def _direct_weights(basis, p, w):
    """w[i] = sum over j of p[j] basis[i, j]"""
    for i in range(basis.shape[0]):
        total = np.float32(0)
        for j in range(basis.shape[1]):
            total += p[j] * basis[i, j]
        w[i] = total


@njit(cache=True, nogil=True)
def _n_scores(row):
    return 1 if row[KIND] == MEAN else row[LENGTH]


@njit(cache=True, nogil=True)
def _weigh_pair(
    a, b, n_head, table, basis, z, n_exact, softcap, sinks, scores, w, mass, x_re, x_im
):
    """Softmax of heads a and b over all rows, and its coefficients; b is n_head if a has no other.

    z f32 (> b, rows + PAD): dot products of the coefficient rows; scores f32 (> b, n + PAD): those
    of the exact rows in front, which become weights e^(s - peak); softcap, sinks: see
    ``attend_spectrum``; w f32 (> b, rows + PAD): their
    coefficients; mass f32 (H,): sums of the weights; x f32: scratch of the longest segment.
    """
    heads = range(a, min(b + 1, n_head))
    for h in heads:
        if softcap:
            soften(scores[h].ctypes.data, n_exact, softcap)
    at = n_exact
    for i in range(table.shape[0]):
        row = table[i]
        first, n = row[FIRST], row[LENGTH]
        if row[KIND] == FFT:
            _fft_scores(
                row, z[a, first:], z[b, first:], scores[a, at : at + n], scores[b, at : at + n],
                x_re[:n], x_im[:n],
            )  # fmt: skip
        for h in heads:
            if row[KIND] == MEAN:
                mean = z[h, first] * np.float32(np.sqrt(n) / row[FILLED])
                if softcap:
                    mean = softcap * np.float32(np.tanh(mean / softcap))
                scores[h, at] = mean + np.float32(np.log(row[FILLED]))
                continue
            if row[KIND] == DIRECT:
                _direct_scores(basis, z[h, first:], scores[h, at:])
            if softcap:
                soften(scores[h, at:].ctypes.data, row[FILLED], softcap)
            for j in range(at + row[FILLED], at + n):
                scores[h, j] = NEGATIVE_INFINITY
        at += _n_scores(row)
    for h in heads:
        for j in range(at, at + PAD):
            scores[h, j] = NEGATIVE_INFINITY
        address = scores[h].ctypes.data
        sink = sinks[h] if len(sinks) else NEGATIVE_INFINITY
        peak = max(max_of(address, at), sink)
        mass[h] = exp_in_place(address, at, peak) + np.exp(sink - peak)
    at = n_exact
    for i in range(table.shape[0]):
        row = table[i]
        first, n = row[FIRST], row[LENGTH]
        if row[KIND] == FFT:
            _fft_weights(
                row, scores[a, at : at + n], scores[b, at : at + n], w[a, first:], w[b, first:],
                x_re[:n], x_im[:n],
            )  # fmt: skip
        for h in heads:
            if row[KIND] == MEAN:
                w[h, first] = scores[h, at] * np.float32(np.sqrt(n) / row[FILLED])
            elif row[KIND] == DIRECT:
                _direct_weights(basis, scores[h, at:], w[h, first:])
        at += _n_scores(row)


@njit(cache=True, nogil=True)
def _weigh_heads(counter, n_head, table, basis, z, n_exact, softcap, sinks, scores, w, mass):
    """Takes pairs of heads until there are none; see ``_weigh_pair``."""
    longest = 0
    for i in range(table.shape[0]):
        if table[i, KIND] == FFT:
            longest = max(longest, table[i, LENGTH])
    x_re, x_im = np.empty(longest, np.float32), np.empty(longest, np.float32)
    task = next_task(counter)
    while 2 * task < n_head:
        a, b = 2 * task, 2 * task + 1
        if b == n_head:  # a head that is not there
            z[b] = 0
            scores[b] = 0
        _weigh_pair(
            a, b, n_head, table, basis, z, n_exact, softcap, sinks, scores, w, mass, x_re, x_im
        )
        task = next_task(counter)


# --- rows . q and weights . rows ------------------------------------------------------------------


@njit(cache=True, nogil=True, fastmath=FAST)
def _score_wide(q, rows, out):
    """out[h, i] = q[h] . rows[i]; f32 (heads, d), (n, d), (heads, >= n)."""
    for i in range(rows.shape[0]):
        for h in range(q.shape[0]):
            total = np.float32(0)
            for c in range(rows.shape[1]):
                total += q[h, c] * rows[i, c]
            out[h, i] = total


@njit(cache=True, nogil=True, fastmath=FAST)
def _add_wide(w, rows, acc):
    """acc[h] += sum over i of w[h, i] rows[i]"""
    for i in range(rows.shape[0]):
        for h in range(w.shape[0]):
            part = w[h, i]
            for c in range(rows.shape[1]):
                acc[h, c] += part * rows[i, c]


@njit(cache=True, nogil=True)
def _score_wide_pieces(counter, q, rows, n, scale, out, n_split):
    n_kv_head = rows.shape[0]
    group = q.shape[0] // n_kv_head
    task = next_task(counter)
    while task < n_kv_head * n_split:
        g, split = task // n_split, task % n_split
        first, last = split * n // n_split, (split + 1) * n // n_split
        heads = slice(g * group, (g + 1) * group)
        _score_wide(scaled_copy(q[heads], scale), rows[g, first:last], out[heads, first:last])
        task = next_task(counter)


@njit(cache=True, nogil=True)
def _value_pieces(counter, layout, n_exact, wide, n_rows, p, w, acc):
    """Takes (kv head, split) tasks: acc[split] += weights . rows, f32 (splits, H, d_v) zeros.

    Exact rows and coefficient rows are both cut into the splits.
    """
    n_split, n_head, d = acc.shape
    n_kv_head = wide.shape[0]
    group = n_head // n_kv_head
    task = next_task(counter)
    while task < n_kv_head * n_split:
        g, split = task // n_split, task % n_split
        from_exact, to_exact = split * n_exact // n_split, (split + 1) * n_exact // n_split
        first, last = split * n_rows // n_split, (split + 1) * n_rows // n_split
        for h in range(g * group, (g + 1) * group, TILE):
            tile = min(TILE, (g + 1) * group - h)
            target = acc[split, h].ctypes.data
            tile_values(
                tile, 0, p[h, from_exact:].ctypes.data, p.shape[1],
                layout[V] + g * layout[V_HEAD] + from_exact * layout[V_ROW], layout[V_ROW], 0,
                to_exact - from_exact, d, target,
            )  # fmt: skip
            _add_wide(w[h : h + tile, first:], wide[g, first:last], acc[split, h : h + tile])
        task = next_task(counter)


@njit(cache=True, nogil=True, fastmath=FAST)
def _finish(acc, mass, out):
    """out[h] = sum of acc[:, h] / mass[h]"""
    for h in range(out.shape[0]):
        factor = np.float32(1) / mass[h]
        for c in range(out.shape[1]):
            total = np.float32(0)
            for split in range(acc.shape[0]):
                total += acc[split, h, c]
            out[h, c] = total * factor


@njit(cache=True, nogil=True, parallel=PRANGE_ONLY)
def attend_spectrum(
    q, layout, n_exact, wide_k, wide_v, n_rows, table, basis, scale, softcap, sinks, out, n_threads
):
    """Attention of one token over exact rows and segments.

    q f32 (H, d); layout int64 (8,) of the exact rows, which are f16, see attention/rows.py;
    coefficient rows f32: wide_k (G, >= n_rows, d) and wide_v; table int64 (segments, N_COLUMNS);
    basis f32: the waves of direct segments. softcap: 0 for none; sinks f32 (H,): scores without
    values, or empty. out f32 (H, d_v).
    """
    n_head, n_kv_head = q.shape[0], wide_k.shape[0]
    n_scores = n_exact
    for i in range(table.shape[0]):
        n_scores += _n_scores(table[i])
    if n_exact + n_rows + n_scores // 8 < ONE_THREAD_BELOW:
        n_threads = 1
    n_even = n_head + n_head % 2
    z = np.empty((n_even, n_rows + PAD), np.float32)
    w = np.empty((n_even, n_rows + PAD), np.float32)
    scores = np.empty((n_even, n_scores + PAD), np.float32)
    mass = np.empty(n_head, np.float32)
    n_split = n_key_splits(n_exact + n_rows, n_kv_head, n_threads)
    acc = np.zeros((n_split, n_head, out.shape[1]), np.float32)
    score_rows(q, layout, n_exact, n_kv_head, scale, scores, n_threads)
    counter = np.zeros(3, np.int64)
    if n_threads == 1:
        _score_wide_pieces(counter[0:1], q, wide_k, n_rows, scale, z, 1)
        _weigh_heads(
            counter[1:2], n_head, table, basis, z, n_exact, softcap, sinks, scores, w, mass
        )
        _value_pieces(counter[2:3], layout, n_exact, wide_v, n_rows, scores, w, acc)
    else:
        for _thread in prange(n_threads):
            _score_wide_pieces(counter[0:1], q, wide_k, n_rows, scale, z, n_split)
        for _thread in prange(n_threads):
            _weigh_heads(
                counter[1:2], n_head, table, basis, z, n_exact, softcap, sinks, scores, w, mass
            )
        for _thread in prange(n_threads):
            _value_pieces(counter[2:3], layout, n_exact, wide_v, n_rows, scores, w, acc)
    _finish(acc, mass, out)


def attend_spectrum_ref(q, k, v, segments, scale, softcap=0.0, sinks=()):
    """numpy f64: q (H, d), exact k (G, n, d), v (G, n, d_v) -> (H, d_v).

    segments: (waves (rows, tokens), rows of K (G, rows, d), rows of V (G, rows, d_v)) each.
    """
    group = len(q) // len(k)
    out = np.empty((len(q), v.shape[2]))
    for h in range(len(q)):
        g, query = h // group, q[h].astype(np.float64) * scale
        scores = [k[g].astype(np.float64) @ query]
        scores += [
            basis.T @ (rows_k[g].astype(np.float64) @ query) for basis, rows_k, _ in segments
        ]
        if softcap:
            scores = [softcap * np.tanh(s / softcap) for s in scores]
        sink = np.float64(sinks[h]) if len(sinks) else -np.inf
        peak = max(sink, *(s.max() for s in scores if len(s)))
        p = [np.exp(s - peak) for s in scores]
        total = p[0] @ v[g].astype(np.float64)
        for weights, (basis, _, rows_v) in zip(p[1:], segments, strict=True):
            total += (basis @ weights) @ rows_v[g].astype(np.float64)
        out[h] = total / (sum(w.sum() for w in p) + np.exp(sink - peak))
    return out
