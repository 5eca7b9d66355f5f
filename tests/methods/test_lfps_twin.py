"""The fast LFPS against its literal twin over hundreds of steps: sets, outputs, tables, sums."""

from __future__ import annotations

from dataclasses import replace

import numba
import numpy as np
import pytest
from lfps_follow import (
    N_STEPS,
    Geometry,
    Stream,
    compare_tables,
    follow,
    half,
    make_cache,
    prefill,
    row_input,
    run_both,
)
from lfps_twin import SINKS, LFPSTwin, TwinOptions
from sweeps import crossed

from sparsekv_cli.methods import lfps

GEOMETRIES = [
    Geometry(4, 4, 64, 150),
    Geometry(9, 3, 64, 250),
    Geometry(8, 2, 80, 191),
    Geometry(8, 1, 128, 320),
]
CAPPED = Geometry(8, 2, 64, 191, softcap=10.0, has_sinks=True)
VARIANTS = {
    "tuned": {},
    "alone": {"scored_by": "head"},
    "paper": {"expand": "filtered", "recent": 8, "sigma": "ratio", "scored_by": "head"},
    "paper-teams": {"expand": "filtered", "recent": 8, "sigma": "ratio"},
}


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize(
    ("geometry", "variant"),
    [*crossed(GEOMETRIES, [*VARIANTS]), (CAPPED, "tuned"), *crossed([CAPPED], ["paper"], fast=-1)],
    ids=str,
)
def test_lfps_equals_its_twin(geometry, variant):
    options = TwinOptions(budget=24, epsilon=0.7, **VARIANTS[variant])
    cache, twin, seen = run_both(geometry, options, seed=1)
    assert min(seen["bypassed"], seen["active"]) > 50 and seen["beyond"] > 500
    assert seen["ties"] <= 2 and seen["counted"] >= 0.9 * N_STEPS
    if twin.heads_a_team > 1:
        assert seen["mixed"] > 50, "some heads of a group bypassed, others not"
    assert cache._step.record["rules"]["a"] == pytest.approx(
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


@pytest.mark.parametrize("scored_by", ["head", "group"])
def test_a_limit_that_an_i32_just_holds(scored_by):
    options = TwinOptions(budget=24, epsilon=0.7, scored_by=scored_by, candidates=2**31 - 1)
    cache, _, _ = run_both(Geometry(6, 2, 64, 127), options, seed=2, n_steps=8)
    assert (cache._raised == 1).all()


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
    """They start from the queries that are left, or from the next step's: as a short prefill's."""
    geometry = Geometry(4, 2, 64, 150)
    options = TwinOptions(budget=24, epsilon=1.0)
    cut, stream = make_cache(geometry, options), Stream(geometry, 0)
    q, k, v = stream.prompt(150)
    prefill(cut, q, k, v)
    q_row, k_row, v_row = stream.next()
    for n, n_known in ((120, 2), (100, 0)):  # rows, and queries that are left of the prompt's 32
        assert cut.truncate(n) == n
        out = cut.decode(row_input(q_row, k_row, v_row, n)).copy()
        assert cut.attended is not None and (cut.attended[1] == 24 + SINKS).all()
        for table in cut._tables[:2]:
            np.testing.assert_allclose(table.sum(1) * cut._tables.gain, 10, rtol=1e-4)
        fresh = make_cache(geometry, options)
        for rows in (slice(n - n_known), slice(n - n_known, n)):
            if q[:, rows].size:
                prefill(fresh, q[:, rows], k[:, rows], v[:, rows], pos=rows.start or 0)
        if not n_known:
            fresh._queries.truncate(n - 32)
            fresh._n_indexed = 0
        np.testing.assert_array_equal(fresh.decode(row_input(q_row, k_row, v_row, n)), out)


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


def scouted(scout: int, cache_type_k: str = "f16", n_threads: int = 1) -> list[set[int]]:
    """Rows that both heads attend to, step by step, of 700 rows whose row 200 has no past.

    The prompt's queries look along the first dim, and the steps' along the second, where that row
    is far ahead of all others.
    """
    geometry, options = Geometry(2, 1, 64, 700), TwinOptions(budget=24, epsilon=1.0)
    cache = make_cache(
        geometry, options, n_threads=n_threads, scout=scout, cache_type_k=cache_type_k
    )
    rng = np.random.default_rng(0)
    spread = np.where(np.arange(64) < 4, 1.0, 0.05)
    q, k, v = (spread * rng.standard_normal((heads, 720, 64)) for heads in (2, 1, 1))
    q[:, :700, 0] += 30
    q[:, 700:, 1] += 30
    k[:, 200, :2] = -8, 8
    q, k, v = (half(x) for x in (q, k, v))
    prefill(cache, q[:, :700], k[:, :700], v[:, :700])
    steps = []
    for n in range(700, 720):
        cache.decode(row_input(q[:, n], k[:, n], v[:, n], n))
        assert cache.attended is not None
        rows, counts = cache.attended
        steps.append(set.intersection(*(set(r[:m]) for r, m in zip(rows, counts, strict=True))))
    counts = cache.counters()
    n_parts = min(5, -(-scout // 128))
    assert counts.get("codes_read", 0) in range(2 * 20 * 128 * (n_parts - 1), 2 * 20 * 128 * 5 + 1)
    return steps


@pytest.mark.parametrize("cache_type_k", ["f16", "q4_0"])
def test_the_scout_finds_what_history_cannot(cache_type_k):
    """When its turn comes, and from then on history knows the row."""
    never, at_once, in_turn = (scouted(n, cache_type_k) for n in (0, 640, 256))
    assert not any(200 in rows for rows in never)
    assert all(200 in rows for rows in at_once)
    first = [200 in rows for rows in in_turn].index(True)
    assert first < 3 and all(200 in rows for rows in in_turn[first:])
    assert scouted(256, cache_type_k, n_threads=3) == in_turn


def test_a_scout_needs_the_covariance():
    with pytest.raises(ValueError, match="scout = 64: needs sigma=cov"):
        lfps.LFPS(scout=64, sigma="ratio")
    assert lfps.LFPS(preset="tuned").scout == lfps.LFPS().scout
