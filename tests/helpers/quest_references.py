"""Numpy forms of Quest's kernels, which tests compare with them."""

from __future__ import annotations

import numpy as np

from sparsekv_cli.cpu.attention.byte_scores import ZERO
from sparsekv_cli.cpu.jit.value import LANES
from sparsekv_cli.cpu.quest.byte_pages import LARGEST, PAGE, SMALLEST
from sparsekv_cli.cpu.quest.pages import page_summaries_ref


def code_pages_ref(keys, centre):
    """numpy reference: returns codes and scales of keys f32 (G, n, d), n of whole tiles."""
    hi, lo = page_summaries_ref(keys, PAGE, True)
    mean, deviation = (hi + lo) / 2, (hi - lo) / 2
    summary = np.concatenate([mean - centre[:, None], deviation], 2)
    scales = np.maximum(np.abs(summary).max(2) / LARGEST, SMALLEST)
    codes = np.rint(summary / scales[:, :, None])
    codes[:, :, : keys.shape[2]] += ZERO
    tiles = codes.astype(np.uint8).reshape(len(keys), -1, LANES, summary.shape[2] // 4, 4)
    return tiles.swapaxes(2, 3), scales.reshape(len(keys), -1, LANES)


def round_queries_ref(q):
    """numpy reference: returns the three arrays."""
    factors = np.maximum(np.abs(q).max(2), SMALLEST) / np.float32(LARGEST)
    rounded = np.rint(q / factors[:, :, None]).astype(np.int8)
    starts = -ZERO * rounded.sum(2, dtype=np.int32)
    return np.concatenate([rounded, np.abs(rounded)], 2), starts, factors


def score_pages_ref(queries, starts, factors, codes, scales):
    """numpy reference: scores f32 (G, R, pages)."""
    n_head, n_tiles = codes.shape[:2]
    flat = codes.swapaxes(2, 3).reshape(n_head, n_tiles * LANES, -1).astype(np.int64)
    dots = queries.astype(np.int64) @ flat.swapaxes(1, 2) + starts[:, :, None]
    of_pages = scales.reshape(n_head, 1, -1) * factors[:, :, None]
    return dots.astype(np.float32) * of_pages


def select_pages_ref(scores, n_kv_head, n_best, page, n, n_sinks, softcap=0.0):
    """numpy reference: one ascending int array a kv head; scores (H, n_page)."""
    n_head, n_page = scores.shape
    pooled = np.zeros((n_kv_head, n_page))
    if n_page:
        scores = scores.astype(np.float64)
        scores = softcap * np.tanh(scores / softcap) if softcap else scores
        weights = np.exp(scores - scores.max(1, keepdims=True))
        weights /= weights.sum(1, keepdims=True)
        pooled = weights.reshape(n_kv_head, n_head // n_kv_head, n_page).mean(1)
    return listed_rows_ref(pooled, n_best, page, n, n_sinks)


def listed_rows_ref(pooled, n_best, page, n, n_sinks):
    """numpy reference: one ascending int array a kv head; pooled (G, n_page)."""
    lists, n_page = [], pooled.shape[1]
    for scores in pooled:
        chosen = np.argsort(-scores, kind="stable")[:n_best]
        pages = [np.arange(j * page, (j + 1) * page) for j in chosen]
        forced = [np.arange(min(n_sinks, n)), np.arange(n_page * page, n)]
        lists.append(np.unique(np.concatenate([*pages, *forced])))
    return lists
