"""Scores of samples, and how sure they are."""

from collections.abc import Sequence
from typing import NamedTuple

NORMAL_95 = 1.959963984540054  # of a normal distribution, 95% lies so many deviations around


class TaskScore(NamedTuple):
    """Mean and confidence interval of 95%, in per cent, of ``n`` samples."""

    score: float
    low: float
    high: float
    n: int


def mean_score(scores: Sequence[float]) -> TaskScore:
    """Returns the mean of scores from 0 to 1, with Wilson's interval.

    The interval is that of successes and failures, which spread most of all scores with such a
    mean. Parts of a success make it too wide rather than too narrow. It has a width where all
    samples agree.
    """
    n = len(scores)
    mean = sum(scores) / n
    z2 = NORMAL_95**2
    middle = (mean + z2 / (2 * n)) / (1 + z2 / n)
    half = NORMAL_95 / (1 + z2 / n) * (mean * (1 - mean) / n + z2 / (4 * n * n)) ** 0.5
    low, high = max(0.0, middle - half), min(1.0, middle + half)
    return TaskScore(100 * mean, 100 * low, 100 * high, n)
