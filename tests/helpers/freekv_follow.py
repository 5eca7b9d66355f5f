"""Random inputs of one layer for FreeKV, and its cache held against the twin step by step."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from freekv_twin import FreeKVTwin, HeadChoice, TwinOptions
from layer_stream import Rows, decode, prefill

from sparsekv_cli.cache.spec import Budget, LayerSpec
from sparsekv_cli.methods.freekv import FreeKV, FreeKVCache

N_STEPS = 300
TIE = 2e-3  # summaries that f32 and f64 round to neighbouring f16: nearer pooled scores are a tie


@dataclass(frozen=True)
class Geometry:
    n_head: int
    n_head_kv: int
    d: int
    n_prefill: int
    d_v: int = 0  # 0: as d

    def __str__(self) -> str:
        return f"H{self.n_head}-G{self.n_head_kv}-d{self.d}-n{self.n_prefill}"


GEOMETRIES = [
    Geometry(4, 4, 64, 250),
    Geometry(9, 3, 64, 300),
    Geometry(8, 2, 80, 271),
    Geometry(8, 1, 128, 320),
    Geometry(6, 2, 72, 263, 40),  # rows are padded, values are of another size
]
PLAIN = Geometry(9, 3, 64, 300)
SMALL = {"budget": Budget(tokens=144), "sinks": 16, "window": 32, "page": 16, "tau": 0.8}


class Stream:
    """Keys that follow a topic for a while, and queries that stay on one, or turn to another."""

    def __init__(self, geometry: Geometry, seed: int) -> None:
        g = self.geometry = geometry
        rng = self.rng = np.random.default_rng(seed)
        self.topics = rng.standard_normal((12, g.d)) * 1.5
        self.topic = rng.integers(12, size=g.n_head_kv)  # of the keys
        self.interest = rng.standard_normal((g.n_head, g.d))

    def rows(self, n: int) -> Rows:
        """q (H, n, d), k (G, n, d), v (G, n, d_v) of the next tokens; K and V fit f16."""
        parts = [self._row() for _ in range(n)]
        q, k, v = (np.stack([part[i] for part in parts], axis=1) for i in range(3))
        return q, k, v

    def _row(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        g, rng = self.geometry, self.rng
        group = g.n_head // g.n_head_kv
        q = np.empty((g.n_head, g.d))
        for kv in range(g.n_head_kv):
            if rng.random() < 0.08:
                self.topic[kv] = rng.integers(12)
            heads = slice(kv * group, (kv + 1) * group)
            if rng.random() < 0.15:  # this kv head's queries turn
                self.interest[heads] = self.topics[rng.integers(12)]
                self.interest[heads] += 0.6 * rng.standard_normal((group, g.d))
            wander = rng.uniform(0.1, 0.9)
            q[heads] = self.interest[heads] + wander * rng.standard_normal((group, g.d))
        k = self.topics[self.topic] + rng.standard_normal((g.n_head_kv, g.d))
        v = rng.standard_normal((g.n_head_kv, g.d_v or g.d))
        return q.astype(np.float32), half(k), half(v)


def half(x: np.ndarray) -> np.ndarray:
    return x.astype(np.float16).astype(np.float32)


def make_cache(geometry: Geometry, n_threads: int = 1, **options) -> FreeKVCache:
    g = geometry
    spec = LayerSpec(
        layer=2, n_layer=4, n_head=g.n_head, n_head_kv=g.n_head_kv, head_dim=g.d,
        value_dim=g.d_v or g.d, n_threads=n_threads,
    )  # fmt: skip
    cache = FreeKV(**options).layer(spec)
    assert isinstance(cache, FreeKVCache)
    cache.records_attended = True
    return cache


def reconcile(twin: FreeKVTwin, choice: HeadChoice, actual: np.ndarray) -> bool:
    """Makes a choice that differs only by a tie equal to ``actual``; AssertionError if it is none.

    A tie: pooled scores next to the lowest one chosen. Returns whether there was one.
    """
    p, n = twin.options.page, twin.k.shape[1]
    got = np.sort(actual)
    assert len(np.unique(got)) == len(got), "a row is attended twice"
    if np.array_equal(got, choice.rows):
        return False
    assert len(got) == len(choice.rows)
    other = np.unique(np.setxor1d(got, choice.rows) // p)
    candidates = twin.candidates(n)
    scores = choice.pooled[np.searchsorted(candidates, other)]
    assert np.isin(other, candidates).all()
    assert (np.abs(scores / choice.cut - 1) < TIE).all(), f"pages {other} are no tie"
    choice.rows = got
    choice.pages = np.intersect1d(candidates, got // p)
    return True


def follow(cache: FreeKVCache, twin: FreeKVTwin, stream: Stream, n_steps: int) -> dict[str, int]:
    """Decodes n_steps tokens in both and compares everything; counts what occurred.

    The twin's pages are taken into its LRU cache in the order in which they are chosen: the step's
    own; then, with a thread that works ahead, the next step's.
    """
    ahead = cache._overlaps
    seen = {"corrected": 0, "steps": 0, "ties": 0, "left out": 0, "borders": 0}
    for _ in range(n_steps):
        rows = stream.rows(1)
        n = cache.n + 1
        out = decode(cache, rows)
        assert cache.n == n and cache.attended is not None
        choices = twin.choose(*(x[:, 0] for x in rows))
        idx, counts = cache.attended
        for g, choice in enumerate(choices):
            seen["ties"] += reconcile(twin, choice, idx[g, : counts[g]])
            seen["corrected"] += choice.corrected
            seen["steps"] += 1
            seen["left out"] += len(choice.pages) < len(twin.candidates(n))
            by_previous = twin.options.speculate and not choice.corrected
            twin.take(g, choice.pages, n, n - 1 if by_previous else n)
        seen["borders"] += len(twin.candidates(n + 1)) > len(twin.candidates(n))
        expected = twin.finish(choices)
        np.testing.assert_allclose(out, expected, atol=2e-4)
        if ahead:
            for g in range(twin.n_kv):
                twin.take(g, twin.best(twin.previous, g, n + 1)[0], n + 1, n)
    return seen


def run_both(geometry, seed=1, n_steps=N_STEPS, n_threads=1, budget=None, **options):
    budget = budget or Budget(tokens=144)
    stream = Stream(geometry, seed)
    q, k, v = rows = stream.rows(geometry.n_prefill)
    defaults = {"sinks": 16, "window": 32, "page": 16, "tau": 0.8, "overlap": "false"}
    options = defaults | options
    cache = make_cache(geometry, n_threads, budget=budget, **options)
    options.pop("overlap")
    twin = FreeKVTwin(
        TwinOptions(budget=budget.rows, **options), geometry.n_head, geometry.n_head_kv
    )
    prefill(cache, rows)
    twin.start(q[:, -1], k, v)
    if twin.options.speculate:  # the pages of the first step are recalled with the prefill
        for g in range(geometry.n_head_kv):
            n = geometry.n_prefill + 1
            twin.take(g, twin.best(twin.previous, g, n)[0], n, n - 1)
    seen = follow(cache, twin, stream, n_steps)
    return cache, twin, seen
