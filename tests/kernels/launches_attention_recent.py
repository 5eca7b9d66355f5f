"""Launches of kernels/attention/recent.py to compile; see test_compile.py."""

from collections.abc import Callable, Iterator
from functools import partial

import torch

from sparsekv_cli.kernels.attention.decode import NewRow
from sparsekv_cli.kernels.attention.recent import recent_rows


def launches() -> Iterator[Callable[[], object]]:
    n = torch.zeros(2, dtype=torch.int32)
    for n_kv, d in ((8, 128), (3, 64), (2, 80)):
        k, new = torch.empty(2, n_kv, 4096, d, dtype=torch.float16), torch.empty(2, n_kv, d)
        yield partial(recent_rows, n, n, 512, 4, NewRow(new, new), k, k)
