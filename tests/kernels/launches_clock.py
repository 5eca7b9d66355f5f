"""Launches of kernels/clock.py to compile; see test_compile.py."""

from collections.abc import Callable, Iterator
from functools import partial

import torch

from sparsekv_cli.kernels import clock


def launches() -> Iterator[Callable[[], object]]:
    for stop in (False, True):
        yield partial(clock.take_time, torch.zeros(2, dtype=torch.int64), stop=stop)
