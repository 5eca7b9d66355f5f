"""Quest against a literal twin, step by step; its options, budget, ledger and rewinding."""

from __future__ import annotations

import numpy as np
import pytest
from layer_stream import GEOMETRIES, Geometry, Stream, attended_rows, decode, make_cache, prefill
from sweeps import sweep

from sparsekv_cli.cache.spec import N_SINKS, Budget
from sparsekv_cli.cpu.attention.decode import attend_dense_ref, attend_rows_ref
from sparsekv_cli.methods import build_method
from sparsekv_cli.methods.quest import Quest

TIE = 1e-4  # page scores in f32 against f64


class QuestTwin:
    """All keys and values; bounds of every page computed anew in every step."""

    def __init__(self, method: Quest, geometry: Geometry) -> None:
        self.method, self.geometry = method, geometry
        self.k = np.empty((geometry.n_head_kv, 0, geometry.d))
        self.v = self.k.copy()

    def add(self, rows) -> None:
        self.k = np.concatenate([self.k, rows[1]], axis=1)
        self.v = np.concatenate([self.v, rows[2]], axis=1)

    def page_score(self, q: np.ndarray, keys: np.ndarray) -> float:
        if self.method.summary == "minmax":
            return float(np.maximum(q * keys.min(0), q * keys.max(0)).sum())
        mean, std = keys.mean(0), keys.std(0)
        hi, lo = (x.astype(np.float16).astype(float) for x in (mean + std, mean - std))
        return float((np.maximum(q, 0) * hi + np.minimum(q, 0) * lo).sum())

    def choose(self, q: np.ndarray) -> list[tuple[np.ndarray, int, set[int]]]:
        """A kv head: scores of the pages before the current one, how many to take, forced rows."""
        n, page, g = self.k.shape[1], self.method.page, self.geometry
        n_page = (n - 1) // page
        current = range(n_page * page, n)
        n_best = min(n_page, max(0, (self.method.budget.rows(n) - len(current)) // page))
        result = []
        for kv in range(g.n_head_kv):
            group = q[kv * g.n_head // g.n_head_kv : (kv + 1) * g.n_head // g.n_head_kv]
            scores = []
            for j in range(n_page):
                rows = [i for i in range(j * page, (j + 1) * page) if i >= N_SINKS]
                scores.append(max(self.page_score(each, self.k[kv, rows]) for each in group))
            result.append((np.array(scores), n_best, {*range(min(N_SINKS, n)), *current}))
        return result


def check_choice(twin: QuestTwin, q: np.ndarray, got: list[list[int]]) -> int:
    """The rows are those of the twin's pages; how many kv heads have another page at a tie."""
    page, ties = twin.method.page, 0
    for (scores, n_best, forced), rows in zip(twin.choose(q), got, strict=True):
        assert rows == sorted(set(rows))
        best = np.argsort(-scores, kind="stable")[:n_best].tolist()
        pages = {i // page for i in set(rows) - forced}
        if pages != set(best):
            cut = scores[best].min()
            assert len(pages) == n_best
            assert all(abs(scores[j] - cut) < TIE * (1 + abs(cut)) for j in pages ^ set(best))
            ties += 1
        assert set(rows) == forced | {i for j in pages for i in range(j * page, j * page + page)}
    return ties


def follow(cache, twin: QuestTwin, stream: Stream, n_steps: int) -> dict[str, int]:
    seen = {"ties": 0, "sparse": 0, "dense": 0}
    for _ in range(n_steps):
        row = stream.rows(1)
        out = decode(cache, row)
        twin.add(row)
        n = twin.k.shape[1]
        if twin.method.budget.rows(n) + N_SINKS >= n:
            assert cache.attended is None
            seen["dense"] += 1
            expected = attend_dense_ref(row[0][:, 0], twin.k, twin.v, twin.geometry.d**-0.5)
        else:
            lists = attended_rows(cache)
            seen["ties"] += check_choice(twin, row[0][:, 0].astype(float), lists)
            seen["sparse"] += 1
            group = twin.geometry.n_head // twin.geometry.n_head_kv
            heads = [lists[h // group] for h in range(twin.geometry.n_head)]
            expected = attend_rows_ref(row[0][:, 0], twin.k, twin.v, heads, twin.geometry.d**-0.5)
        np.testing.assert_allclose(out, expected, atol=1e-4)
    return seen


@pytest.mark.parametrize("geometry", sweep(GEOMETRIES, fast=1), ids=str)
@pytest.mark.parametrize(
    "options", [{}, {"summary": "meanstd"}, {"page": 5}, {"page": 48}], ids=str
)
def test_quest_equals_its_twin(geometry, options):
    method = Quest(budget=Budget(tokens=64), **options)
    cache, twin, stream = (
        make_cache(method, geometry),
        QuestTwin(method, geometry),
        Stream(geometry),
    )
    prompt = stream.rows(150)
    prefill(cache, prompt)
    twin.add(prompt)
    seen = follow(cache, twin, stream, 300)
    assert seen["sparse"] == 300 and seen["ties"] <= 3
    n_page = (450 - 1) // method.page
    assert cache.counters()["rows_scored"] == sum(
        2 * geometry.n_head * ((n - 1) // method.page) for n in range(151, 451)
    )
    width = cache.store.k.shape[2]
    assert cache.memory().index >= geometry.n_head_kv * n_page * 2 * 2 * width


@pytest.mark.parametrize("n_prompt", [1, 5, 40, 64, 65])
@pytest.mark.parametrize("n_threads", [1, 2])
def test_from_dense_to_sparse_without_a_prefill_between(n_prompt, n_threads):
    geometry = Geometry(6, 2, 64)
    method = Quest(budget=Budget(tokens=48))
    cache = make_cache(method, geometry, n_threads)
    twin, stream = QuestTwin(method, geometry), Stream(geometry, 1)
    prompt = stream.rows(n_prompt)
    prefill(cache, prompt)
    twin.add(prompt)
    seen = follow(cache, twin, stream, 120)
    assert seen["sparse"] == sum(n > 52 for n in range(n_prompt + 1, n_prompt + 121))


@pytest.mark.parametrize("budget", [1, 15, 16, 17, 31, 32])
def test_budgets_of_few_pages(budget):
    """The current page is read whatever the budget; else no more rows than it and the sinks."""
    geometry = Geometry(4, 2, 64)
    method = Quest(budget=Budget(tokens=budget))
    cache, twin, stream = (
        make_cache(method, geometry),
        QuestTwin(method, geometry),
        Stream(geometry),
    )
    prompt = stream.rows(100)
    prefill(cache, prompt)
    twin.add(prompt)
    for _ in range(40):
        follow(cache, twin, stream, 1)
        n_current = (cache.n - 1) % 16 + 1
        assert all(len(rows) <= max(budget, n_current) + N_SINKS for rows in attended_rows(cache))


def test_turns_and_rewinding_keep_the_summaries_right():
    geometry = Geometry(6, 2, 64)
    method = Quest(budget=Budget(tokens=48))
    cache, twin, stream = (
        make_cache(method, geometry),
        QuestTwin(method, geometry),
        Stream(geometry),
    )
    prompt = stream.rows(150)
    prefill(cache, prompt)
    twin.add(prompt)
    follow(cache, twin, stream, 35)
    for n_new in (1, 70, 16):
        rows = stream.rows(n_new)
        prefill(cache, rows)
        twin.add(rows)
        follow(cache, twin, stream, 20)
    for keep in (250, 240, 128, 97):  # within a page, at its end, and with a prefill in between
        assert cache.truncate(keep) == keep == cache.n
        twin.k, twin.v = twin.k[:, :keep], twin.v[:, :keep]
        if keep == 128:
            rows = stream.rows(40)
            prefill(cache, rows)
            twin.add(rows)
        follow(cache, twin, stream, 20)


def test_an_interrupted_prefill_leaves_no_summaries():
    geometry = Geometry(4, 2, 64)
    method = Quest(budget=Budget(tokens=48))
    cache, twin, stream = (
        make_cache(method, geometry),
        QuestTwin(method, geometry),
        Stream(geometry),
    )
    prompt = stream.rows(150)
    prefill(cache, prompt)
    twin.add(prompt)
    follow(cache, twin, stream, 20)
    prefill(cache, stream.rows(90))
    assert cache.truncate(170) == 170
    follow(cache, twin, stream, 60)


def test_bytes_read_are_summaries_and_whole_pages():
    geometry = Geometry(6, 2, 64)
    cache, stream = make_cache(Quest(budget=Budget(tokens=64)), geometry), Stream(geometry)
    prefill(cache, stream.rows(320))
    decode(cache, stream.rows(1))  # row 321 begins page 20; 3 pages and the current row
    rows = sum(map(len, attended_rows(cache)))
    assert 2 * (3 * 16 + 1) <= rows <= 2 * (3 * 16 + 1 + N_SINKS)
    counts = cache.counters()
    assert counts["bytes_read"] == rows * 4 * 64 + 2 * 20 * 2 * 2 * 64
    assert counts["rows_attended"] == 3 * rows and counts["rows_scored"] == 6 * 20 * 2


@pytest.mark.parametrize(
    ("option", "value"), [("page", "4"), ("page", "0"), ("page", "5000"), ("summary", "mean")]
)
def test_options_are_checked(option, value):
    with pytest.raises(ValueError, match=f"{option} = .*{value}"):
        build_method("quest", {option: value})
