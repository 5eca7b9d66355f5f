"""The beginning that the token ids of two texts share."""

from collections.abc import Sequence


def n_common(left: Sequence[int], right: Sequence[int]) -> int:
    """Returns how many ids two sequences have in common at their beginning."""
    n = min(len(left), len(right))
    return next((i for i, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), n)
