"""The uncertainty of figures: bootstrap intervals of means over tokens, and equal figures.

The tokens of a prompt are drawn again with replacement (Efron's percentile bootstrap). Two methods
are compared on the same draws, token by token. An interval holds for this prompt and this machine
only.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import numpy as np

N_DRAWS = 2000
LEVEL = 0.95
T = TypeVar("T")


def drawn_means(values: Sequence[float] | np.ndarray, seed: int = 0) -> np.ndarray:
    """Returns N_DRAWS means f64 (N_DRAWS,), each of n values drawn from ``values`` (n,).

    The same seed and n draw the same tokens.
    """
    values = np.asarray(values, np.float64)
    drawn = np.random.RandomState(seed).randint(0, len(values), (N_DRAWS, len(values)))
    return values[drawn].mean(axis=1)


def interval(means: np.ndarray) -> tuple[float, float]:
    """Returns the two ends between which the middle 95% (LEVEL) of ``means`` lie."""
    low, high = np.quantile(means, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)


def equal_groups(means: Mapping[str, np.ndarray]) -> list[list[str]]:
    """Returns groups of names whose figures differ only by noise, the smallest figure first.

    means: name -> result of ``drawn_means``. For any two names of a group, the interval of the
    difference contains 0.
    """
    names = sorted(means, key=lambda name: float(means[name].mean()))
    return groups_of(names, lambda a, b: is_equal(means[a], means[b]))


def groups_of(items: Sequence[T], alike: Callable[[T, T], bool]) -> list[list[T]]:
    """Returns the longest runs of ``items`` in which any two are alike.

    An item may be in several runs. Runs of one item are left out.
    """
    groups: list[list[T]] = []
    last = 0  # end of the last group
    for start in range(len(items)):
        end = start + 1
        while end < len(items) and all(alike(each, items[end]) for each in items[start:end]):
            end += 1
        if end - start > 1 and end > last:
            groups.append([*items[start:end]])
            last = end
    return groups


def is_equal(a: np.ndarray, b: np.ndarray) -> bool:
    """Returns whether the interval of the difference of two drawn means contains 0."""
    low, high = interval(a - b)
    return low <= 0 <= high
