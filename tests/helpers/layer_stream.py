"""A method's cache of one layer, fed row by row."""

import numpy as np
from chunks import attend_chunk
from layer_calibration import calibration_of
from layer_rows import Geometry, Rows

from sparsekv_cli.cache.layer import LayerCache
from sparsekv_cli.cache.spec import AttnInput, LayerSpec
from sparsekv_cli.cache.store import padded
from sparsekv_cli.methods.base import Method


def make_cache(
    method: Method, geometry: Geometry, n_threads: int = 1, layer: int = 2
) -> LayerCache:
    """A sparse layer's cache that keeps what it attended to."""
    g = geometry
    spec = LayerSpec(
        layer=layer, n_layer=4, n_head=g.n_head, n_head_kv=g.n_head_kv, head_dim=g.d,
        value_dim=g.d_v or g.d, n_threads=n_threads, theta=g.theta, rope_scale=g.rope_scale,
        softcap=np.float32(g.softcap), sinks=g.sinks,
        calibration=calibration_of(g, layer) if method.needs else {},
    )  # fmt: skip
    cache = method.layer(spec)
    cache.records_attended = True
    return cache


def chunk_input(rows: Rows, pos: int) -> AttnInput:
    """The rows as a layer's input."""
    q, k, v, *nope = rows
    return AttnInput(q, k, v, *(nope or (q, k)), pos)


def prefill(cache: LayerCache, rows: Rows, chunk: int = 64) -> np.ndarray:
    """Gives the cache the next rows in chunks; the attention f32 (H, T, d)."""
    outs = []
    for start in range(0, rows[0].shape[1], chunk):
        part = tuple(x[:, start : start + chunk].copy() for x in rows)
        outs.append(attend_chunk(cache, chunk_input(part, cache.n)))
    cache.finish_prefill()
    return np.concatenate(outs, axis=1)


def decode(cache: LayerCache, rows: Rows, i: int = 0) -> np.ndarray:
    """A decode step with row i; f32 (H, d)."""
    row = tuple(_wide(x[:, i]) for x in rows)
    return cache.decode(chunk_input(row, cache.n))[:, : rows[2].shape[2]]


def _wide(x: np.ndarray) -> np.ndarray:
    """(heads, d) -> f32 (heads, 1, d padded)."""
    wide = np.zeros((len(x), 1, padded(x.shape[1])), np.float32)
    wide[:, 0, : x.shape[1]] = x
    return wide


def attended_rows(cache: LayerCache) -> list[list[int]]:
    """The positions that the last step attended to, in order: a list a kv head."""
    assert cache.attended is not None
    idx, counts = cache.attended
    return [row[:count].tolist() for row, count in zip(idx, counts, strict=True)]
