"""Parameters of which scripts/test --fast takes one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest


def sweep(values: Sequence[Any], fast: int = 0) -> list[Any]:
    """``values`` for parametrize, all but number ``fast`` marked slow; a tuple is several."""
    return [
        value if i == fast else pytest.param(*_parts(value), marks=pytest.mark.slow)
        for i, value in enumerate(values)
    ]


def _parts(value: Any) -> tuple[Any, ...]:
    return value if type(value) is tuple else (value,)
