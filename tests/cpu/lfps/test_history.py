"""The parts of LFPS' kernels against plain numpy, above all at the borders of 64 entries."""

import numpy as np
import pytest
from stored_rows import KINDS, layout, store

from sparsekv_cli.cpu.attention.decode import attend_dense_ref
from sparsekv_cli.cpu.attention.rows import F16
from sparsekv_cli.cpu.lfps import history, state
from sparsekv_cli.cpu.lfps.bypass import Constants
from sparsekv_cli.cpu.lfps.history import BLOCK, SINKS, Tables
from sparsekv_cli.cpu.lfps.start import lfps_init
from sparsekv_cli.cpu.lfps.step import LFPSPlan, LFPSStep

SIZES = [5, 63, 64, 65, 127, 128, 129, 200]


def sums_of(table: np.ndarray) -> np.ndarray:
    return np.array([(table.astype(np.float64) ** power).sum() for power in (1, 2, 3, 4)])


def bits(words: np.ndarray) -> set[int]:
    return {64 * w + b for w, word in enumerate(words) for b in range(64) if int(word) >> b & 1}


def words_of(rows, n: int) -> np.ndarray:
    words = np.zeros((n + BLOCK - 1) // BLOCK + 1, np.uint64)
    for i in rows:
        words[i // 64] |= np.uint64(1 << (i % 64))
    return words


def bounds_of(table: np.ndarray, slack: float = 0.0) -> np.ndarray:
    n_blocks = -(-len(table) // BLOCK)
    parts = (table[BLOCK * b : BLOCK * (b + 1)].max() + slack for b in range(n_blocks))
    return np.array(list(parts), np.float32)


@pytest.mark.parametrize("horizon", [1, 300, 5000])
@pytest.mark.parametrize("n", [2, 10, 1000])
def test_threshold(n, horizon):
    table = np.random.default_rng(n).standard_exponential(n)
    centred = table - table.mean()
    kappa = np.clip((centred**4).sum() / (centred**2).sum() ** 2, 1 / n, 1)
    expected = 0.3 * table.sum() / min(n, horizon) / kappa
    assert history.threshold(sums_of(table), n, 0.3, horizon) == pytest.approx(expected, rel=1e-9)


def test_a_longer_context_does_not_lower_the_threshold_of_the_same_entries():
    table = np.zeros(40000)
    table[:9] = [4, 2, 1, 1, 0.5, 0.5, 0.5, 0.3, 0.2]
    near, far = (history.threshold(sums_of(table[:n]), n, 0.3, 8192) for n in (8192, 40000))
    assert far == pytest.approx(near, rel=0.01)


def test_threshold_of_a_flat_table_and_of_one_peak():
    flat, peak = np.full(50, 0.2), np.zeros(50)
    peak[7] = 10
    assert history.threshold(sums_of(flat), 50, 0.5, 50) == pytest.approx(0.5 * 0.2 * 50)
    centred = peak - 0.2
    kappa = (centred**4).sum() / (centred**2).sum() ** 2
    assert history.threshold(sums_of(peak), 50, 0.5, 50) == pytest.approx(0.5 * 0.2 / kappa)


@pytest.mark.parametrize("slack", [0.0, 0.5])
@pytest.mark.parametrize("n", SIZES)
def test_marks_are_the_entries_above_the_threshold(n, slack):
    """Loose bounds cost time only, and are exact after a scan."""
    rng = np.random.default_rng(n)
    table = rng.random(n + 100).astype(np.float32)
    table[n:] = 9  # beyond the context: not looked at
    bounds = bounds_of(table[:n], slack)
    words = words_of((), n)
    history.mark_vertical(table, bounds, n, 0.8, words)
    assert bits(words) == set(np.flatnonzero(table[:n] > 0.8).tolist())
    scanned = bounds_of(table[:n], slack) > 0.8
    np.testing.assert_array_equal(bounds[scanned], bounds_of(table[:n])[scanned])

    count = n - SINKS
    bounds = bounds_of(table[:count], slack)
    words = words_of((), n)
    history.mark_slash(table, bounds, n, 0.8, words)
    assert bits(words) == {n - 1 - int(i) for i in np.flatnonzero(table[:count] > 0.8)}
    assert min(bits(words), default=SINKS) >= SINKS


def test_blocks_below_the_threshold_are_not_read():
    table = np.zeros(640, np.float32)
    table[130] = 1
    words = words_of((), 640)
    assert history.mark_vertical(table, bounds_of(table), 640, 0.5, words) == 64
    assert bits(words) == {130}


@pytest.mark.parametrize("n", SIZES)
def test_expansion_crosses_words(n):
    rng = np.random.default_rng(n)
    chosen = set(np.flatnonzero(rng.random(n) < 0.08).tolist()) | {n - 1, min(63, n - 1)}
    words = words_of(chosen, n)
    n_words = (n + 63) // 64
    wide = np.full(n_words, 7, np.uint64)
    history.expand(words, wide, n_words)
    expected = {i + step for i in chosen for step in (-1, 0, 1, 2)}
    assert {i for i in bits(wide) if i < n} == {i for i in expected if 0 <= i < n}
    rows = np.full(n + history.AT_ONCE, -1, np.int32)
    count = history.count_rows(wide, n_words, n)
    history.extract_rows(wide, n_words, rows)
    np.testing.assert_array_equal(rows[:count], sorted(i for i in expected if SINKS <= i < n))


@pytest.mark.parametrize("n", SIZES)
def test_filtered_expansion_keeps_neighbours_above_the_mean(n):
    rng = np.random.default_rng(n)
    ver, dist = (rng.random(n).astype(np.float32) for _ in range(2))
    chosen = set(np.flatnonzero(rng.random(n) < 0.1).tolist())
    words = words_of(chosen, n)
    n_words = (n + 63) // 64
    wide = np.empty(n_words, np.uint64)
    history.expand(words, wide, n_words)
    history.filter_expansion(wide, words, n_words, ver, dist, n, 0.6, 0.7)
    expected = set(chosen)
    for i in {i + step for i in chosen for step in (-1, 1, 2)} & set(range(n)):
        if ver[i] > 0.6 or dist[n - 1 - i] > 0.7:
            expected.add(i)
    assert bits(wide) == expected


def test_adding_keeps_sums_and_bounds():
    rng = np.random.default_rng(0)
    n, unit = 200, 1
    arrays = rng.random((2, 2, n)).astype(np.float32)  # table, unit
    bounds = np.stack([[bounds_of(array) for array in table] for table in arrays])
    sums = np.stack([[sums_of(array) for array in units] for units in arrays.swapaxes(0, 1)])
    tables = history.Tables(*arrays, *bounds, sums, np.ones(2))
    values = np.zeros((n, 16), np.float16)
    expected = arrays.copy()
    for _ in range(10):
        rows = rng.permutation(n)[: rng.integers(1, 100)].astype(np.int32)
        weights = rng.normal(0, 10, len(rows)).astype(np.float32)
        at = values.ctypes.data
        history.add_entries(
            unit, tables, n, rows, weights, 0.25, 1.5, at, values.strides[0],
            np.empty((4, len(rows)), np.float32),
        )  # fmt: skip
        added = np.float32(1.5) * (weights - np.float32(0.25))
        expected[0, unit, rows] += added
        expected[1, unit, n - 1 - rows] += added
    np.testing.assert_allclose(arrays, expected, atol=1e-5)
    np.testing.assert_array_equal(arrays[:, 0], expected[:, 0])
    for i in range(2):
        np.testing.assert_allclose(sums[unit, i], sums_of(arrays[i, unit]), rtol=1e-9)
        assert (bounds[i, unit] >= bounds_of(arrays[i, unit])).all()


def test_rescaling_multiplies_the_gain_out():
    rng = np.random.default_rng(0)
    table = rng.normal(0, 1e6, 200).astype(np.float32)
    expected = table.copy()
    expected[:150] *= np.float32(1e-6)
    bounds, sums = np.full(4, 7, np.float32), np.full(4, 3.0)
    history.rescale(table, bounds, sums, 1e-6, 150)
    np.testing.assert_array_equal(table, expected)
    np.testing.assert_allclose(sums, sums_of(table[:150]), rtol=1e-12)
    np.testing.assert_array_equal(bounds[:3], bounds_of(table[:150]))


class Layer:
    """Arguments of an LFPSStep for random keys: every entry of the tables is above tau."""

    def __init__(
        self, n_head: int, n_head_kv: int, d: int, n: int, kinds=(F16, F16), by_group: bool = False,
        softcap: float = 0.0, sinks: float = -np.inf,
    ) -> None:  # fmt: skip
        self.by_group, self.softcap = by_group, softcap
        self.sinks = np.full(n_head, sinks, np.float32)
        rng = np.random.default_rng(n)
        self.q = (2 * rng.standard_normal((n_head, d))).astype(np.float32)
        self.stored = [store(rng.standard_normal((n_head_kv, n + 9, d)), kind) for kind in kinds]
        self.k, self.v = (rows.exact for rows in self.stored)
        self.n, self.n_kv, self.scale = n, n_head_kv, np.float32(d**-0.5)
        blocks = -(-(n + 40) // BLOCK)
        widths = (n + 40, n + 40, blocks, blocks)
        arrays = [np.zeros((n_head, width), np.float32) for width in widths]
        self.tables = Tables(*arrays, np.zeros((n_head, 2, 4)), np.ones(n_head))
        self.raised = np.ones(n_head)
        self.statistics = np.zeros((n_head, state.N_STATISTICS), np.int64)
        self.attended = np.zeros((n_head, n + 1), np.int32)
        self.counts = np.zeros(n_head, np.int64)
        self.out = np.empty_like(self.q)

    def init(self, q: np.ndarray, decay: float = 0.95, every: int = 1) -> None:
        """q f32 (H, s, d)."""
        rules = self.rules(0.2, 1.0, decay)
        lfps_init(q, every, layout(*self.stored), self.n, rules, self.tables, 2)

    def rules(self, a: float, epsilon: float, decay: float = 0.95) -> state.Rules:
        return state.Rules(
            float(self.scale), self.n_kv, 32, a, 1 << 62, decay, epsilon, False, self.by_group,
            self.softcap,
        )  # fmt: skip

    def step(self, k_budget: int, a: float, epsilon: float = 1.0, limit: int | None = None) -> None:
        n_head, d = self.q.shape
        means = [np.zeros((self.n_kv, d), np.float32) for _ in range(2)]
        none = np.zeros((self.n_kv, 0, 0), np.float32)
        constants = Constants(*means, none, np.zeros(n_head, np.float32))
        # The row is stored already.
        k, v = (np.ascontiguousarray(rows[:, self.n - 1, None]) for rows in (self.k, self.v))
        rules = self.rules(a, epsilon)
        step = LFPSStep(rules, constants, self.sinks, self.raised, self.statistics, self.tables, 2)
        plan = LFPSPlan(self.n, k_budget, limit or self.n, 0, self.by_group, a)
        rows, attended = (self.q[:, None], k, v), (self.attended, self.counts)
        step.run(plan, layout(*self.stored), rows, self.out, attended, None)


@pytest.mark.parametrize(("n_head", "n_kv", "d"), [(3, 3, 64), (9, 3, 64), (8, 1, 80), (4, 2, 128)])
@pytest.mark.parametrize("n", [64, 65, 100, 700])
@pytest.mark.parametrize("by_group", [False, True])
@pytest.mark.parametrize(("kinds", "softcap", "sinks"), [
    *((kinds, 0.0, -np.inf) for kinds in KINDS), (KINDS[0], 4.0, 5.0), (KINDS[0], 4.0, 200.0),
])  # fmt: skip
def test_all_candidates_equal_dense_attention(
    n_head, n_kv, d, n, by_group, kinds, softcap, sinks
):  # fmt: skip
    layer = Layer(n_head, n_kv, d, n, kinds, by_group, softcap, sinks)
    layer.init(np.repeat(layer.q[:, None], 5, axis=1))
    layer.step(k_budget=n - SINKS, a=-1e9)  # a threshold far below zero
    expected = attend_dense_ref(
        layer.q, layer.k[:, :n], layer.v[:, :n], layer.scale, softcap, layer.sinks
    )
    np.testing.assert_allclose(layer.out, expected, atol=1e-5)
    np.testing.assert_array_equal(layer.counts, n)
    rows = np.sort(layer.attended[:, :n], axis=1)
    np.testing.assert_array_equal(rows, np.tile(np.arange(n), (n_head, 1)))
    scored = layer.statistics[:, state.SCORED].sum()
    assert scored == layer.statistics[:, state.ATTENDED].sum() == n_head * n


@pytest.mark.parametrize("limit", [64, 150, 300])
@pytest.mark.parametrize("by_group", [False, True])
def test_no_more_candidates_than_the_limit(limit, by_group):
    layer, free = (Layer(6, 2, 64, 700, by_group=by_group) for _ in range(2))
    for each in (layer, free):
        each.init(np.repeat(each.q[:, None], 5, axis=1))
    free.step(k_budget=40, a=0.01)
    assert (free.statistics[:, state.SCORED] > limit + SINKS).all()
    layer.step(k_budget=40, a=0.01, limit=limit)
    assert (layer.statistics[:, state.SCORED] <= limit + SINKS).all()
    assert (layer.raised > 1).all() and (free.raised == 1).all()
    np.testing.assert_array_equal(layer.counts, 40 + SINKS)
    for _ in range(40):
        layer.step(k_budget=40, a=1e9, limit=limit)
    assert (layer.raised == 1).all()  # comes down again when few rows pass


@pytest.mark.parametrize("s", [1, 32, 90])
def test_init_sums_to_ten(s):
    layer = Layer(6, 2, 64, 150)
    layer.init(np.repeat(layer.q[:, None], s, axis=1))
    for which, table in enumerate(layer.tables[:2]):
        np.testing.assert_allclose(table.sum(1), 10, rtol=1e-5)
        np.testing.assert_allclose(layer.tables.sums[:, which, 0], 10, rtol=1e-5)
        assert (table >= 0).all() and not table[:, 150:].any()
        assert not table[:, :SINKS].any() or which == 1
    assert not layer.tables[1][:, 150 - SINKS :].any()  # no distance reaches a sink


@pytest.mark.parametrize(("s", "every"), [(32, 1), (8, 4), (12, 4), (5, 40)])
def test_init_takes_queries_of_rows_at_a_distance(s, every):
    """Those whose rows would lie before the text add nothing."""
    layer = Layer(6, 2, 64, 150)
    q = np.random.default_rng(s).standard_normal((6, s, 64)).astype(np.float32)
    layer.init(q, every=every)
    ver, dist = np.zeros((2, 6, 190))
    for h, t in np.ndindex(6, s):
        rows = np.arange(SINKS, 150 - (s - 1 - t) * every)
        weights = np.exp(layer.scale * layer.k[h // 3, rows].astype(np.float64) @ q[h, t])
        ver[h, rows] += weights / weights.sum() * 10 / s
        dist[h, rows[::-1] - SINKS] += weights / weights.sum() * 10 / s
    np.testing.assert_allclose(layer.tables.ver, ver, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(layer.tables.dist, dist, rtol=1e-4, atol=1e-6)


def test_huge_scores_stay_finite():
    layer = Layer(4, 2, 64, 200)
    layer.stored[0].array[:, 100] = 500
    layer.stored[0].array[:, 0] = -500
    layer.init(np.repeat(layer.q[:, None], 8, axis=1))
    for epsilon in (1.0, 0.5):
        layer.step(k_budget=30, a=0.2, epsilon=epsilon)
        assert np.isfinite(layer.out).all()
        assert all(np.isfinite(table).all() for table in layer.tables[:2])
        assert np.isfinite(layer.tables.sums).all()
