"""Parameters of which scripts/test --fast takes one."""

from collections.abc import Sequence
from typing import Any

import pytest


def sweep(values: Sequence[Any], fast: int = 0) -> list[Any]:
    """``values`` for parametrize, all but number ``fast`` marked slow; a tuple is several."""
    return [
        value if i == fast else pytest.param(*_parts(value), marks=pytest.mark.slow)
        for i, value in enumerate(values)
    ]


def crossed(geometries: Sequence[Any], variants: Sequence[Any], fast: int = 1) -> list[Any]:
    """Pairs: every variant with geometry number ``fast``, each other geometry with a third of them.

    The others are marked slow.
    """
    return [
        pair if i == fast else pytest.param(*pair, marks=pytest.mark.slow)
        for i, geometry in enumerate(geometries)
        for j, variant in enumerate(variants)
        if i == fast or (i + j) % 3 == 0
        for pair in [(geometry, variant)]
    ]


def _parts(value: Any) -> tuple[Any, ...]:
    return value if type(value) is tuple else (value,)
