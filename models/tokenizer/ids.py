"""Compares sequences of token ids."""

from collections.abc import Sequence


def n_common(left: Sequence[int], right: Sequence[int]) -> int:
    """Returns the length of the common prefix of two sequences of ids."""
    n = min(len(left), len(right))
    return next((i for i, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), n)
