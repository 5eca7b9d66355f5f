"""SnapKV against a literal twin: what is kept, decode, further turns; memory, the ledger."""

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
from sparsekv_cli.cpu.attention.decode import attend_dense_ref
from sparsekv_cli.methods import build_method
from sparsekv_cli.methods.snapkv import N_ROOM, SnapKV

TIE = 1e-5  # scores in f32 against f64, which are of the size of 1


class SnapKVTwin:
    """A list of (position, key, value) a kv head."""

    def __init__(self, method: SnapKV, geometry: Geometry) -> None:
        self.method, self.geometry, self.n = method, geometry, 0
        self.held: list[list] = [[] for _ in range(geometry.n_head_kv)]

    def add(self, rows) -> None:
        for kv, held in enumerate(self.held):
            for i in range(rows[1].shape[1]):
                held.append(
                    (self.n + i, rows[1][kv, i].astype(float), rows[2][kv, i].astype(float))
                )
        self.n += rows[1].shape[1]

    def attend(self, q: np.ndarray, kv: int, n_visible: int | None = None) -> np.ndarray:
        keys = np.stack([key for _, key, _ in self.held[kv][:n_visible]])
        return softmax(keys @ q.astype(float) / np.sqrt(len(q)))

    def finish(self, q: np.ndarray) -> list[tuple[list[int], np.ndarray]] | None:
        """After a prefill of queries q (H, T, d): what every kv head keeps.

        (slots, scores of the prefix); None: everything.
        """
        method, group = self.method, self.geometry.n_head // self.geometry.n_head_kv
        n = len(self.held[0])
        budget = method.budget.rows(self.n)
        if N_SINKS + budget + method.window >= n:
            return None
        choices = []
        for kv in range(len(self.held)):
            received = np.zeros(n)
            for h in range(kv * group, (kv + 1) * group):
                for i in range(1, min(method.window, q.shape[1]) + 1):
                    visible = n - i + 1
                    received[:visible] += self.attend(q[h, -i], kv, visible)
            n_prefix, half = n - method.window, method.kernel // 2
            prefix = received[:n_prefix]
            pooled = np.array(
                [prefix[max(0, j - half) : j + half + 1].max() for j in range(n_prefix)]
            )
            best = sorted(range(N_SINKS, n_prefix), key=lambda j, p=pooled: (-p[j], j))[:budget]
            slots = [*range(N_SINKS), *sorted(best), *range(n_prefix, n)]
            choices.append((slots, pooled))
        return choices

    def keep(self, kv: int, positions: list[int]) -> None:
        chosen = set(positions)
        self.held[kv] = [row for row in self.held[kv] if row[0] in chosen]

    def decode(self, q: np.ndarray) -> np.ndarray:
        group = self.geometry.n_head // self.geometry.n_head_kv
        out = []
        for h in range(len(q)):
            weights = self.attend(q[h], h // group)
            out.append(weights @ np.stack([value for _, _, value in self.held[h // group]]))
        return np.stack(out)


def prefill_both(cache, twin: SnapKVTwin, rows) -> bool:
    """Whether rows were dropped. A tie between pooled scores may be decided either way."""
    prefill(cache, rows)
    twin.add(rows)
    choices = twin.finish(rows[0])
    positions = cache.positions()
    if choices is not None:
        for kv, (slots, pooled) in enumerate(choices):
            expected = [twin.held[kv][slot][0] for slot in slots]
            got = positions[kv].tolist()
            assert got == sorted(set(got)) and len(got) == len(expected)
            slot_of = {row[0]: slot for slot, row in enumerate(twin.held[kv])}
            cut = min(pooled[slot] for slot in slots[N_SINKS : -twin.method.window])
            for position in set(expected) ^ set(got):
                assert slot_of[position] >= N_SINKS
                assert abs(pooled[slot_of[position]] - cut) < TIE * (1 + cut)
            twin.keep(kv, got)
    for kv, held in enumerate(twin.held):
        assert positions[kv].tolist() == [row[0] for row in held]
    assert cache.n == twin.n and cache.store.n == len(twin.held[0])
    return choices is not None


def follow(cache, twin: SnapKVTwin, stream: Stream, n_steps: int) -> None:
    for _ in range(n_steps):
        row = stream.rows(1)
        out = decode(cache, row)
        twin.add(row)
        np.testing.assert_allclose(out, twin.decode(row[0][:, 0]), atol=1e-4)
        if twin.n > len(twin.held[0]):
            assert attended_rows(cache) == [[r[0] for r in held] for held in twin.held]


def start(geometry: Geometry, n_threads: int = 1, **options):
    method = SnapKV(**({"budget": Budget(tokens=40)} | options))
    cache = make_cache(method, geometry, n_threads)
    return cache, SnapKVTwin(method, geometry), Stream(geometry)


@pytest.mark.parametrize("geometry", sweep(GEOMETRIES, fast=1), ids=str)
@pytest.mark.parametrize("options", [{}, {"window": 8, "kernel": 1}, {"window": 70}], ids=str)
def test_snapkv_equals_its_twin(geometry, options):
    """A prompt, a generation longer than it, and two more turns."""
    cache, twin, stream = start(geometry, **options)
    assert prefill_both(cache, twin, stream.rows(250))
    follow(cache, twin, stream, 300)
    for n_new in (5, 90):  # fewer rows than the window, and more
        assert prefill_both(cache, twin, stream.rows(n_new))
        follow(cache, twin, stream, 30)


@pytest.mark.parametrize("n_prompt", [1, 5, 75, 76, 77, 140])
def test_around_the_first_row_that_is_too_many(n_prompt):
    cache, twin, stream = start(Geometry(6, 2, 64), n_threads=2)
    assert prefill_both(cache, twin, stream.rows(n_prompt)) == (n_prompt > 40 + 32 + N_SINKS)
    follow(cache, twin, stream, 20)


def test_a_share_is_one_of_the_whole_sequence():
    cache, twin, stream = start(Geometry(6, 2, 64), budget=Budget(share=0.1))
    prefill_both(cache, twin, stream.rows(300))
    assert cache.store.n == 30 + 32 + N_SINKS
    prefill_both(cache, twin, stream.rows(100))
    assert cache.store.n == 40 + 32 + N_SINKS


def test_a_later_prefill_is_dense_over_what_is_left():
    geometry = Geometry(6, 2, 64)
    cache, twin, stream = start(geometry)
    prefill_both(cache, twin, stream.rows(200))
    follow(cache, twin, stream, 10)
    rows = stream.rows(90)
    left = [np.stack([[row[i] for row in held] for held in twin.held]) for i in (1, 2)]
    out = prefill(cache, rows)
    k, v = (np.concatenate([a, b], axis=1) for a, b in zip(left, rows[1:], strict=True))
    for i in (0, 50, 89):
        visible = left[0].shape[1] + i + 1
        expected = attend_dense_ref(rows[0][:, i], k[:, :visible], v[:, :visible], 64**-0.5)
        np.testing.assert_allclose(out[:, i], expected, atol=1e-4)


def test_dropped_rows_are_gone_from_memory():
    geometry = Geometry(6, 2, 64)
    cache, _, stream = start(geometry)
    cache.reserve(5000)
    before = cache.memory().host
    prefill(cache, stream.rows(4000))
    row_bytes = 2 * 2 * 64 * 2
    assert before == 5000 * row_bytes
    assert cache.memory().host == (40 + 32 + N_SINKS + N_ROOM) * row_bytes
    assert cache.memory().index == 2 * (40 + 32 + N_SINKS) * 4
    cache.reserve(4600)  # 600 rows are coming
    assert cache.store.capacity < 1200
    counts = cache.counters()
    assert counts["rows_dropped"] == 2 * (4000 - 76)
    decode(cache, stream.rows(1))
    counts = cache.counters()
    assert counts["rows_total"] == 6 * 4001 and counts["rows_attended"] == 6 * 77
    assert counts["rows_scored"] == 0 and counts["bytes_read"] == 77 * row_bytes


def test_cutting_back_to_the_last_choice_and_not_behind_it():
    geometry = Geometry(6, 2, 64)
    cache, twin, stream = start(geometry)
    prefill_both(cache, twin, stream.rows(200))
    follow(cache, twin, stream, 30)
    prefill(cache, stream.rows(1))  # drops some
    assert cache.truncate(220) == 0
    cache, twin, stream = start(geometry)
    prefill_both(cache, twin, stream.rows(200))
    follow(cache, twin, stream, 30)
    for keep in (217, 200):
        assert cache.truncate(keep) == keep == cache.n
        twin.held = [[row for row in held if row[0] < keep] for held in twin.held]
        twin.n = keep
        follow(cache, twin, stream, 5)
        assert cache.truncate(199) == 0
    prefill_both(cache, twin, stream.rows(50))


def test_nothing_dropped_means_that_any_row_can_be_cut():
    cache, twin, stream = start(Geometry(6, 2, 64))
    prefill_both(cache, twin, stream.rows(60))
    assert cache.truncate(13) == 13
    twin.held = [held[:13] for held in twin.held]
    twin.n = 13
    prefill_both(cache, twin, stream.rows(70))
    follow(cache, twin, stream, 5)


@pytest.mark.parametrize(
    ("option", "value"), [("window", "0"), ("kernel", "0"), ("kernel", "4"), ("kernel", "-1")]
)
def test_options_are_checked(option, value):
    with pytest.raises(ValueError, match=f"{option} = {value}: must be"):
        build_method("snapkv", {option: value})
