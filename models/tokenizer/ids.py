"""Compares sequences of token ids, or texts."""

from collections.abc import Sequence


def n_common(left: Sequence[int] | str, right: Sequence[int] | str) -> int:
    """Returns how many first items of two sequences of ids, or of two texts, are equal."""
    n = min(len(left), len(right))
    return next((i for i, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), n)
