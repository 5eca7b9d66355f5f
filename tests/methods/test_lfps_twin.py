"""The fast LFPS against its literal twin over hundreds of steps: sets, outputs, tables, sums."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace

import numba
import numpy as np
import pytest
from chunks import attend_chunk
from lfps_counts import assert_counted
from lfps_twin import SINKS, HeadChoice, LFPSTwin, TwinOptions

from sparsekv_cli.cache.spec import AttnInput, Budget, LayerSpec
from sparsekv_cli.cache.store import padded
from sparsekv_cli.cpu.lfps import step as lfps_chain
from sparsekv_cli.methods import lfps
from sparsekv_cli.methods.lfps import LFPS, LFPSCache

N_STEPS = 300
TIE = 1e-5  # f32 tables and scores against f64: nearer than this to a border is a tie


@dataclass(frozen=True)
class Geometry:
    n_head: int
    n_head_kv: int
    d: int
    n_prefill: int

    def __str__(self) -> str:
        return f"H{self.n_head}-G{self.n_head_kv}-d{self.d}-n{self.n_prefill}"


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
        n_threads=n_threads,
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
    twin = LFPSTwin(options, geometry.n_head, geometry.n_head_kv)
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


GEOMETRIES = [
    Geometry(4, 4, 64, 150),
    Geometry(9, 3, 64, 250),
    Geometry(8, 2, 80, 191),
    Geometry(8, 1, 128, 320),
]
VARIANTS = {
    "tuned": {},
    "alone": {"scored_by": "head"},
    "paper": {"expand": "filtered", "recent": 8, "sigma": "ratio", "scored_by": "head"},
    "paper-teams": {"expand": "filtered", "recent": 8, "sigma": "ratio"},
}


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
def test_lfps_equals_its_twin(geometry, variant):
    options = TwinOptions(budget=24, epsilon=0.7, **VARIANTS[variant])
    cache, twin, seen = run_both(geometry, options, seed=1)
    assert min(seen["bypassed"], seen["active"]) > 50 and seen["beyond"] > 500
    assert seen["ties"] <= 2 and seen["counted"] >= 0.9 * N_STEPS
    if twin.heads_a_team > 1:
        assert seen["mixed"] > 50, "some heads of a group bypassed, others not"
    assert cache._step.words.view(np.float64)[lfps_chain.A] == pytest.approx(
        options.a * (0.145 + 0.855 * min(twin.heads_a_team, 3)), rel=1e-12
    )
    counters = cache.counters()
    assert counters["heads_bypassed"] == seen["bypassed"]
    assert counters["heads_stepped"] == geometry.n_head * N_STEPS


def test_groups_share_candidates_from_some_depth_on(monkeypatch):
    """``auto`` is the one, then the other, to the bit."""
    monkeypatch.setattr(lfps, "GROUP_ROWS", 270)
    geometry = Geometry(9, 3, 64, 250)
    options = TwinOptions(budget=24, epsilon=0.7, candidates=60, scored_by="auto")
    auto, by_hand = (make_cache(geometry, options) for _ in range(2))
    stream = Stream(geometry, 1)
    prompt = stream.prompt(geometry.n_prefill)
    for cache in (auto, by_hand):
        prefill(cache, *prompt)
    for n in range(geometry.n_prefill, geometry.n_prefill + 40):
        x = row_input(*stream.next(), n)
        scored_by = "head" if n + 1 <= 270 else "group"
        by_hand.method = replace(by_hand.method, scored_by=scored_by)
        np.testing.assert_array_equal(auto.decode(x), by_hand.decode(x))
    np.testing.assert_array_equal(auto._statistics, by_hand._statistics)
    heads = make_cache(geometry, replace(options, scored_by="head"))
    assert heads._scores_by_group(10**6) is False
    assert auto._scores_by_group(271) is True and not auto._scores_by_group(270)


@pytest.mark.parametrize("decay", [0.9, 0.95])
def test_rescaling_changes_nothing(decay):
    """g passes 1e-6 after 132 steps of .9 and after 270 of .95."""
    options = TwinOptions(budget=40, epsilon=1.0, decay=decay)
    cache, _, seen = run_both(Geometry(6, 2, 64, 190), options, seed=5)
    assert seen["bypassed"] == 0 and seen["ties"] <= 2
    n_since = (N_STEPS % 132) if decay == 0.9 else N_STEPS - 270
    np.testing.assert_allclose(cache._tables.gain, decay**n_since, rtol=1e-9)


@pytest.mark.parametrize(
    ("options", "occurs"),
    [
        (TwinOptions(budget=90, a=3.0, epsilon=1.0), "short"),
        (TwinOptions(budget=60, a=0.02, recent=200, expand="filtered"), "beyond"),
        (TwinOptions(budget=25, window=200, epsilon=0.7), "beyond"),
        (TwinOptions(budget=25, a=0.05, horizon=30, epsilon=0.7), "beyond"),
        (TwinOptions(budget=2, epsilon=1.0), "beyond"),
        (TwinOptions(budget=1, epsilon=0.7), "beyond"),
        (TwinOptions(budget=1, epsilon=1.0, a=1e6), "active"),  # nothing is above the threshold
        (TwinOptions(budget=90, a=3.0, epsilon=1.0, scored_by="head"), "short"),
        (TwinOptions(budget=60, a=0.02, recent=200, expand="filtered", scored_by="head"), "beyond"),
    ],
    ids=str,
)
def test_unusual_options(options, occurs):
    _, _, seen = run_both(Geometry(6, 2, 64, 127), options, seed=2, n_steps=120)
    assert seen[occurs] > 100


@pytest.mark.parametrize(("candidates", "expand"), [(1, "plain"), (120, "plain"), (1, "filtered")])
@pytest.mark.parametrize("scored_by", ["head", "group"])
def test_thresholds_rise_to_keep_the_limit(scored_by, expand, candidates):
    options = TwinOptions(
        budget=24, a=0.02, epsilon=0.7, scored_by=scored_by, expand=expand, candidates=candidates
    )  # fmt: skip
    cache, twin, seen = run_both(Geometry(6, 2, 64, 300), options, seed=2, n_steps=120)
    np.testing.assert_array_equal(cache._raised, twin.raised)
    assert (cache._raised > 1).any() and seen["active"] > 100


@pytest.mark.parametrize(
    "others",
    [
        {},
        {"scored_by": "head"},
        {"candidates": 60},
        {"candidates": 60, "expand": "filtered"},
    ],
    ids=str,
)
@pytest.mark.parametrize("geometry", [*GEOMETRIES[1:], Geometry(3, 1, 64, 1500)], ids=str)
def test_any_number_of_threads(geometry, others):
    """Whole teams a thread, teams that threads share, and more threads than there are to take."""
    options = TwinOptions(budget=24, a=0.02, epsilon=0.7, **others)
    numba.set_num_threads(numba.config.NUMBA_NUM_THREADS)
    try:
        caches = [make_cache(geometry, options, n_threads=n) for n in (1, 2, 3, 5)]
        stream = Stream(geometry, 1)
        prompt = stream.prompt(geometry.n_prefill)
        for cache in caches:
            prefill(cache, *prompt)
        for n in range(geometry.n_prefill, geometry.n_prefill + 60):
            x = row_input(*stream.next(), n)
            first, *rest = (cache.decode(x) for cache in caches)
            for out in rest:
                np.testing.assert_array_equal(out, first)
        for cache in caches[1:]:
            for a, b in zip(cache._tables, caches[0]._tables, strict=True):
                np.testing.assert_array_equal(a, b)
            np.testing.assert_array_equal(cache._statistics, caches[0]._statistics)
            np.testing.assert_array_equal(cache._raised, caches[0]._raised)
    finally:
        numba.set_num_threads(1)


@pytest.mark.parametrize("sigma", ["cov", "ratio"])
@pytest.mark.parametrize("scored_by", ["head", "group"])
def test_heads_that_are_always_bypassed_leave_the_tables_alone(scored_by, sigma):
    options = TwinOptions(budget=20, epsilon=1e-9, sigma=sigma, scored_by=scored_by)
    cache, _, seen = run_both(Geometry(3, 1, 80, 100), options, seed=3, n_steps=30)
    assert seen["active"] == 0
    np.testing.assert_array_equal(cache._tables.gain, 1.0)


@pytest.mark.parametrize(
    ("geometry", "types"), [*zip(GEOMETRIES, ["f16", "q8_0"] * 2, strict=True)]
)
def test_sinks_that_are_attended_elsewhere(geometry, types):
    """What is left out and what others give for the sinks make up the whole, by log-sum-exp."""
    options = TwinOptions(budget=24, epsilon=0.7)
    whole, rest = (make_cache(geometry, options, cache_type_k=types, cache_type_v=types)
                   for _ in range(2))  # fmt: skip
    rest.leave_sinks()
    stream = Stream(geometry, 1)
    prompt = stream.prompt(geometry.n_prefill)
    for cache in (whole, rest):
        prefill(cache, *prompt)
    group = geometry.n_head // geometry.n_head_kv
    for n in range(geometry.n_prefill, geometry.n_prefill + 40):
        x = row_input(*stream.next(), n)
        expected, out = whole.decode(x), rest.decode(x)
        k, v = (
            rows[:, :SINKS].astype(np.float32) for rows in (rest.store.keys(), rest.store.values())
        )
        for h in range(geometry.n_head):
            scores = k[h // group] @ x.q[h, 0] * float(rest.spec.scale)
            lse = np.logaddexp.reduce([*scores, rest.lse[h]])
            out[h] = np.exp(rest.lse[h] - lse) * out[h] + np.exp(scores - lse) @ v[h // group]
        np.testing.assert_allclose(out, expected, atol=2e-5)
    for a, b in zip(whole._tables, rest._tables, strict=True):
        np.testing.assert_array_equal(a, b)
    counted, fewer = whole.counters(), rest.counters()
    assert counted["heads_bypassed"] == fewer["heads_bypassed"] > 20
    sink_values = 40 * geometry.n_head * SINKS * whole.store.v.strides[1]
    assert counted["bytes_read"] - fewer["bytes_read"] == sink_values


def test_a_later_turn_starts_the_tables_again():
    geometry = Geometry(6, 2, 64, 150)
    options = TwinOptions(budget=24, epsilon=0.7)
    cache, stream = make_cache(geometry, options), Stream(geometry, 4)
    twin = LFPSTwin(options, geometry.n_head, geometry.n_head_kv)
    turns = [stream.prompt(150)]
    prefill(cache, *turns[0])
    twin.start(*turns[0])
    follow(cache, twin, stream, 30)
    for n_new in (20, 70, 1):  # fewer rows than the window, more, and one
        q, k, v = stream.prompt(n_new)
        prefill(cache, q, k, v, pos=cache.store.n)
        twin.start(q, np.concatenate([twin.k, k], axis=1), np.concatenate([twin.v, v], axis=1))
        compare_tables(cache, twin)
        follow(cache, twin, stream, 30)
        compare_tables(cache, twin)


def test_decode_after_truncate_starts_new_tables():
    """The tables that went with the rows are replaced by the first query's: as a prefill of one."""
    geometry = Geometry(4, 2, 64, 150)
    options = TwinOptions(budget=24, epsilon=1.0)
    cut, fresh = make_cache(geometry, options), make_cache(geometry, options)
    stream = Stream(geometry, 0)
    q, k, v = stream.prompt(150)
    prefill(cut, q, k, v)
    assert cut.truncate(120) == 120
    q_row, k_row, v_row = stream.next()
    out = cut.decode(row_input(q_row, k_row, v_row, 120)).copy()
    assert cut.attended is not None and (cut.attended[1] == 24 + SINKS).all()

    prefill(fresh, q[:, :120], k[:, :120], v[:, :120])
    fresh.truncate(120)
    np.testing.assert_array_equal(fresh.decode(row_input(q_row, k_row, v_row, 120)), out)
    for table in cut._tables[:2]:
        np.testing.assert_allclose(table.sum(1) * cut._tables.gain, 10, rtol=1e-4)


@pytest.mark.parametrize("n_prefill", [1, 4, 5, 6, 7, 12])
def test_tiny_contexts(n_prefill):
    """From fewer rows than there are sinks: dense at first, then sparse, always finite."""
    geometry = Geometry(4, 2, 64, n_prefill)
    options = TwinOptions(budget=3, epsilon=0.7)
    cache, stream = make_cache(geometry, options), Stream(geometry, 0)
    prefill(cache, *stream.prompt(n_prefill))
    for step in range(20):
        out = cache.decode(row_input(*stream.next(), n_prefill + step))
        assert np.isfinite(out).all()
        if n_prefill > SINKS + 1 and n_prefill + step + 1 > 3 + SINKS:
            assert cache.attended is not None
            assert (cache.attended[1] <= SINKS + 7).all()
