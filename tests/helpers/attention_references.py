"""Numpy forms of the kernels of attention, which tests compare with them."""

from __future__ import annotations

import numpy as np

from sparsekv_cli.cpu.attention.flash import ALL_ROWS


def attend_rows_ref(q, k, v, rows, scale, softcap=0.0, sinks=None):
    """Returns f64 (H, d_v) for q (H, d), k (G, n, d), v (G, n, d_v) and a row list a head."""
    group = q.shape[0] // k.shape[0]
    out = np.empty((q.shape[0], v.shape[2]))
    for h, row in enumerate(rows):
        s = k[h // group, row].astype(np.float64) @ q[h].astype(np.float64) * scale
        s = softcap * np.tanh(s / softcap) if softcap else s
        sink = -np.inf if sinks is None else np.float64(sinks[h])
        peak = max(s.max(), sink)
        p = np.exp(s - peak)
        out[h] = p @ v[h // group, row].astype(np.float64) / (p.sum() + np.exp(sink - peak))
    return out


def attend_dense_ref(q, k, v, scale, softcap=0.0, sinks=None):
    """Returns ``attend_rows_ref`` over all rows."""
    rows = [np.arange(k.shape[1])] * q.shape[0]
    return attend_rows_ref(q, k, v, rows, scale, softcap, sinks)


def attend_causal_ref(q, k, v, scale, window=ALL_ROWS, softcap=0.0, sinks=None):
    """Returns f64 (H, T, d_v) for q (H, T, d), k (G, n, d), v (G, n, d_v), all of them floats.

    A row attends to the last ``window`` rows, its own included. Scores become softcap tanh(score /
    softcap). sinks (H,): a score of each head that takes part in the softmax and has no value.
    """
    group, n, n_new = q.shape[0] // k.shape[0], k.shape[1], q.shape[1]
    k, v = (np.repeat(x.astype(np.float64), group, axis=0) for x in (k, v))
    scores = scale * q.astype(np.float64) @ k.transpose(0, 2, 1)
    if softcap:
        scores = softcap * np.tanh(scores / softcap)
    own = np.arange(n - n_new, n)[:, None]
    visible = (np.arange(n) <= own) & (np.arange(n) > own - window)
    scores = np.where(visible, scores, -np.inf)
    peak = scores.max(-1, keepdims=True)
    sink = -np.inf if sinks is None else np.asarray(sinks, np.float64)[:, None, None]
    peak = np.maximum(peak, sink)
    weights = np.exp(scores - peak)
    return weights @ v / (weights.sum(-1, keepdims=True) + np.exp(sink - peak))


def select_rows_ref(scores, n, n_sinks, n_recent, k):
    """numpy reference: returns each list's rows as one sorted array."""
    middle = np.arange(n_sinks, n - n_recent)
    rows = []
    for row in scores:
        best = middle[np.argsort(-row[middle], kind="stable")[: k - n_recent]]
        forced = np.concatenate([np.arange(n_sinks), np.arange(n - n_recent, n)])
        rows.append(np.sort(np.concatenate([forced, best])))
    return np.stack(rows)
