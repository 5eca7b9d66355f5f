"""Ways to choose the rows of a kv head's step, in numpy: by a number of rows, by a share.

Page 0, which has the sinks, and the last rows are always read. They are scored exactly. The weight
of a page of 8 rows is estimated from the mean and the deviation of its keys.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

PAGE, LAST = 8, 64  # rows of a page; the least number of last rows that are always read
LEAST, MOST = 64, 4096  # rows of a share


@dataclass(frozen=True)
class Step:
    """A layer's step: the heads' scores and the rows of one kv head."""

    scores: np.ndarray  # f64 (group, n)
    q: np.ndarray  # f64 (group, d), with the softmax's factor
    k: np.ndarray  # f64 (n, d)
    v: np.ndarray  # f64 (n, d_v)

    @cached_property
    def weights(self) -> np.ndarray:
        """The softmax of all scores, f64 (group, n)."""
        return softmax(self.scores)

    @cached_property
    def output(self) -> np.ndarray:
        """The heads' outputs with all rows, f64 (group, d_v)."""
        return self.weights @ self.v


class Pages(NamedTuple):
    """The pages that a choice is among, and the rows that are always read."""

    forced: np.ndarray  # rows
    rows: np.ndarray  # (pages, PAGE) numbers of rows
    mean: np.ndarray  # (pages, d)
    deviation: np.ndarray


def pages_of(step: Step) -> Pages:
    n = len(step.k)
    end = (n - LAST) // PAGE * PAGE  # of the pages
    forced = np.r_[:PAGE, end:n]  # page 0 has the sinks
    rows = np.arange(PAGE, end).reshape(-1, PAGE)
    keys = step.k[rows]
    return Pages(forced, rows, keys.mean(1), keys.std(1))


def with_pages(pages: Pages, chosen: np.ndarray) -> np.ndarray:
    """Returns the rows of chosen pages, after those that are always read."""
    return np.r_[pages.forced, pages.rows[chosen].ravel()]


def softmax(scores: np.ndarray) -> np.ndarray:
    weights = np.exp(scores - scores.max(1, keepdims=True))
    return weights / weights.sum(1, keepdims=True)


def exact(step: Step, pages: Pages) -> np.ndarray:
    """Returns the log of the pages' weights, f64 (group, pages)."""
    scores = step.scores[:, pages.rows]
    top = scores.max(2)
    return top + np.log(np.exp(scores - top[:, :, None]).sum(2))


def normal(step: Step, pages: Pages) -> np.ndarray:
    """Estimates it by the mean of exp(q . k) over normally distributed keys."""
    half = step.q**2 @ (pages.deviation**2).T / 2
    return np.log(PAGE) + step.q @ pages.mean.T + half


def rounded(step: Step, pages: Pages) -> np.ndarray:
    """Estimates it as ``normal``, by summaries in f16: mean + deviation and mean - deviation."""
    hi, lo = (
        (pages.mean + sign * pages.deviation).astype(np.float16).astype(np.float64)
        for sign in (1, -1)
    )
    return normal(step, pages._replace(mean=(hi + lo) / 2, deviation=(hi - lo) / 2))


def quest(step: Step, pages: Pages) -> np.ndarray:
    """Estimates it by quest's score, q . mean + |q| . deviation."""
    return np.log(PAGE) + step.q @ pages.mean.T + np.abs(step.q) @ pages.deviation.T


ESTIMATES = {"exact": exact, "normal": normal, "f16": rounded, "quest": quest}


def rows_until(share: float, reached: np.ndarray) -> int:
    """How many in order it takes until ``reached``, ascending, is at least ``share``."""
    return int(np.searchsorted(reached, share)) + 1


def limited(n_pages: int, forced: int, n_all: int) -> int:
    least, most = (LEAST - forced) // PAGE, (MOST - forced) // PAGE
    return min(n_all, max(0, least, min(n_pages, most)))


def by_estimate(
    step: Step, pages: Pages, share: float, logs: np.ndarray, worst: bool = False
) -> tuple[np.ndarray, float]:
    """Returns the rows that a share needs, and the estimate of their mass.

    logs f64 (group, pages): of the pages' weights. Pages are read until the mean of the heads'
    shares is ``share``; with ``worst``, until the share of every head is.
    """
    forced = step.scores[:, pages.forced]
    top = np.maximum(forced.max(1), logs.max(1))[:, None]
    sure, likely = np.exp(forced - top).sum(1), np.exp(logs - top)
    whole = sure + likely.sum(1)
    shares = likely / whole[:, None]
    order = np.argsort(-(shares.max(0) if worst else shares.mean(0)), kind="stable")
    gathered = (sure / whole)[:, None] + np.cumsum(shares[:, order], 1)
    reached = gathered.min(0) if worst else gathered.mean(0)
    n_pages = 0 if (sure / whole).mean() >= share and not worst else rows_until(share, reached)
    n_pages = limited(n_pages, len(pages.forced), len(order))
    told = reached[n_pages - 1] if n_pages else (sure / whole).mean()
    return with_pages(pages, order[:n_pages]), float(told)
