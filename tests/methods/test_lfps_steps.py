"""LFPS over hundreds of steps: its naive form, tables, sums and counts; sinks, scout, threads."""

from dataclasses import replace
from typing import Any

import numba
import numpy as np
import pytest
from layer_rows import Case, Geometry, HistoryStream, half
from layer_stream import attended_rows, decode, make_cache, prefill
from lfps_pair import N_STEPS, LFPSPair, followed, make_method
from sweeps import crossed

from sparsekv_cli.cache.spec import N_SINKS
from sparsekv_cli.cpu.lfps import start
from sparsekv_cli.methods import lfps
from sparsekv_cli.methods.naive import lfps as naive_lfps

CASES = [
    Case(Geometry(4, 4, 64), 150),
    Case(Geometry(9, 3, 64), 250),
    Case(Geometry(8, 2, 80), 191),
    Case(Geometry(8, 1, 128), 320),
]
CAPPED = Case(Geometry(8, 2, 64, softcap=10.0, has_sinks=True), 191)
OF_PAPER = {"expand": "filtered", "recent": 8, "sigma": "ratio", "scout": 0}
VARIANTS: dict[str, dict[str, Any]] = {
    "tuned": {},
    "alone": {"scored_by": "head"},
    "no scout": {"scout": 0},
    "paper": {"scored_by": "head", **OF_PAPER},
    "paper-head-groups": OF_PAPER,
}


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "variant"),
    [*crossed(CASES, [*VARIANTS]), (CAPPED, "tuned"), *crossed([CAPPED], ["paper"], fast=-1)],
    ids=str,
)
def test_lfps_equals_its_naive_form(case, variant):
    geometry, _ = case
    method = make_method(24, epsilon=0.7, **VARIANTS[variant])
    pair = followed(*case, method)
    seen, naive = pair.seen, pair.naive
    assert min(seen["bypassed"], seen["active"]) > 50 and seen["beyond"] > 500
    assert seen["ties"] <= 2 and seen["counted"] >= 0.9 * N_STEPS
    factor = 1.0
    if method.scored_by == "group" and naive.group > 1:
        assert seen["mixed"] > 50, "some heads of a group bypassed, others not"
        factor = 0.145 + 0.855 * min(naive.group, 3)
    a = pair.cache._step.state.rules.a
    assert a == pytest.approx(method.a * factor, rel=1e-12)
    counters = pair.cache.counters()
    assert counters["heads_bypassed"] == seen["bypassed"]
    assert counters["heads_stepped"] == geometry.n_head * N_STEPS


def test_groups_share_candidates_from_some_depth_on(monkeypatch):
    """``auto`` is the one, then the other, to the bit."""
    monkeypatch.setattr(lfps, "GROUP_ROWS", 270)
    method = make_method(24, epsilon=0.7, candidates=60, scored_by="auto")
    geometry, n_prefill = CASES[1]
    auto, by_hand = (make_cache(method, geometry) for _ in range(2))
    stream = HistoryStream(geometry, 1)
    prompt = stream.rows(n_prefill)
    for cache in (auto, by_hand):
        prefill(cache, prompt)
    for n in range(n_prefill, n_prefill + 40):
        rows = stream.rows(1)
        scored_by = "head" if n + 1 <= 270 else "group"
        by_hand.method = replace(by_hand.method, scored_by=scored_by)
        np.testing.assert_array_equal(decode(auto, rows), decode(by_hand, rows))
    np.testing.assert_array_equal(auto._statistics, by_hand._statistics)
    heads = make_cache(replace(method, scored_by="head"), geometry)
    assert heads._scores_by_group(10**6) is False
    assert auto._scores_by_group(271) is True and not auto._scores_by_group(270)


def test_fewer_queries_start_the_tables_of_a_long_context(monkeypatch):
    for module in (start, naive_lfps):
        monkeypatch.setattr(module, "FEW_FROM", 200)
    pair = followed(Geometry(6, 2, 64), 200, make_method(40), seed=6, n_steps=40)
    assert pair.seen["ties"] <= 2


@pytest.mark.parametrize("decay", [0.9, 0.95])
def test_rescaling_changes_nothing(decay):
    """g passes 1e-6 after 132 steps of .9 and after 270 of .95."""
    pair = followed(Geometry(6, 2, 64), 190, make_method(40, epsilon=1.0, decay=decay), seed=5)
    assert pair.seen["bypassed"] == 0 and pair.seen["ties"] <= 2
    n_since = (N_STEPS % 132) if decay == 0.9 else N_STEPS - 270
    np.testing.assert_allclose(pair.cache._tables.gain, decay**n_since, rtol=1e-9)


FILTERED = {"a": 0.02, "recent": 200, "expand": "filtered"}


@pytest.mark.parametrize(
    ("budget", "options", "occurs"),
    [
        (90, {"a": 3.0, "epsilon": 1.0}, "short"),
        (60, FILTERED, "beyond"),
        (25, {"window": 200, "epsilon": 0.7}, "beyond"),
        (25, {"a": 0.05, "horizon": 30, "epsilon": 0.7}, "beyond"),
        (2, {"epsilon": 1.0}, "beyond"),
        (1, {"epsilon": 0.7}, "beyond"),
        (1, {"epsilon": 1.0, "a": 1e6}, "active"),  # nothing is above the threshold
        (90, {"a": 3.0, "epsilon": 1.0, "scored_by": "head"}, "short"),
        (60, FILTERED | {"scored_by": "head"}, "beyond"),
    ],
    ids=str,
)
def test_unusual_options(budget, options, occurs):
    pair = followed(Geometry(6, 2, 64), 127, make_method(budget, **options), seed=2, n_steps=120)
    assert pair.seen[occurs] > 100


@pytest.mark.parametrize(("candidates", "expand"), [(1, "plain"), (120, "plain"), (1, "filtered")])
@pytest.mark.parametrize("scored_by", ["head", "group"])
def test_thresholds_rise_to_keep_the_limit(scored_by, expand, candidates):
    method = make_method(
        24, a=0.02, epsilon=0.7, scored_by=scored_by, expand=expand, candidates=candidates, scout=0
    )
    pair = followed(Geometry(6, 2, 64), 300, method, seed=2, n_steps=120)
    np.testing.assert_array_equal(pair.cache._raised, pair.naive.raised)
    assert (pair.cache._raised > 1).any() and pair.seen["active"] > 100


@pytest.mark.parametrize("scored_by", ["head", "group"])
def test_a_limit_that_an_i32_just_holds(scored_by):
    method = make_method(24, epsilon=0.7, scored_by=scored_by, candidates=2**31 - 1)
    pair = followed(Geometry(6, 2, 64), 127, method, seed=2, n_steps=8)
    assert (pair.cache._raised == 1).all()


@pytest.mark.parametrize(
    "others",
    [{}, {"scored_by": "head"}, {"candidates": 60}, {"candidates": 60, "expand": "filtered"}],
    ids=str,
)
@pytest.mark.parametrize("case", [*CASES[1:], Case(Geometry(3, 1, 64), 1500)], ids=str)
def test_any_number_of_threads(case, others):
    """Whole head groups a thread, shared head groups, and more threads than head groups."""
    geometry, n_prefill = case
    method = make_method(24, **({"a": 0.02, "epsilon": 0.7} | others))
    numba.set_num_threads(numba.config.NUMBA_NUM_THREADS)
    try:
        caches = [make_cache(method, geometry, n_threads=n) for n in (1, 2, 3, 5)]
        stream = HistoryStream(geometry, 1)
        prompt = stream.rows(n_prefill)
        for cache in caches:
            prefill(cache, prompt)
        for _ in range(60):
            rows = stream.rows(1)
            first, *rest = (decode(cache, rows) for cache in caches)
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
    scout = 0 if sigma == "ratio" else 128
    method = make_method(20, epsilon=1e-9, sigma=sigma, scored_by=scored_by, scout=scout)
    pair = followed(Geometry(3, 1, 80), 100, method, seed=3, n_steps=30)
    assert pair.seen["active"] == 0
    np.testing.assert_array_equal(pair.cache._tables.gain, 1.0)


@pytest.mark.parametrize(
    ("case", "types"), [*zip(CASES, ["f16", "q8_0"] * 2, strict=True)], ids=str
)
def test_sinks_that_are_attended_elsewhere(case, types):
    """What is left out and what others give for the sinks make up the whole, by log-sum-exp."""
    geometry, n_prefill = case
    method = make_method(24, epsilon=0.7, cache_type_k=types, cache_type_v=types)
    whole, rest = (make_cache(method, geometry) for _ in range(2))
    rest.exclude_sinks()
    stream = HistoryStream(geometry, 1)
    prompt = stream.rows(n_prefill)
    for cache in (whole, rest):
        prefill(cache, prompt)
    group = geometry.n_head // geometry.n_head_kv
    for _ in range(40):
        rows = stream.rows(1)
        expected, out = decode(whole, rows), decode(rest, rows).copy()
        k, v = (
            each[:, :N_SINKS, : geometry.d].astype(np.float32)
            for each in (rest.store.keys(), rest.store.values())
        )
        for h in range(geometry.n_head):
            scores = k[h // group] @ rows[0][h, 0] * float(rest.spec.scale)
            lse = np.logaddexp.reduce([*scores, rest.lse[h]])
            out[h] = np.exp(rest.lse[h] - lse) * out[h] + np.exp(scores - lse) @ v[h // group]
        np.testing.assert_allclose(out, expected, atol=2e-5)
    for a, b in zip(whole._tables, rest._tables, strict=True):
        np.testing.assert_array_equal(a, b)
    counted, fewer = whole.counters(), rest.counters()
    assert counted["heads_bypassed"] == fewer["heads_bypassed"] > 20
    sink_values = 40 * geometry.n_head * N_SINKS * whole.store.v.strides[1]
    assert counted["bytes_read"] - fewer["bytes_read"] == sink_values


def test_a_later_turn_starts_the_tables_again():
    pair = LFPSPair(make_method(24, epsilon=0.7), Geometry(6, 2, 64), 4)
    for n_new in (150, 20, 70, 1):  # fewer rows than the window, more, and one
        pair.prefill(n_new)
        pair.compare_tables()
        pair.decode(30)
        pair.compare_tables()


def test_decode_after_truncate_starts_new_tables():
    """They start from the queries that are left, or from the next step's."""
    pair = LFPSPair(make_method(24, epsilon=1.0), Geometry(4, 2, 64))
    pair.prefill(150)
    for n, n_known in ((120, 2), (100, 0)):  # rows, and queries that are left of the prompt's 32
        pair.truncate(n)
        assert len(pair.naive.known) == n_known
        pair.decode(1)
        assert pair.cache.attended is not None
        assert (pair.cache.attended[1] == 24 + N_SINKS).all()
        pair.compare_tables()
        pair.truncate(n)
    pair.decode(20)


@pytest.mark.parametrize("n_prefill", [1, 4, 5, 6, 7, 12])
def test_tiny_contexts(n_prefill):
    """From fewer rows than there are sinks: dense at first, then sparse."""
    pair = LFPSPair(make_method(3, epsilon=0.7), Geometry(4, 2, 64))
    pair.prefill(n_prefill)
    pair.decode(20)
    assert pair.seen["sparse"] == sum(n > 3 + N_SINKS for n in range(n_prefill + 1, n_prefill + 21))
    assert (pair.cache.attended[1] <= N_SINKS + 7).all()


@pytest.mark.parametrize("name", ["use_tables", "use_scout"])
@pytest.mark.parametrize("later", [False, True])
def test_after_an_interrupt_while_arrays_grow_no_step_uses_the_old_ones(name, later, monkeypatch):
    cache = make_cache(make_method(24, epsilon=0.7), Geometry(4, 2, 64))
    if later:
        cache.update_later()
    stream = HistoryStream(Geometry(4, 2, 64), 1)
    prefill(cache, stream.rows(250))
    decode(cache, stream.rows(1))

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cache._step, name, interrupt)
    with pytest.raises(KeyboardInterrupt):
        for _ in range(300):
            decode(cache, stream.rows(1))
            cache.end_step(cache.n)
    monkeypatch.undo()
    decode(cache, stream.rows(1))
    state = cache._step.state
    assert state.tables.ver is cache._tables.ver and state.codes == cache._scout.known()


def test_a_step_that_is_taken_back_ahead_of_its_update_leaves_none():
    """The heads of the next step are bypassed, so that they have no update of their own."""
    cache = make_cache(make_method(24, epsilon=1.0), Geometry(4, 2, 64))
    cache.update_later()
    stream = HistoryStream(Geometry(4, 2, 64), 1)
    prefill(cache, stream.rows(150))
    decode(cache, stream.rows(1))
    cache.truncate(150)
    state = cache._step.state
    state.set(rules=state.rules._replace(epsilon=1e-9))
    decode(cache, stream.rows(1))
    cache.end_step(cache.n)
    assert cache.counters()["heads_bypassed"] == 4
    np.testing.assert_array_equal(cache._tables.gain, 1.0)


def scouted(scout: int, kind: str = "f16", n_threads: int = 1, turn: int = 700) -> list[set[int]]:
    """Rows that both heads attend to, step by step, of 700 rows whose row 200 has no past.

    Queries look along the first dim up to ``turn``, and then along the second, where that row is
    far ahead of all others.
    """
    method = make_method(24, epsilon=1.0, scout=scout, cache_type_k=kind)
    cache = make_cache(method, Geometry(2, 1, 64), n_threads=n_threads)
    rng = np.random.default_rng(0)
    spread = np.where(np.arange(64) < 4, 1.0, 0.05)
    q, k, v = (spread * rng.standard_normal((heads, 720, 64)) for heads in (2, 1, 1))
    q[:, :turn, 0] += 30
    q[:, turn:, 1] += 30
    k[:, 200, :2] = -8, 8
    rows = tuple(half(x) for x in (q, k, v))
    prefill(cache, tuple(x[:, :700] for x in rows))
    steps = []
    for n in range(700, 720):
        decode(cache, rows, n)
        steps.append(set.intersection(*(set(each) for each in attended_rows(cache))))
    counts = cache.counters()
    n_parts = min(5, -(-scout // 128))
    assert counts.get("codes_read", 0) in range(20 * 128 * (n_parts - 1), 20 * 128 * 5 + 1)
    return steps


@pytest.mark.parametrize("cache_type_k", ["f16", "q4_0"])
def test_the_scout_finds_what_history_cannot(cache_type_k):
    """In the first step, or when its turn comes. From then on history knows the row."""
    assert not any(200 in rows for rows in scouted(0, cache_type_k))
    assert all(200 in rows for rows in scouted(256, cache_type_k))
    in_turn = scouted(256, cache_type_k, turn=702)
    first = [200 in rows for rows in in_turn].index(True)
    assert 2 <= first < 5 and all(200 in rows for rows in in_turn[first:])
    assert scouted(256, cache_type_k, n_threads=3, turn=702) == in_turn


def test_a_scout_needs_the_covariance():
    with pytest.raises(ValueError, match="scout = 64: needs sigma=cov"):
        lfps.LFPS(scout=64, sigma="ratio")
    assert lfps.LFPS(preset="tuned").scout == lfps.LFPS().scout
