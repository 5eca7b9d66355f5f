"""Numpy forms of FASA's kernels, which tests compare with them."""

from __future__ import annotations

import numpy as np

from sparsekv_cli.cpu.fasa.split import BLOCK


def attend_split_rows_ref(q, dom, rest, v, dims, rows, scale, softcap=0.0, sink=-np.inf):
    """numpy f64 reference for one kv head, with K joined.

    q (d,), dom (blocks, n_dom, 16), rest (n, d - n_dom), v (n, d_v).
    """
    dominant = dom.swapaxes(1, 2).reshape(-1, dom.shape[1])[rows]
    keys = np.empty((len(rows), len(dims)))
    keys[:, dims] = np.concatenate([dominant, rest[rows]], axis=1)
    scores = keys @ q.astype(np.float64) * scale
    scores = softcap * np.tanh(scores / softcap) if softcap else scores
    peak = max(scores.max(), np.float64(sink))
    weights = np.exp(scores - peak)
    return weights @ v[rows].astype(np.float64) / (weights.sum() + np.exp(sink - peak))


def score_chunks_ref(q, dom):
    """numpy reference: q (H, n_dom), dom f16 (G, b, n_dom, 16) -> scores of all, f64 (H, 16 b)."""
    n_kv_head = dom.shape[0]
    keys = dom.astype(np.float64).swapaxes(2, 3).reshape(n_kv_head, -1, dom.shape[2])
    keys = np.repeat(keys, q.shape[0] // n_kv_head, axis=0)
    return np.einsum("hc,hnc->hn", q.astype(np.float64), keys)


def choose_rows_ref(scores, n, n_sinks, n_recent, k):
    """numpy reference: returns the rows of one head, from its scores (>= n,)."""
    middle = np.arange(n_sinks, n - n_recent)
    best = middle[np.argsort(-scores[middle], kind="stable")[: k - n_sinks - n_recent]]
    forced = [*range(n_sinks), *range(n - n_recent, n)]
    return np.sort(np.concatenate([best, forced])).astype(np.int32)


def split_keys_ref(k, dims, n_dom):
    """numpy reference: k (G, n, d) -> dom (G, ceil(n / 16), n_dom, 16), rest (G, n, d - n_dom)."""
    permuted = np.stack([rows[:, order] for rows, order in zip(k, dims, strict=True)])
    n_head, n = k.shape[:2]
    dom = np.zeros((n_head, -(-n // BLOCK) * BLOCK, n_dom), k.dtype)
    dom[:, :n] = permuted[:, :, :n_dom]
    return dom.reshape(n_head, -1, BLOCK, n_dom).swapaxes(2, 3), permuted[:, :, n_dom:]
