"""scripts/budget: choices by a share of the softmax, against slow loops."""

import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

from budget import choices
from budget.choices import LAST, LEAST, PAGE, Step, by_estimate, pages_of, softmax


@pytest.fixture
def step():
    draw = np.random.default_rng(0)
    q, k = draw.normal(size=(3, 16)), draw.normal(size=(403, 16))
    k[200:210] += q[0] / 4
    return Step(q @ k.T, q, k, k)


def test_every_row_is_forced_or_of_one_page(step):
    pages = pages_of(step)
    rows = np.concatenate([pages.forced, pages.rows.ravel()])
    assert sorted(rows) == list(range(403))
    assert {*range(PAGE), *range(403 - LAST, 403)} <= {*pages.forced}


def test_estimates(step):
    pages = pages_of(step)
    weights = np.exp(step.scores)
    for j, rows in enumerate(pages.rows):
        assert np.allclose(np.exp(choices.exact(step, pages)[:, j]), weights[:, rows].sum(1))
        mean, deviation = step.k[rows].mean(0), step.k[rows].std(0)
        told = [
            PAGE
            * np.exp(
                sum(x * m + (x * s) ** 2 / 2 for x, m, s in zip(q, mean, deviation, strict=True))
            )
            for q in step.q
        ]
        assert np.allclose(np.exp(choices.normal(step, pages)[:, j]), told)
        told = [PAGE * np.exp(q @ mean + abs(q) @ deviation) for q in step.q]
        assert np.allclose(np.exp(choices.quest(step, pages)[:, j]), told)
    near = choices.rounded(step, pages) - choices.normal(step, pages)
    assert 0 < np.abs(near).max() < 0.02


@pytest.mark.parametrize("worst", [False, True])
@pytest.mark.parametrize("share", [0.5, 0.8, 0.95])
def test_as_few_pages_as_a_share_needs(step, share, worst):
    """By exact weights the estimate is the truth."""
    pages, weights = pages_of(step), softmax(step.scores)
    rows, told = by_estimate(step, pages, share, choices.exact(step, pages), worst)
    of_heads = weights[:, rows].sum(1)
    reached = of_heads.min() if worst else of_heads.mean()
    assert told == pytest.approx(reached)
    assert reached >= share or len(rows) == 403
    assert len(rows) == len({*rows}) >= LEAST
    if len(rows) > len(pages.forced):
        fewer = weights[:, rows[:-PAGE]].sum(1)
        assert (fewer.min() if worst else fewer.mean()) < share
