"""FreeKV against its literal twin over hundreds of steps, its limiting cases, and its two tiers."""

from __future__ import annotations

import gc
import itertools
import threading
from dataclasses import dataclass, replace

import numba
import numpy as np
import pytest
import torch
from freekv_twin import FreeKVTwin, HeadChoice, TwinOptions
from tiny_models import make_model

from sparsekv_cli.cache import AttnInput, Budget, KVStore, LayerSpec, padded
from sparsekv_cli.config import SessionConfig
from sparsekv_cli.cpu import ops
from sparsekv_cli.methods import build_method
from sparsekv_cli.methods.freekv import FreeKV, FreeKVCache
from sparsekv_cli.session import Session, load_session

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


class Stream:
    """Keys that follow a topic for a while, and queries that stay on one, or turn to another."""

    def __init__(self, geometry: Geometry, seed: int) -> None:
        g = self.geometry = geometry
        rng = self.rng = np.random.default_rng(seed)
        self.topics = rng.standard_normal((12, g.d)) * 1.5
        self.topic = rng.integers(12, size=g.n_head_kv)  # of the keys
        self.interest = rng.standard_normal((g.n_head, g.d))
        self.turned = np.zeros(g.n_head_kv, bool)

    def next(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """q (H, d), k (G, d), v (G, d_v) of one token, K and V representable in f16."""
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

    def prompt(self, n: int) -> tuple[np.ndarray, ...]:
        """q (H, n, d), k (G, n, d), v (G, n, d_v)."""
        rows = [self.next() for _ in range(n)]
        return tuple(np.stack([row[i] for row in rows], axis=1) for i in range(3))


def half(x: np.ndarray) -> np.ndarray:
    return x.astype(np.float16).astype(np.float32)


class Share(Budget):
    """Half of the context, so that the number of pages grows with it."""

    def rows(self, n: int) -> int:
        return n // 2


class AllButOne(Budget):
    """Just too small for the context, and yet all pages are chosen; where that cannot be, dense."""

    def rows(self, n: int) -> int:
        return n - 1 if n % 16 else n


def make_cache(geometry: Geometry, n_threads: int = 1, **options) -> FreeKVCache:
    g = geometry
    spec = LayerSpec(
        layer=2, n_layer=4, n_head=g.n_head, n_head_kv=g.n_head_kv, head_dim=g.d,
        value_dim=g.d_v or g.d, n_threads=n_threads,
    )  # fmt: skip
    cache = FreeKV(**options).layer(spec, ops)
    assert isinstance(cache, FreeKVCache)
    cache.traced = True
    return cache


def prefill(cache: FreeKVCache, q, k, v, pos: int = 0, chunk: int = 64) -> torch.Tensor:
    outs = []
    for start in range(0, q.shape[1], chunk):
        part = (torch.from_numpy(x[:, start : start + chunk].copy()) for x in (q, k, v))
        q_part, k_part, v_part = part
        outs.append(cache.prefill(AttnInput(q_part, k_part, v_part, q_part, k_part, pos + start)))
    cache.finish_prefill()
    return torch.cat(outs, 1)


def row_input(q, k, v, pos: int) -> AttnInput:
    def widen(x):
        wide = np.zeros((len(x), 1, padded(x.shape[1])), np.float32)
        wide[:, 0, : x.shape[1]] = x
        return wide

    q, k, v = widen(q), widen(k), widen(v)
    return AttnInput(q, k, v, q, k, pos)


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
    choice.pages = np.setdiff1d(candidates, np.setdiff1d(candidates, np.unique(got // p)))
    return True


def follow(cache: FreeKVCache, twin: FreeKVTwin, stream: Stream, n_steps: int) -> dict[str, int]:
    """Decodes n_steps tokens in both and compares everything; counts what occurred.

    The twin's pages are taken into its LRU cache in the order in which they are chosen: the step's
    own; then, with a thread that works ahead, the next step's.
    """
    ahead = cache._overlaps
    seen = {"corrected": 0, "steps": 0, "ties": 0, "left out": 0, "borders": 0}
    for _ in range(n_steps):
        q, k, v = stream.next()
        n = cache.n + 1
        out = cache.decode(row_input(q, k, v, n - 1))
        assert cache.n == n and cache.attended is not None
        choices = twin.choose(q, k, v)
        rows, counts = cache.attended
        for g, choice in enumerate(choices):
            seen["ties"] += reconcile(twin, choice, rows[g, : counts[g]])
            seen["corrected"] += choice.corrected
            seen["steps"] += 1
            seen["left out"] += len(choice.pages) < len(twin.candidates(n))
            by_previous = twin.options.speculate and not choice.corrected
            twin.take(g, choice.pages, n, n - 1 if by_previous else n)
        seen["borders"] += len(twin.candidates(n + 1)) > len(twin.candidates(n))
        expected = twin.finish(choices)
        np.testing.assert_allclose(out[:, : expected.shape[1]], expected, atol=2e-4)
        if ahead:
            for g in range(twin.n_kv):
                twin.take(g, twin.best(twin.previous, g, n + 1)[0], n + 1, n)
    return seen


def run_both(geometry, seed=1, n_steps=N_STEPS, n_threads=1, budget=None, **options):
    budget = budget or Budget(tokens=144)
    stream = Stream(geometry, seed)
    q, k, v = stream.prompt(geometry.n_prefill)
    defaults = {"sinks": 16, "window": 32, "page": 16, "overlap": "false"}
    options = defaults | options
    cache = make_cache(geometry, n_threads, budget=budget, **options)
    options.pop("overlap")
    twin = FreeKVTwin(
        TwinOptions(budget=budget.rows, **options), geometry.n_head, geometry.n_head_kv
    )
    prefill(cache, q, k, v)
    twin.start(q[:, -1], k, v)
    if twin.options.speculate:  # the pages of the first step are recalled with the prefill
        for g in range(geometry.n_head_kv):
            n = geometry.n_prefill + 1
            twin.take(g, twin.best(twin.previous, g, n)[0], n, n - 1)
    seen = follow(cache, twin, stream, n_steps)
    return cache, twin, seen


GEOMETRIES = [
    Geometry(4, 4, 64, 250),
    Geometry(9, 3, 64, 300),
    Geometry(8, 2, 80, 271),
    Geometry(8, 1, 128, 320),
    Geometry(6, 2, 72, 263, 40),  # rows are padded, values are of another size
]
VARIANTS = {
    "tuned": {},
    "overlap": {"overlap": "true"},
    "minmax": {"summaries": "minmax", "page": 32, "sinks": 32},
    "no speculation": {"speculate": False},
    "speculation only": {"correct": False},
    "overlap, speculation only": {"correct": False, "overlap": "true"},
    "small cache": {"cache_pages": 1.0, "overlap": "true", "tau": 0.9},
    "odd pages": {"page": 7, "sinks": 14, "window": 30, "overlap": "true"},
}


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Short kernels wait for each other's threads on a busy machine; one test uses them all."""
    numba.set_num_threads(1)
    torch.set_num_threads(1)
    yield
    numba.set_num_threads(numba.config.NUMBA_NUM_THREADS)


# --- the twin -------------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
def test_freekv_equals_its_twin(geometry, variant):
    cache, twin, seen = run_both(geometry, **VARIANTS[variant])
    page = twin.options.page
    assert seen["ties"] <= 3 and seen["left out"] == seen["steps"]
    assert seen["borders"] in (N_STEPS // page, N_STEPS // page + 1)
    if twin.options.speculate and twin.options.correct:
        assert 0.1 * seen["steps"] < seen["corrected"] < 0.9 * seen["steps"]
    counts = cache.counters()
    assert counts["heads_corrected"] == seen["corrected"]
    assert counts["heads_stepped"] == seen["steps"] == N_STEPS * geometry.n_head_kv
    if not seen["ties"]:
        assert counts["pages_recalled"] == sum(c.recalled for c in twin.cached) > 0
        assert counts["pages_hit"] == sum(c.hit for c in twin.cached) > 0
    n_page = len(twin.candidates(N_STEPS + geometry.n_prefill + (cache._overlaps)))
    before = len(twin.candidates(geometry.n_prefill + 1))
    assert counts["pages_offloaded"] == (n_page - before) * geometry.n_head_kv


def test_a_budget_that_grows():
    """The chosen pages, and the slots for them, grow with the context."""
    geometry = Geometry(6, 2, 64, 260)
    cache, twin, seen = run_both(geometry, budget=Share(share=0.5), overlap="true")
    first, last = twin.n_best(261), twin.n_best(560)
    assert last >= first + 9 and seen["left out"] == seen["steps"]
    assert cache._cache is not None and cache._cache.pages.stamps.shape[1] == 2 * last


def test_all_threads():
    numba.set_num_threads(numba.config.NUMBA_NUM_THREADS)
    try:
        run_both(Geometry(9, 3, 64, 300), n_steps=60, n_threads=2)
        run_both(Geometry(9, 3, 64, 300), n_steps=60, n_threads=2, overlap="true")
    finally:
        numba.set_num_threads(1)


# --- limiting cases -------------------------------------------------------------------------------


def outputs(geometry: Geometry, n_steps: int = 80, n_threads: int = 1, **options) -> np.ndarray:
    """The outputs of n_steps tokens after a prefill, f32 (n_steps, H, d)."""
    options = {"sinks": 16, "window": 32, "budget": Budget(tokens=144)} | options
    cache, stream = make_cache(geometry, n_threads, **options), Stream(geometry, 3)
    prefill(cache, *stream.prompt(geometry.n_prefill))
    n = geometry.n_prefill
    return np.stack([cache.decode(row_input(*stream.next(), n + i)).copy() for i in range(n_steps)])


PLAIN = Geometry(9, 3, 64, 300)


@pytest.mark.parametrize(
    ("options", "same_as"),
    [
        ({"tau": 1.5}, {"speculate": False}),
        ({"tau": 1.5, "overlap": "true"}, {"speculate": False, "overlap": "true"}),
        ({"tau": -1.0}, {"correct": False}),
        ({"tau": -1.0, "overlap": "true"}, {"correct": False}),
        ({"overlap": "true"}, {"overlap": "false"}),
        ({"cache_pages": 1.0}, {"cache_pages": 8.0}),
        ({"cache_pages": 1.3, "overlap": "true"}, {"cache_pages": 2.0}),
        ({"budget": AllButOne(share=1.0)}, {"budget": AllButOne(share=1.0), "speculate": False}),
    ],
    ids=str,
)
def test_options_that_must_not_matter(options, same_as):
    """To the last bit; the last pair: every page is chosen, whichever query asks."""
    np.testing.assert_array_equal(outputs(PLAIN, **options), outputs(PLAIN, **same_as))


@pytest.mark.parametrize(
    ("options", "other"),
    [
        ({}, {"speculate": False}),
        ({}, {"correct": False}),
        ({"tau": 0.9}, {"tau": 0.7}),
        ({}, {"summaries": "minmax"}),
        ({}, {"page": 8}),
    ],
    ids=str,
)
def test_options_that_must_matter(options, other):
    assert np.abs(outputs(PLAIN, **options) - outputs(PLAIN, **other)).max() > 1e-2


def test_threads_change_nothing():
    numba.set_num_threads(numba.config.NUMBA_NUM_THREADS)
    try:
        for overlap in ("false", "true"):
            one, two = (outputs(PLAIN, n_threads=t, overlap=overlap) for t in (1, 2))
            np.testing.assert_array_equal(one, two)
    finally:
        numba.set_num_threads(1)


def dense_outputs(geometry: Geometry, n_steps: int = 80) -> np.ndarray:
    spec = LayerSpec(
        layer=2, n_layer=4, n_head=geometry.n_head, n_head_kv=geometry.n_head_kv,
        head_dim=geometry.d, value_dim=geometry.d_v or geometry.d, n_threads=1,
    )  # fmt: skip
    cache, stream = build_method("full", {}).layer(spec, ops), Stream(geometry, 3)
    prefill(cache, *stream.prompt(geometry.n_prefill))
    n = geometry.n_prefill
    return np.stack([cache.decode(row_input(*stream.next(), n + i)).copy() for i in range(n_steps)])


@pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
def test_a_budget_of_the_context_changes_no_bit(geometry):
    expected = dense_outputs(geometry)
    for budget in (Budget(share=1.0), Budget(tokens=geometry.n_prefill + 80)):
        np.testing.assert_array_equal(outputs(geometry, budget=budget), expected)


@pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
@pytest.mark.parametrize("overlap", ["false", "true"])
def test_choosing_every_page_equals_dense(geometry, overlap):
    """The sparse path itself: pool, recall and ring hold every row where it belongs."""
    actual = outputs(geometry, budget=AllButOne(share=1.0), overlap=overlap)
    np.testing.assert_allclose(actual, dense_outputs(geometry), atol=1e-5)


def test_from_dense_to_pages_while_decoding():
    """A budget that the context outgrows in decode; the twin starts there, with its last query."""
    geometry, budget = Geometry(6, 2, 64, 100), 144
    stream = Stream(geometry, 0)
    cache = make_cache(geometry, budget=Budget(tokens=budget), sinks=16, window=32)
    q, k, v = stream.prompt(100)
    prefill(cache, q, k, v)
    while cache.n < budget:
        q_row, k_row, v_row = stream.next()
        k, v = (np.concatenate([x, y[:, None]], 1) for x, y in ((k, k_row), (v, v_row)))
        cache.decode(row_input(q_row, k_row, v_row, cache.n))
        assert cache.attended is None and cache.memory().device == 0
    twin = FreeKVTwin(TwinOptions(lambda n: budget, sinks=16, window=32), 6, 2)
    twin.start(q_row, k, v)
    assert follow(cache, twin, stream, 100)["left out"] > 100
    assert cache.memory().device > 0 and cache.store.capacity == 0


# --- the plan of a step ---------------------------------------------------------------------------


def test_plan_of_the_defaults():
    method = FreeKV()
    assert method.plan(512) is None
    assert method.plan(1700) == (4, 24, (1700 - 64) // 16)
    assert build_method("freekv", {"preset": "paper"}).plan(1700) == (2, 12, (1700 - 64) // 32)
    paper = {"preset": "paper", "sinks": "512", "window": "512"}
    assert build_method("freekv", paper, budget="2048").plan(9000) == (16, 32, (9000 - 512) // 32)


@pytest.mark.parametrize("budget", [1, 2, 8, 17, 64, 100, 200])
def test_plan_of_small_budgets(budget):
    """Never less than a page of each kind, and never much more than the budget."""
    method = FreeKV(budget=Budget(tokens=budget))
    for n in range(1, 400):
        plan = method.plan(n)
        if plan is None:
            assert n <= max(budget, 2 * 16 + max(1, budget // 4) - 1)
            continue
        rows = (plan.n_sink + plan.n_best) * 16 + n - plan.window * 16
        assert plan.n_sink >= 1 and plan.n_best >= 1 and n > plan.window * 16
        assert rows <= max(budget, 2 * 16 + max(1, budget // 4)) + 15


def test_the_window_never_moves_back():
    """A share of the context: the window grows with n, but slower."""
    method = FreeKV(budget=Budget(share=0.3), window=500)
    plans = [plan for n in range(1, 4000) if (plan := method.plan(n, 1)) is not None]
    assert len(plans) > 3900
    for before, after in itertools.pairwise(plans):
        assert 0 <= after.window - before.window <= 1 and after.n_best >= before.n_best


# --- two tiers ------------------------------------------------------------------------------------


def test_memory_is_as_the_formula_says():
    geometry, p, n_ring, k = Geometry(8, 2, 80, 600, 48), 16, 3, (144 - 16 - 32) // 16
    cache, stream = make_cache(geometry, budget=Budget(tokens=144), sinks=16, window=32), None
    stream = Stream(geometry, 1)
    cache.reserve(640)
    prefill(cache, *stream.prompt(600))
    memory, unit = cache.memory(), p * 2 * (80 + 48)
    assert cache.store.nbytes == 0
    assert memory.host == (640 // p - 1) * 2 * unit
    assert memory.device == (1 + n_ring + 2 * k) * 2 * unit
    tables = 640 // p * 4 + 2 * k * (4 + 8 + 4) + 8 * (5 + 7)
    assert memory.index == 2 * (640 // p * 2 * 2 * 80 + tables) + 4 * 8 * 80
    before = memory
    for i in range(200):
        cache.decode(row_input(*stream.next(), 600 + i))
    memory = cache.memory()
    assert memory.device == before.device and cache.store.nbytes == 0
    assert (800 - 64) // p * 2 * unit <= memory.host <= 1.3 * 800 // p * 2 * unit


def test_counters_of_a_run():
    cache, twin, seen = run_both(PLAIN, n_steps=100, overlap="true")
    counts, n_best = cache.counters(), twin.n_best(0)
    chosen = counts["pages_hit"] + counts["pages_recalled"]
    n_choices = chosen / n_best
    assert chosen % n_best == 0 and seen["steps"] < n_choices <= seen["steps"] + 3 + (
        seen["corrected"] + 3 * seen["borders"]
    )
    assert counts["pages_recalled"] < 0.5 * chosen
    unit = 16 * 2 * 128
    moved = counts["pages_recalled"] + counts["pages_offloaded"]
    assert counts["bytes_moved"] == moved * unit
    attended = sum(16 + 16 * n_best + n - (n - 32) // 16 * 16 for n in range(301, 401))
    assert counts["sparse_rows_attended"] == counts["rows_attended"] == 9 * attended
    assert counts["sparse_rows_total"] == 9 * sum(range(301, 401))
    least = 2 * sum((n - 32) // 16 for n in range(302, 401)) * 9
    assert least <= counts["sparse_rows_scored"] <= 2.2 * least
    read = 3 * attended * 256 + counts["rows_scored"] // 3 * 128 + counts["bytes_moved"]
    assert counts["bytes_read"] == read


@pytest.mark.parametrize("overlap", ["false", "true"])
def test_a_larger_cache_saves_recalls(overlap):
    recalled = []
    for cache_pages in (1.0, 1.5, 2.0, 4.0):
        cache, _, _ = run_both(PLAIN, n_steps=100, cache_pages=cache_pages, overlap=overlap)
        recalled.append(cache.counters()["pages_recalled"])
    assert recalled == sorted(recalled, reverse=True) and recalled[-1] < 0.7 * recalled[0]


@pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
def test_rows_come_back_bit_for_bit(geometry):
    """Decode, then a second turn: its prefill sees every row as a KVStore would have it."""
    cache = make_cache(geometry, budget=Budget(tokens=100), sinks=16, window=32, overlap="true")
    plain = KVStore(cache.spec)
    stream = Stream(geometry, 5)
    q, k, v = stream.prompt(geometry.n_prefill)
    prefill(cache, q, k, v)
    plain.append(torch.from_numpy(k), torch.from_numpy(v))
    for n_new in (90, 3, 33):
        for _ in range(n_new):
            q, k, v = stream.next()
            cache.decode(row_input(q, k, v, cache.n))
            plain.append(torch.from_numpy(k[:, None]), torch.from_numpy(v[:, None]))
        q, k, v = stream.prompt(n_new)
        out = prefill(cache, q, k, v, cache.n)
        plain.append(torch.from_numpy(k), torch.from_numpy(v))
        assert cache.n == plain.n and cache._cache is not None and cache.store.capacity == 0
        x = AttnInput(*(torch.from_numpy(part) for part in (q, k, v, q, k)), plain.n - n_new)
        expected = ops.dense_prefill(plain, x, cache.spec)
        np.testing.assert_allclose(out.numpy(), expected.numpy(), atol=1e-5)
    cache._leave_pages()
    for mine, theirs in ((cache.store.k, plain.k), (cache.store.v, plain.v)):
        np.testing.assert_array_equal(
            mine[:, : plain.n].view(np.uint16), theirs[:, : plain.n].view(np.uint16)
        )


def test_a_later_turn_starts_again():
    """After a second prefill the cache equals one that was prefilled with everything."""
    stream = Stream(PLAIN, 4)
    options = {"budget": Budget(tokens=144), "sinks": 16, "window": 32}
    used, fresh = make_cache(PLAIN, **options), make_cache(PLAIN, **options)
    q, k, v = stream.prompt(300)
    prefill(used, q, k, v)
    for _ in range(40):
        row = stream.next()
        used.decode(row_input(*row, used.n))
        q, k, v = (np.concatenate([x, y[:, None]], 1) for x, y in zip((q, k, v), row, strict=True))
    turn = stream.prompt(30)
    prefill(used, *turn, used.n)
    q, k, v = (np.concatenate(pair, 1) for pair in zip((q, k, v), turn, strict=True))
    prefill(fresh, q, k, v)
    for _ in range(40):
        row = row_input(*stream.next(), used.n)
        np.testing.assert_array_equal(used.decode(row), fresh.decode(row))


@pytest.mark.parametrize("kept", [339, 320, 301, 250, 120, 40, 1])
def test_decode_after_truncate(kept):
    """The rows stay; the first query chooses for itself, and then all is as ever."""
    options = {"budget": Budget(tokens=144), "sinks": 16, "window": 32, "overlap": "true"}
    stream, cache = Stream(PLAIN, 6), make_cache(PLAIN, **options)
    rows = list(stream.prompt(300))
    prefill(cache, *rows)
    for _ in range(40):
        row = stream.next()
        cache.decode(row_input(*row, cache.n))
        rows = [np.concatenate([x, y[:, None]], 1) for x, y in zip(rows, row, strict=True)]
    assert cache.truncate(400) == 340 and cache._cache is not None, "nothing to forget"
    assert cache.truncate(kept) == kept == cache.n
    twin = FreeKVTwin(TwinOptions(lambda n: 144, sinks=16, window=32), 9, 3)
    twin.start(rows[0][:, kept - 1], *(x[:, :kept] for x in rows[1:]))
    if kept >= 144:
        q, k, v = stream.next()
        twin.previous = q.astype(np.float64)  # so that it does not matter whether it is corrected
        choices = twin.choose(q, k, v)
        out = cache.decode(row_input(q, k, v, kept))
        assert cache.attended is not None
        for g, choice in enumerate(choices):
            reconcile(twin, choice, cache.attended[0][g, : cache.attended[1][g]])
        np.testing.assert_allclose(out[:, :64], twin.finish(choices), atol=2e-4)
        twin.taken = [(0, 0, 0)] * 3
        assert follow(cache, twin, stream, 60)["left out"] == 180
    else:
        for _ in range(60):
            assert np.isfinite(cache.decode(row_input(*stream.next(), cache.n))).all()


# --- the thread that works ahead ------------------------------------------------------------------


def threads_ahead() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("freekv")]


def test_the_thread_ends_with_its_method():
    gc.collect()
    before = set(threads_ahead())
    method = FreeKV(budget=Budget(tokens=144), sinks=16, window=32, overlap="true")
    stream = Stream(PLAIN, 0)
    prompt = stream.prompt(300)
    for _ in range(3):  # three sequences, as after session.reset()
        caches = [method.layer(replace(make_cache(PLAIN).spec, layer=i), ops) for i in (1, 2, 3)]
        for cache in caches:
            prefill(cache, *prompt)
        for i in range(5):
            row = row_input(*stream.next(), 300 + i)
            for cache in caches:
                cache.decode(row)
    started = set(threads_ahead()) - before
    assert len(started) == 1, "one thread for all layers and sequences"
    del method, caches, cache
    gc.collect()
    for thread in started:
        thread.join(timeout=10)
        assert not thread.is_alive()


def test_overlap_auto_wants_a_core_for_itself(monkeypatch):
    monkeypatch.setattr("sparsekv_cli.methods.freekv.physical_cores", lambda: 4)
    assert FreeKV().overlaps(3) and not FreeKV().overlaps(4)
    assert FreeKV(overlap="true").overlaps(8) and not FreeKV(overlap="false").overlaps(1)
    assert not FreeKV(overlap="true", speculate=False).overlaps(1)
    assert not FreeKV(overlap="true", tau=1.01).overlaps(1), "every choice would be made twice"


def test_a_failure_ahead_is_raised_and_loses_nothing(monkeypatch):
    """The step that finds it can be taken again; a page that was leaving the window then leaves."""
    options = {"budget": Budget(tokens=144), "sinks": 16, "window": 32}
    cache, other = make_cache(PLAIN, overlap="true", **options), make_cache(PLAIN, **options)
    stream = Stream(PLAIN, 0)
    prompt = stream.prompt(300)
    for each in (cache, other):
        prefill(each, *prompt)

    def fail(*arguments):
        raise MemoryError("no memory")

    for n in range(300, 360):
        row = row_input(*stream.next(), n)
        with monkeypatch.context() as patch:
            patch.setattr("sparsekv_cli.cpu.recall.recall_ahead", fail)
            out = cache.decode(row).copy()
        np.testing.assert_array_equal(out, other.decode(row))
        with pytest.raises(MemoryError, match="no memory"):
            cache.decode(row)
        assert cache.n == n + 1


# --- sessions -------------------------------------------------------------------------------------

CHUNK = 16


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(
        tmp_path_factory.mktemp("model") / "model.gguf",
        n_layer=3, n_head=6, n_head_kv=2, head_dim=64, n_embd=128, n_ff=128, attention_gain=4.0,
    )  # fmt: skip


@pytest.fixture
def session_of(model):
    opened: list[Session] = []

    def open_session(name: str = "freekv", **options: str) -> Session:
        given = {} if name == "full" else {"budget": "48", "dense_layers": "none"} | options
        config = SessionConfig(threads=1, prefill_dtype="f32", chunk=CHUNK)
        opened.append(load_session(model, build_method(name, given), config))
        return opened[-1]

    yield open_session
    for session in opened:
        session.gguf.close()


def tokens(n: int, seed: int = 0) -> list[int]:
    return np.random.RandomState(seed).randint(3, 512, n).tolist()


def decode(session: Session, ids) -> np.ndarray:
    return np.stack([session.decode(token) for token in ids])


def test_a_session_of_all_rows_equals_full(session_of):
    full, sparse = session_of("full"), session_of(budget="100%")
    for session in (full, sparse):
        session.prefill(tokens(100))
    np.testing.assert_array_equal(decode(full, tokens(60, 1)), decode(sparse, tokens(60, 1)))


@pytest.mark.parametrize("overlap", ["false", "true"])
def test_a_rewound_session_equals_a_fresh_one(overlap, session_of):
    prompt, question, answer = tokens(8 * CHUNK), tokens(7, 1), tokens(40, 2)
    used = session_of(overlap=overlap)
    for keep in (8 * CHUNK, 5 * CHUNK, 2 * CHUNK, 0):
        fresh = session_of(overlap=overlap)
        if keep:
            fresh.prefill(prompt[:keep])
        used.rewind(0)
        used.prefill(prompt)
        decode(used, tokens(30, 3))
        used.rewind(keep)
        assert used.tokens == prompt[:keep] and {cache.n for cache in used.caches} == {keep}
        np.testing.assert_array_equal(used.prefill(question), fresh.prefill(question))
        np.testing.assert_array_equal(decode(used, answer), decode(fresh, answer))


@pytest.mark.parametrize("calls", range(1, 7))
def test_an_interrupted_prefill_adds_nothing(calls, session_of):
    """Progress is reported after each chunk of each layer: 2 chunks, 3 layers."""

    def interrupt(done: int, total: int) -> None:
        nonlocal left
        left -= 1
        if left == 0:
            raise KeyboardInterrupt

    prompt, question, answer = tokens(8 * CHUNK), tokens(7, 1), tokens(40, 2)
    session, other = session_of(overlap="true"), session_of()
    for each in (session, other):
        each.prefill(prompt)
        decode(each, answer)
    left, before = calls, list(session.tokens)
    with pytest.raises(KeyboardInterrupt):
        session.prefill(tokens(2 * CHUNK, 5), interrupt)
    assert left == 0 and session.tokens == before
    assert {cache.n for cache in session.caches} == {len(before)}
    np.testing.assert_array_equal(session.prefill(question), other.prefill(question))
    np.testing.assert_array_equal(decode(session, answer), decode(other, answer))


@pytest.mark.parametrize("before_or_after", ["before", "after"])
def test_an_interrupted_step_can_be_taken_again(before_or_after, session_of, monkeypatch):
    """Some layers have the row already when it strikes, or this layer has computed it as well."""
    session, other = session_of(overlap="true"), session_of()
    for each in (session, other):
        each.prefill(tokens(8 * CHUNK))
        decode(each, tokens(20, 1))
    last = session.caches[-1]
    step = last.decode

    def interrupt(x):
        if before_or_after == "after":
            step(x)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(last, "decode", interrupt)
        session.decode(5)
    assert session.tokens == other.tokens
    assert {cache.n for cache in session.caches} == {len(other.tokens)}
    assert np.isfinite(decode(session, tokens(20, 2))).all()
    session.rewind(len(other.tokens))
    question, answer = tokens(7, 3), tokens(20, 4)
    np.testing.assert_array_equal(session.prefill(question), other.prefill(question))
    np.testing.assert_array_equal(decode(session, answer), decode(other, answer))


@pytest.mark.parametrize("budget", ["1", "2", "8", "5%", "30%"])
@pytest.mark.parametrize("n_prompt", [1, 5, 17, 40, 70])
def test_short_contexts_and_small_budgets(budget, n_prompt, session_of):
    session = session_of(budget=budget, overlap="true")
    session.prefill(tokens(n_prompt))
    assert np.isfinite(decode(session, tokens(80, 1))).all()
    counts = session.ledger.as_dict()
    assert 0 < counts["sparse_rows_attended"] < counts["sparse_rows_total"]


def test_generation_as_long_as_the_prompt(session_of):
    produced = []
    for overlap in ("false", "true"):
        session = session_of(overlap=overlap)
        ids = session.generate(tokens(200), lambda logits, _: int(np.argmax(logits)), 200)
        produced.append(list(ids))
        assert {cache.n for cache in session.caches} == {399}
        assert session.ledger.as_dict()["heads_stepped"] == 199 * 3 * 2
    assert produced[0] == produced[1] and len(produced[0]) == 200


# --- options --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"page": "0"}, "page = 0: must be 1 or more"),
        ({"sinks": "-1"}, "sinks = -1: must be 0 or more"),
        ({"window": "0"}, "window = 0: must be 1 or more"),
        ({"cache_pages": "0.9"}, "cache_pages = 0.9: must be 1 or more"),
        ({"cache_pages": "nan"}, "cache_pages = nan: must be 1 or more"),
        ({"tau": "nan"}, "tau = nan: must be finite"),
        ({"overlap": "maybe"}, "overlap = 'maybe': must be auto or true or false"),
        ({"summaries": "mean"}, "summaries = 'mean': must be meanstd or minmax"),
        ({"preset": "best"}, "preset = 'best'"),
    ],
    ids=str,
)
def test_wrong_options_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        build_method("freekv", options)


def test_presets():
    tuned, paper = (build_method("freekv", {"preset": name}) for name in ("tuned", "paper"))
    assert tuned == FreeKV() and tuned.dense_layers == paper.dense_layers == (0,)
    assert paper == FreeKV(preset="paper", page=32, summaries="minmax")
    assert str(tuned.options()["budget"]) == "512"
