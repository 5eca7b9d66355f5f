"""H2O against a literal twin: sums, what is dropped, decode, further turns; memory, the ledger."""

from __future__ import annotations

import numpy as np
import pytest
from layer_stream import (
    GEOMETRIES,
    Geometry,
    Stream,
    attended_rows,
    decode,
    make_cache,
    prefill,
    softmax,
)
from sweeps import sweep

from sparsekv_cli.cache.spec import N_SINKS, Budget
from sparsekv_cli.methods import build_method
from sparsekv_cli.methods.h2o import H2O

TIE = 1e-5  # sums in f32 against f64, relative


class H2OTwin:
    """A dict from position to [key, value, attention received] a kv head."""

    def __init__(self, method: H2O, geometry: Geometry) -> None:
        self.method, self.geometry, self.n = method, geometry, 0
        self.group = geometry.n_head // geometry.n_head_kv
        self.held: list[dict] = [{} for _ in range(geometry.n_head_kv)]

    def add(self, rows, i: int) -> None:
        for kv, held in enumerate(self.held):
            held[self.n] = [*(x[kv, i].astype(float) for x in rows[1:]), 0.0]
        self.n += 1

    def step(self, q: np.ndarray, counts: bool) -> np.ndarray:
        """Attention of q (H, d) over all held rows; they collect it if it counts."""
        out = []
        for h, query in enumerate(q):
            rows = list(self.held[h // self.group].values())
            keys, values = (np.stack([row[i] for row in rows]) for i in (0, 1))
            weights = softmax(keys @ query.astype(float) / np.sqrt(len(query)))
            out.append(weights @ values)
            for row, weight in zip(rows, weights, strict=True):
                row[2] += weight * counts
        return np.stack(out)

    def prefill(self, rows) -> np.ndarray:
        n_row, window = rows[0].shape[1], self.method.window
        outs = []
        for i in range(n_row):
            self.add(rows, i)
            outs.append(self.step(rows[0][:, i], not window or i >= n_row - window))
        return np.stack(outs, axis=1)

    def drop(self, actual: list[list[int]]) -> tuple[int, int]:
        """Drops rows until the limit is met; the cache's choice decides a tie. (dropped, ties)"""
        budget = self.method.budget.rows(self.n + 1)
        n_recent = max(1, budget // 2)
        dropped, ties = 0, 0
        for held, got in zip(self.held, actual, strict=True):
            assert len(got) == len(set(got))
            while len(held) > N_SINKS + budget - 1:
                free = [p for p in held if N_SINKS <= p < self.n + 1 - n_recent]
                least = min(free, key=lambda p, held=held: (held[p][2], p))
                if least in got:
                    limit = held[least][2] * (1 + TIE)
                    least = next(p for p in free if p not in got and held[p][2] <= limit)
                    ties += 1
                del held[least]
                dropped += 1
            assert set(got) == set(held)
        return dropped, ties


def compare_sums(cache, twin: H2OTwin) -> None:
    n = cache.store.n
    for kv, held in enumerate(twin.held):
        expected = [held[p][2] for p in cache.positions()[kv].tolist()]
        np.testing.assert_allclose(cache._mass[kv, :n], expected, rtol=2e-5, atol=1e-6)
        for i, rows in enumerate((cache.store.k, cache.store.v)):
            stored = [held[p][i] for p in cache.positions()[kv].tolist()]
            np.testing.assert_array_equal(rows[kv, :n, : twin.geometry.d], stored)


def prefill_both(cache, twin: H2OTwin, rows) -> tuple[int, int]:
    out = prefill(cache, rows)
    np.testing.assert_allclose(out, twin.prefill(rows), atol=1e-4)
    result = twin.drop(cache.positions().tolist())
    compare_sums(cache, twin)
    assert cache.n == twin.n
    return result


def follow(cache, twin: H2OTwin, stream: Stream, n_steps: int) -> tuple[int, int]:
    dropped, ties = 0, 0
    for _ in range(n_steps):
        row = stream.rows(1)
        out = decode(cache, row)
        twin.add(row, 0)
        if twin.n > len(twin.held[0]):
            assert [sorted(rows) for rows in attended_rows(cache)] == [
                sorted(held) for held in twin.held
            ]
        np.testing.assert_allclose(out, twin.step(row[0][:, 0], True), atol=1e-4)
        now = twin.drop(cache.positions().tolist())
        dropped, ties = dropped + now[0], ties + now[1]
    compare_sums(cache, twin)
    return dropped, ties


def start(geometry: Geometry, n_threads: int = 1, **options):
    method = H2O(**({"budget": Budget(tokens=40)} | options))
    cache = make_cache(method, geometry, n_threads)
    return cache, H2OTwin(method, geometry), Stream(geometry)


@pytest.mark.parametrize("geometry", sweep(GEOMETRIES, fast=1), ids=str)
@pytest.mark.parametrize("options", [{}, {"window": 16}], ids=str)
def test_h2o_equals_its_twin(geometry, options):
    """A prompt, a generation longer than it, and two more turns."""
    cache, twin, stream = start(geometry, **options)
    n_kv = geometry.n_head_kv
    assert prefill_both(cache, twin, stream.rows(250))[0] == n_kv * (250 - 43)
    dropped, ties = follow(cache, twin, stream, 300)
    assert dropped == n_kv * 300 and ties <= 3
    for n_new in (1, 90):
        prefill_both(cache, twin, stream.rows(n_new))
        assert follow(cache, twin, stream, 30)[0] == n_kv * 30
    assert cache.store.n == 43


@pytest.mark.parametrize("n_prompt", [1, 5, 42, 43, 44, 45])
@pytest.mark.parametrize("n_threads", [1, 2])
def test_around_the_first_row_that_is_too_many(n_prompt, n_threads):
    cache, twin, stream = start(Geometry(6, 2, 64), n_threads)
    prefill_both(cache, twin, stream.rows(n_prompt))
    follow(cache, twin, stream, 60)
    assert cache.store.n == 43 and cache.n == n_prompt + 60


@pytest.mark.parametrize("budget", [1, 2, 3])
def test_tiny_budgets(budget):
    cache, twin, stream = start(Geometry(6, 2, 64), budget=Budget(tokens=budget))
    prefill_both(cache, twin, stream.rows(9))
    follow(cache, twin, stream, 20)
    assert all(len(rows) == budget + N_SINKS for rows in attended_rows(cache))


def test_a_share_grows_with_the_sequence():
    cache, twin, stream = start(Geometry(6, 2, 64), budget=Budget(share=0.2))
    prefill_both(cache, twin, stream.rows(100))
    assert cache.store.n == 20 + N_SINKS - 1
    follow(cache, twin, stream, 100)
    assert cache.store.n == 40 + N_SINKS - 1


def test_memory_is_that_of_the_budget():
    cache, _, stream = start(Geometry(6, 2, 64))
    cache.reserve(3000)
    prefill(cache, stream.rows(2000))
    row_bytes = 2 * 2 * 64 * 2
    assert cache.memory().host == 44 * row_bytes
    for _ in range(300):
        decode(cache, stream.rows(1))
        # And a copy of what there was after the prompt, so that the sequence can go back to it.
        assert cache.memory().host == 2 * 44 * row_bytes
        assert cache.memory().index <= 2 * 2 * 44 * 8
    counts = cache.counters()
    assert counts["rows_dropped"] == 2 * (2300 - 43)
    assert counts["rows_total"] == 6 * sum(range(2001, 2301))
    assert counts["rows_attended"] == counts["rows_scored"] == 6 * 300 * 44
    assert counts["bytes_read"] == 300 * 44 * (row_bytes + row_bytes // 2)


def test_only_a_prefill_that_is_not_finished_can_be_cut():
    cache, twin, stream = start(Geometry(6, 2, 64))
    prefill_both(cache, twin, stream.rows(150))
    follow(cache, twin, stream, 20)
    finish, cache.finish_prefill = cache.finish_prefill, lambda: None
    prefill(cache, stream.rows(100))
    assert cache.n == 270 and cache.truncate(170) == 170 == cache.n
    cache.finish_prefill = finish
    follow(cache, twin, stream, 20)
    prefill_both(cache, twin, stream.rows(30))
    assert cache.truncate(219) == 0 and cache.truncate(220) == 220


@pytest.mark.parametrize("value", ["-1", "x"])
def test_options_are_checked(value):
    with pytest.raises(ValueError, match=r"window = .*: must be"):
        build_method("h2o", {"window": value})
