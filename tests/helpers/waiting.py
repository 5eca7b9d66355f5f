"""Waits for something that another thread or process does."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

PATIENCE = 240.0  # seconds: on a busy machine, kernels that are compiled take minutes


def wait_for(condition: Callable[[], Any], seconds: float = PATIENCE) -> Any:
    """Returns the condition's value as soon as it is true."""
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return found
