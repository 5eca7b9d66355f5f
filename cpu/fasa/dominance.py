"""FASA's calibration: finds the frequency chunks that rank a kv head's keys as all its dims do.

Chunk i of C is the dims i and i + C, which RoPE rotates together. Dims from 2 C on are not rotated
and belong to no chunk. In a layer without RoPE the chunks are the pairs that RoPE would rotate.
"""

import numpy as np


def query_positions(n, n_query):
    """Returns at most n_query positions, spread evenly over [n/4, n), ascending."""
    step = 0.75 * n / n_query
    return sorted({int(n / 4 + (i + 0.5) * step) for i in range(n_query)})


def judge_chunks(q, position, keys, n_chunk, top_k):
    """Compares each chunk's scores with the head's, for one query. Returns var and ca, f32 (H, C).

    var: variance over the keys of the chunk's scores. ca, contextual agreement: the part of the
    head's top_k keys that are among the chunk's (FASA eq 4). q f32 (H, d) at ``position``, keys
    f32 (G, d, n), both rotated; keys after the position are ignored.
    """
    n = position + 1
    products = q.reshape(len(keys), -1, q.shape[1], 1) * keys[:, None, :, :n]  # (G, H/G, d, n)
    products = products.reshape(len(q), -1, n)  # (H, d, n)
    scores = products[:, :n_chunk] + products[:, n_chunk : 2 * n_chunk]  # (H, C, n)
    rest = max(0, n - top_k)
    best = np.argpartition(products.sum(1), rest, axis=1)[:, rest:]  # (H, k)
    is_top = np.zeros((len(q), 1, n), np.float32)
    np.put_along_axis(is_top, best[:, None], 1, axis=2)
    own = np.argpartition(scores, rest, axis=2)[..., rest:]  # (H, C, k)
    agreement = np.take_along_axis(is_top, own, axis=2).mean(2)
    return scores.var(2), agreement


def rank_chunks(score, n_kv_head):
    """score f32 (H, C) -> u8 (G, C): each kv head's chunks, best first. The best m are a prefix.

    The heads of a group count alike: their scores are normalised to sum 1 before they are added.
    """
    total = score.sum(1, keepdims=True, dtype=np.float64)
    share = score / np.where(total > 0, total, 1)
    group = share.reshape(n_kv_head, -1, score.shape[1]).sum(1)
    return np.argsort(-group, axis=1, kind="stable").astype(np.uint8)


def order_dims(rank, n_tip, d):
    """rank (G, C) -> int32 (G, d): the dims of the first n_tip chunks, then the others."""
    n_chunk = rank.shape[1]
    first = rank[:, :n_tip].astype(np.int32)
    dominant = np.stack([first, first + n_chunk], axis=2).reshape(len(rank), -1)
    others = [np.setdiff1d(np.arange(d, dtype=np.int32), dims) for dims in dominant]
    return np.concatenate([dominant, np.stack(others)], axis=1)
