"""Random inputs of one layer, and a method's cache of it, for tests that follow it step by step."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from chunks import attend_chunk

from sparsekv_cli.cache.layer import LayerCache
from sparsekv_cli.cache.spec import AttnInput, LayerSpec
from sparsekv_cli.cache.store import padded
from sparsekv_cli.methods.base import Method

Rows = tuple[np.ndarray, np.ndarray, np.ndarray]  # q (H, T, d), k (G, T, d), v (G, T, d)


@dataclass(frozen=True)
class Geometry:
    n_head: int
    n_head_kv: int
    d: int

    def __str__(self) -> str:
        return f"H{self.n_head}-G{self.n_head_kv}-d{self.d}"


GEOMETRIES = [Geometry(2, 2, 64), Geometry(9, 3, 64), Geometry(8, 2, 80), Geometry(8, 1, 128)]


class Stream:
    """Queries that drift, keys of which some are heavy; K and V are representable in f16."""

    def __init__(self, geometry: Geometry, seed: int = 0) -> None:
        g = self.geometry = geometry
        self.rng = np.random.default_rng(seed)
        self.topics = self.rng.standard_normal((g.n_head_kv, 4, g.d)) / g.d**0.25
        self.walk = self.rng.standard_normal((g.n_head, g.d))
        self.position = 0

    def rows(self, n: int) -> Rows:
        """The next ``n`` rows."""
        parts = [self._row() for _ in range(n)]
        q, k, v = (np.stack([part[i] for part in parts], axis=1) for i in range(3))
        return q, k, v

    def _row(self) -> tuple[np.ndarray, ...]:
        g, rng = self.geometry, self.rng
        self.walk = 0.95 * self.walk + 0.3 * rng.standard_normal(self.walk.shape)
        topic = self.position // 50 % 4
        group = g.n_head // g.n_head_kv
        q = self.walk + 2 * np.repeat(self.topics[:, topic], group, axis=0)
        k = rng.standard_normal((g.n_head_kv, g.d))
        if rng.random() < 0.1:
            k += 5 * self.topics[:, rng.integers(4)]
        v = rng.standard_normal((g.n_head_kv, g.d))
        self.position += 1
        return q.astype(np.float32), *(x.astype(np.float16).astype(np.float32) for x in (k, v))


def make_cache(method: Method, geometry: Geometry, n_threads: int = 1) -> LayerCache:
    """A sparse layer's cache that keeps what it attended to."""
    g = geometry
    spec = LayerSpec(
        layer=2, n_layer=4, n_head=g.n_head, n_head_kv=g.n_head_kv, head_dim=g.d, value_dim=g.d,
        n_threads=n_threads,
    )  # fmt: skip
    cache = method.layer(spec)
    cache.records_attended = True
    return cache


def prefill(cache: LayerCache, rows: Rows, chunk: int = 64) -> np.ndarray:
    """Gives the cache the next rows in chunks; the attention f32 (H, T, d)."""
    outs = []
    for start in range(0, rows[0].shape[1], chunk):
        q, k, v = (x[:, start : start + chunk].copy() for x in rows)
        outs.append(attend_chunk(cache, AttnInput(q, k, v, q, k, cache.n)))
    cache.finish_prefill()
    return np.concatenate(outs, axis=1)


def decode(cache: LayerCache, rows: Rows, i: int = 0) -> np.ndarray:
    """A decode step with row i; f32 (H, d)."""
    q, k, v = (_wide(x[:, i]) for x in rows)
    return cache.decode(AttnInput(q, k, v, q, k, cache.n))[:, : rows[2].shape[2]]


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


def softmax(scores: np.ndarray) -> np.ndarray:
    weights = np.exp(scores - scores.max())
    return weights / weights.sum()
