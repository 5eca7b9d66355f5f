"""Launches of kernels/quest/page_rows.py to compile; see test_compile.py."""

from collections.abc import Callable, Iterator
from functools import partial

import torch

from sparsekv_cli.kernels.quest.page_rows import page_rows


def launches() -> Iterator[Callable[[], object]]:
    n = torch.zeros(2, dtype=torch.int32)
    chosen = torch.zeros(2, 8, 32, dtype=torch.int32)
    for page, n_sinks in ((16, 4), (5, 11), (32, 0)):
        yield partial(page_rows, chosen, chosen[:, :, 0].contiguous(), n, page, n_sinks)
