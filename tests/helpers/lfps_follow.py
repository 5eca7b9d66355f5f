"""LFPS and its twin on the same rows, step by step."""

from __future__ import annotations

from dataclasses import asdict, dataclass

import numpy as np
from chunks import attend_chunk
from lfps_counts import assert_counted
from lfps_twin import SINKS, HeadChoice, LFPSTwin, TwinOptions

from sparsekv_cli.cache.spec import AttnInput, Budget, LayerSpec
from sparsekv_cli.cache.store import padded
from sparsekv_cli.methods.lfps import LFPS, LFPSCache

N_STEPS = 300
TIE = 1e-5  # f32 tables and scores against f64: nearer than this to a border is a tie


@dataclass(frozen=True)
class Geometry:
    n_head: int
    n_head_kv: int
    d: int
    n_prefill: int
    softcap: float = 0.0
    has_sinks: bool = False

    def __str__(self) -> str:
        capped = "-capped" if self.softcap else ""
        return f"H{self.n_head}-G{self.n_head_kv}-d{self.d}-n{self.n_prefill}{capped}"

    @property
    def sinks(self) -> np.ndarray:
        """f32 (H,): a score without a value, which some heads attend to most; or empty."""
        return np.linspace(-4, 11, self.n_head if self.has_sinks else 0, dtype=np.float32)


class Stream:
    """Random attention with structure: drifting queries, heavy keys, sinks, a slash pattern."""

    def __init__(self, geometry: Geometry, seed: int, sink_strength: float = 3.0) -> None:
        g = self.geometry = geometry
        rng = self.rng = np.random.default_rng(seed)
        self.directions = rng.standard_normal((g.n_head_kv, 6, g.d))
        self.directions /= np.linalg.norm(self.directions, axis=-1, keepdims=True)
        self.sink = sink_strength
        self.q_walk = rng.standard_normal((g.n_head, g.d))
        self.period = rng.integers(11, 29, g.n_head_kv)
        self.position = 0

    def next(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """q (H, d), k (G, d), v (G, d) of one token, K and V representable in f16."""
        g, rng, p = self.geometry, self.rng, self.position
        root = np.sqrt(g.d)
        self.q_walk = 0.97 * self.q_walk + 0.25 * rng.standard_normal(self.q_walk.shape)
        q = self.q_walk.copy()
        k = 0.6 * rng.standard_normal((g.n_head_kv, g.d))
        for h in range(g.n_head):
            kv = h // (g.n_head // g.n_head_kv)
            heavy = self.directions[kv]
            topic = (p // 40 + h) % 3
            q[h] += 1.2 * root**0.5 * heavy[topic]
            q[h] += self.sink * (1 + np.sin(p / 9 + 2 * h)) / 2 * root**0.5 * heavy[5]
            phase = 2 * np.pi * p / self.period[kv]
            q[h] += 1.6 * (np.cos(phase) * heavy[3] + np.sin(phase) * heavy[4]) * root**0.5
        for kv in range(g.n_head_kv):
            heavy = self.directions[kv]
            phase = 2 * np.pi * p / self.period[kv]
            k[kv] += 1.6 * (np.cos(phase) * heavy[3] + np.sin(phase) * heavy[4]) * root**0.5
            if rng.random() < 0.06:
                k[kv] += 3.0 * root**0.5 * heavy[rng.integers(3)]
            if p < SINKS:
                k[kv] = self.sink * root**0.5 * heavy[5]
        v = rng.standard_normal((g.n_head_kv, g.d))
        self.position += 1
        return q.astype(np.float32), half(k), half(v)

    def prompt(self, n: int) -> tuple[np.ndarray, ...]:
        """q (H, n, d), k (G, n, d), v (G, n, d)."""
        rows = [self.next() for _ in range(n)]
        return tuple(np.stack([row[i] for row in rows], axis=1) for i in range(3))


def half(x: np.ndarray) -> np.ndarray:
    return x.astype(np.float16).astype(np.float32)


def make_cache(
    geometry: Geometry, options: TwinOptions, *, n_threads: int = 1, **others: str
) -> LFPSCache:
    values = asdict(options) | {"budget": Budget(tokens=options.budget)} | others
    g = geometry
    spec = LayerSpec(
        layer=2, n_layer=4, n_head=g.n_head, n_head_kv=g.n_head_kv, head_dim=g.d, value_dim=g.d,
        n_threads=n_threads, softcap=np.float32(g.softcap), sinks=g.sinks,
    )  # fmt: skip
    cache = LFPS(**values).layer(spec)
    assert isinstance(cache, LFPSCache)
    cache.records_attended = True
    return cache


def prefill(cache: LFPSCache, q, k, v, pos: int = 0, chunk: int = 64):
    for start in range(0, q.shape[1], chunk):
        part = (x[:, start : start + chunk].copy() for x in (q, k, v))
        q_part, k_part, v_part = part
        attend_chunk(cache, AttnInput(q_part, k_part, v_part, q_part, k_part, pos + start))
    cache.finish_prefill()


def row_input(q, k, v, pos: int) -> AttnInput:
    def widen(x):
        wide = np.zeros((len(x), 1, padded(x.shape[1])), np.float32)
        wide[:, 0, : x.shape[1]] = x
        return wide

    q, k, v = widen(q), widen(k), widen(v)
    return AttnInput(q, k, v, q, k, pos)


def reconcile(twin: LFPSTwin, choice: HeadChoice, actual: np.ndarray) -> bool:
    """Makes a choice that differs only by a tie equal to ``actual``; AssertionError if it is none.

    A tie: a score next to the lowest one that was chosen, or a table entry next to its threshold.
    Returns whether there was one.
    """
    expected, got = set(choice.attended.tolist()), set(actual.tolist())
    assert len(got) == len(actual), "a row is attended twice"
    if got == expected:
        return False
    n = len(choice.scores)
    assert abs(choice.rho - twin.options.epsilon) > TIE, "the bypass test ties: take another seed"
    assert not choice.bypassed
    assert got >= {*range(SINKS), *range(n - twin.n_recent(), n)}
    scores = choice.scores[sorted(expected ^ got)]
    near_cut = (abs(scores - choice.cut) < TIE * (1 + abs(choice.cut))).all()
    near_cut = near_cut and len(expected) == len(got)
    assert near_cut or choice.distance < TIE, f"rows {sorted(expected ^ got)} of {n} are no tie"
    choice.attended = np.array(sorted(got))
    return True


def follow(cache: LFPSCache, twin: LFPSTwin, stream: Stream, n_steps: int) -> dict[str, int]:
    """Decodes n_steps tokens in both and compares everything; counts what occurred."""
    counts = ("bypassed", "active", "mixed", "ties", "beyond", "short", "counted")
    seen = dict.fromkeys(counts, 0)
    for _ in range(n_steps):
        q, k, v = stream.next()
        n, before = cache.store.n + 1, cache.counters()
        out = cache.decode(row_input(q, k, v, n - 1))
        choices = twin.choose(q, k, v)
        seen["counted"] += assert_counted(twin, before, cache.counters())
        assert cache.attended is not None
        rows, counts = cache.attended
        for h, choice in enumerate(choices):
            seen["ties"] += reconcile(twin, choice, rows[h, : counts[h]])
            seen["bypassed" if choice.bypassed else "active"] += 1
            seen["beyond"] += len(choice.candidates) > twin.options.budget
            seen["short"] += 0 < len(choice.candidates) < twin.options.budget
        for first in range(0, twin.n_head, twin.heads_a_team):
            team = {c.bypassed for c in choices[first : first + twin.heads_a_team]}
            seen["mixed"] += len(team) == 2
        expected = twin.finish(choices)
        np.testing.assert_allclose(out[:, : expected.shape[1]], expected, atol=2e-4)
    return seen


def compare_tables(cache: LFPSCache, twin: LFPSTwin) -> None:
    """Tables times gain, their sums and their power sums."""
    n = cache.store.n
    for which, (table, expected) in enumerate(
        zip(cache._tables[:2], (twin.ver, twin.dist), strict=True)
    ):
        actual = table[:, :n].astype(np.float64) * cache._tables.gain[:, None]
        np.testing.assert_allclose(actual, expected, atol=2e-5)
        assert not table[:, n:].any()
        np.testing.assert_allclose(actual.sum(1), expected.sum(1), rtol=1e-5)
        if twin.options.window <= 32:  # otherwise the first queries, which see sinks only, count
            np.testing.assert_allclose(actual.sum(1), 0.5 / (1 - twin.options.decay), rtol=1e-5)
        for power in range(1, 5):
            exact = (table[:, :n].astype(np.float64) ** power).sum(1)
            scale = (np.abs(table[:, :n].astype(np.float64)) ** power).sum(1)
            np.testing.assert_array_less(
                np.abs(cache._tables.sums[:, which, power - 1] - exact), 1e-9 * scale + 1e-12
            )
        bounds = cache._tables[2 + which]
        for block in range(-(-n // 64)):
            entries = table[:, 64 * block : min(n, 64 * block + 64)]
            assert (bounds[:, block] >= entries.max(1)).all()


def run_both(geometry, options, seed, sink_strength=3.0, n_steps=N_STEPS):
    stream = Stream(geometry, seed, sink_strength)
    q, k, v = stream.prompt(geometry.n_prefill)
    cache = make_cache(geometry, options)
    twin = LFPSTwin(
        options, geometry.n_head, geometry.n_head_kv, geometry.softcap,
        geometry.sinks if geometry.has_sinks else None,
    )  # fmt: skip
    prefill(cache, q, k, v)
    capacities = cache._tables.ver.shape[1], cache.store.capacity
    twin.start(q, k, v)
    compare_tables(cache, twin)
    seen = follow(cache, twin, stream, n_steps)
    compare_tables(cache, twin)
    if n_steps == N_STEPS:  # both have grown on the way
        assert cache._tables.ver.shape[1] > capacities[0]
        assert cache.store.capacity > capacities[1]
    return cache, twin, seen
