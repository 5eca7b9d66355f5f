"""Bootstrap intervals, what is said to be equal, and the Pareto front."""

from types import SimpleNamespace

import numpy as np
import pytest

from sparsekv_cli.evaluation.intervals import drawn_means, equal_groups, interval
from sparsekv_cli.evaluation.result import pareto_front


def test_an_interval_is_that_of_the_normal_distribution():
    values = np.random.RandomState(1).standard_normal(400)
    low, high = interval(drawn_means(values))
    error = 1.96 * values.std() / 20
    assert (low, high) == pytest.approx((values.mean() - error, values.mean() + error), abs=0.01)
    assert interval(drawn_means([3.0] * 9)) == (3.0, 3.0)
    assert drawn_means(values).tolist() == drawn_means(values.copy()).tolist()


def test_pairs_are_compared_token_by_token():
    """A difference that every token has is no noise, however much tokens differ."""
    tokens = np.random.RandomState(2).exponential(1, 50)
    means = {name: drawn_means(tokens + more) for name, more in (("a", 0), ("b", 0.01), ("c", 0))}
    assert equal_groups(means) == [["a", "c"]]
    assert equal_groups({"a": means["a"], "b": drawn_means(tokens + 0.01, 1)}) == [["a", "b"]]


def test_groups_may_share_a_name():
    ladder = {str(i): np.linspace(i - 0.7, i + 0.7, 101)[np.random.RandomState(i).permutation(101)]
              for i in range(3)}  # fmt: skip
    assert equal_groups(ladder) == [["0", "1"], ["1", "2"]]
    assert equal_groups({"0": ladder["0"], "far": ladder["0"] + 9}) == []


def test_the_front_holds_what_nothing_beats():
    points = {"exact": (0, 1), "slow": (0.5, 0.5), "near": (0.1, 2), "as fast": (0.3, 2),
              "beaten": (0.4, 1.5), "fast": (1, 3)}  # fmt: skip
    rows = [SimpleNamespace(spec=s, kld_mean=k, decode_tps=t) for s, (k, t) in points.items()]
    assert pareto_front(rows) == ["exact", "near", "fast"]
