"""Selection of the k largest against sorting: ties, borders, extreme values."""

import numpy as np
import pytest

from sparsekv_cli.cpu.attention.select import (
    SAMPLED_FROM,
    SAMPLED_SHARE,
    order_keys,
    select_largest,
    select_rows,
    select_rows_ref,
    threshold_of_largest,
)

EXTREMES = np.array(
    [-np.inf, -3.4e38, -1.0, -1e-38, -1e-45, -0.0, 0.0, 1e-45, 1e-38, 1.0, 3.4e38, np.inf],
    np.float32,
)


def keys_of(scores) -> np.ndarray:
    scores = np.asarray(scores, np.float32)
    keys = np.empty(len(scores), np.int32)
    order_keys(scores, keys, len(scores))
    return keys


def largest(scores, k) -> np.ndarray:
    out = np.full(max(k, 0), -7, np.int32)
    select_largest(keys_of(scores), len(scores), k, out)
    return out


def test_keys_keep_the_order_of_the_scores():
    assert (np.diff(keys_of(EXTREMES).astype(np.int64)) > 0).all()
    scores = np.random.default_rng(0).standard_normal(1000).astype(np.float32)
    np.testing.assert_array_equal(np.argsort(keys_of(scores)), np.argsort(scores))


@pytest.mark.parametrize("n", [1, 2, 3, 17, 64, 1000])
def test_threshold_of_largest(n):
    rng = np.random.default_rng(n)
    for scores in (rng.standard_normal(n), rng.integers(-3, 3, n), rng.choice(EXTREMES, n)):
        keys = keys_of(scores)
        for k in {1, 2, n // 2, n - 1, n} - {0}:
            if k <= n:
                assert_separates(keys, k)


def assert_separates(keys, k):
    """At most k keys are above the threshold, at least k above or equal."""
    threshold = threshold_of_largest(keys, len(keys), k)
    above = np.count_nonzero(keys > threshold)
    assert above <= k <= above + np.count_nonzero(keys == threshold)


def test_threshold_over_the_whole_range_of_keys():
    keys = np.array([2**31 - 1, -(2**31), 0, -1, 1], np.int32)
    for k in range(1, 6):
        assert_separates(keys, k)


@pytest.mark.parametrize("n", [1, 5, 63, 64, 65, 127, 500])
@pytest.mark.parametrize("values", [3, 10**6])
def test_select_largest_takes_the_first_of_equals(n, values):
    scores = np.random.default_rng(n).integers(0, values, n)
    for k in {0, 1, n // 3, n - 1, n}:
        expected = np.sort(np.argsort(-scores, kind="stable")[:k])
        np.testing.assert_array_equal(largest(scores, k), expected)


@pytest.mark.parametrize("n", [SAMPLED_FROM, 20_000])
@pytest.mark.parametrize("kind", ["bell", "runs", "equals", "hidden"])
def test_few_of_many_by_a_sample(n, kind):
    """Also where the sample says nothing of the largest: they lie where it does not look."""
    rng = np.random.default_rng(n)
    scores = rng.standard_normal(n).astype(np.float32)
    if kind == "runs":
        scores = np.repeat(scores[: -(-n // 100)], 100)[:n]
    elif kind == "equals":
        scores = rng.integers(0, 3, n).astype(np.float32)
    elif kind == "hidden":
        scores[20:220] += 100
    for k in (1, 100, n // SAMPLED_SHARE):
        expected = np.sort(np.argsort(-scores, kind="stable")[:k])
        np.testing.assert_array_equal(largest(scores, k), expected)


def test_select_largest_of_fewer_takes_all():
    out = np.full(9, -7, np.int32)
    select_largest(keys_of([3, 1, 2]), 3, 9, out)
    np.testing.assert_array_equal(out, [0, 1, 2] + [-7] * 6)


@pytest.mark.parametrize(
    ("n", "n_sinks", "n_recent", "k"),
    [
        (100, 4, 16, 30), (100, 4, 16, 16), (100, 4, 96, 96), (100, 0, 1, 1), (65, 4, 1, 61),
        (6, 4, 1, 2),
    ],
)  # fmt: skip
@pytest.mark.parametrize("n_list", [1, 3])
def test_select_rows(n, n_sinks, n_recent, k, n_list):
    rng = np.random.default_rng(n + k)
    scores = np.full((n_list, n + 32), np.float32(1e9))  # what lies behind n must not matter
    scores[:, :n] = rng.standard_normal((n_list, n))
    scores[:, n // 2] = scores[:, n // 3]
    out = np.empty((n_list, n_sinks + k), np.int32)
    select_rows(scores, n, n_sinks, n_recent, k, out)
    expected = select_rows_ref(scores[:, :n], n, n_sinks, n_recent, k)
    np.testing.assert_array_equal(np.sort(out, axis=1), expected)
    np.testing.assert_array_equal(out[:, :n_sinks], np.tile(np.arange(n_sinks), (n_list, 1)))
