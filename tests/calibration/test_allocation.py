"""A budget of the whole model, shared out to layers by what they lose."""

import numpy as np
import pytest

from sparsekv_cli.calibration import allocation


def test_budgets_of_levels():
    rng = np.random.default_rng(1)
    kld = np.sort(rng.exponential(0.02, (12, 5)), axis=1)[:, ::-1]
    kld[3] = kld[3, ::-1]  # a layer that measures better when less is kept comes last
    kld[:, -1] = 0
    budgets = allocation.budgets_of_levels(kld)
    assert (np.diff(budgets.reshape(12, -1), axis=1) >= 0).all()
    assert (budgets[:, 0, 0] == 0).all() and (budgets[:, -1, 1] == 1).all()
    for budget in (0.002, 0.05, 0.25, 0.5, 0.9, 1.0):
        shares = [allocation.layer_share(budget, row) for row in budgets]
        assert np.mean(shares) == pytest.approx(max(budget, 0.001), abs=1e-4)
        between = [s for s in shares if np.abs(np.array(allocation.LEVELS) - s).min() > 1e-3]
        assert len(between) <= 1, "one layer at a time is between its levels"
    assert {allocation.layer_share(1.0, row) for row in budgets} == {1.0}
    assert {allocation.layer_share(0.001, row) for row in budgets} == {0.001}


def test_the_budget_goes_where_it_saves_most():
    """Levels cost .0615, .1875, .25, .5: layer 0 saves at once, 1 only when whole, 2 nothing."""
    kld = np.array([[1, 0.1, 0.1, 0.1, 0], [1, 1, 1, 1, 0], [0.1, 0.1, 0.1, 0.1, 0]], np.float32)
    budgets = allocation.budgets_of_levels(kld)

    def shares(budget: float) -> list[float]:
        return [allocation.layer_share(budget, row) for row in budgets]

    assert shares((0.0625 + 0.002) / 3) == pytest.approx([0.0625, 0.001, 0.001], abs=1e-4)
    assert shares((1.0625 + 0.001) / 3) == pytest.approx([0.0625, 1, 0.001], abs=1e-4)
