"""What attended rows are worth, against a plain computation in f64."""

import numpy as np
import pytest

from sparsekv_cli.cpu.coverage import rate_rows

WIDTH = 16


def address(array):
    return array.__array_interface__["data"][0]


@pytest.mark.parametrize("n_units", [6, 3, 1])
@pytest.mark.parametrize(("n", "n_tail", "m"), [(5, 0, 2), (40, 1, 20), (200, 63, 263), (63, 9, 4)])
@pytest.mark.parametrize("n_threads", [1, 2])
def test_rated_rows(n_units, n, n_tail, m, n_threads):
    rng = np.random.default_rng(n + m)
    n_head, n_kv_head, n_sinks, scale = 6, 3, 4, 0.3
    softcap = 1.5 if n_tail else 0.0
    total = n + n_tail
    q = rng.standard_normal((n_head, WIDTH)).astype(np.float32)
    store = rng.standard_normal((n_kv_head, n + 7, WIDTH)).astype(np.float16)
    tails = rng.standard_normal((n_kv_head, n_tail + 2, WIDTH)).astype(np.float16)
    k, tail = store[:, :n], tails[:, :n_tail]
    idx = np.stack([rng.permutation(total)[:m] for _ in range(n_units)]).astype(np.int32)
    counts = np.array([max(1, m - 3 * unit) for unit in range(n_units)])
    n_chosen, n_best = (np.empty(n_head, np.int64) for _ in range(2))
    mass, best_mass = (np.empty(n_head) for _ in range(2))
    rate_rows(
        q, address(k), k.strides[0], n, address(tail), tail.strides[0], n_tail, k.strides[1],
        n_kv_head, scale, softcap, idx, counts, n_sinks, n_chosen, n_best, mass, best_mass,
        n_threads,
    )  # fmt: skip
    for head in range(n_head):
        unit, kv_head = head * n_units // n_head, head * n_kv_head // n_head
        keys = np.concatenate([k[kv_head], tail[kv_head]]).astype(np.float64)
        scores = scale * keys @ q[head]
        scores = softcap * np.tanh(scores / softcap) if softcap else scores
        rows = idx[unit, : counts[unit]]
        weights = np.exp(scores - scores.max())
        assert mass[head] == pytest.approx(weights[rows].sum() / weights.sum(), rel=1e-5)
        others = {int(row) for row in rows if row >= n_sinks}
        order = np.argsort(-scores[n_sinks:], kind="stable") + n_sinks
        assert n_chosen[head] == len(others)
        best = set(order[: len(others)].tolist())
        assert n_best[head] == len(others & best)
        best_rows = [*best, *(row for row in rows if row < n_sinks)]
        expected = weights[best_rows].sum() / weights.sum()
        assert best_mass[head] == pytest.approx(expected, rel=1e-5)
