"""FASA's focused attention: exact attention over a head's chosen rows, with K in two parts."""

import numpy as np

from sparsekv_cli.cpu.attention.softmax import exponentiate
from sparsekv_cli.cpu.attention.tile import PAD, tile_scores, tile_values
from sparsekv_cli.cpu.jit.kernel import njit


@njit(cache=True, nogil=True)
def attend_split_rows(q_rest, rest, v, rows, scores, scale, softcap, sink, out):
    """Computes exact attention of one head over listed rows; scores: the dominant part of q . k.

    q_rest f32 (d_rest padded,), rest u16 (n, d_rest padded), v u16 (n, d_v), rows int32 (k,),
    scores f32 (k,), out f32 (d_v,). softcap: 0 for none; sink: a score without a value, or -inf.
    """
    count = rows.shape[0]
    dots = np.empty(count + PAD, np.float32)
    tile_scores(1, 1, q_rest, rest, rest.strides[0], rows, count, q_rest.shape[0], dots, 0)
    for j in range(count):
        dots[j] = scale * (dots[j] + scores[j])
    peak, mass = exponentiate(dots, count, softcap, sink)
    mass += np.exp(sink - peak)
    out[:] = 0
    tile_values(1, 1, dots, 0, v, v.strides[0], rows, count, out.shape[0], out)
    for c in range(out.shape[0]):
        out[c] /= mass


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
