"""Launches of kernels/attention/select.py to compile; see test_compile.py."""

from collections.abc import Callable, Iterator
from functools import partial

import torch

from sparsekv_cli.kernels.attention import select


def launches() -> Iterator[Callable[[], object]]:
    n = torch.zeros(2, dtype=torch.int32)
    for n_max, k_max in (
        (8, 2),
        (1000, 40),
        (3000, 256),
        (8192, 512),
        (32768, 512),
        (131072, 32768),
    ):
        scores = torch.empty(2, 8, n_max)
        wanted = torch.ones(2, 8, dtype=torch.int32) if n_max == 8192 else None
        yield partial(select.select_largest, scores, n, n_max, n, k_max, 4, 16, wanted=wanted)
