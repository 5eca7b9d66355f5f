"""Launches of kernels/attention/scores.py to compile; see test_compile.py."""

from collections.abc import Callable, Iterator
from functools import partial

import torch

from sparsekv_cli.kernels.attention.decode import NewRow
from sparsekv_cli.kernels.attention.scores import score_rows


def launches() -> Iterator[Callable[[], object]]:
    n = torch.zeros(2, dtype=torch.int32)
    for n_head, n_kv, d in ((32, 8, 128), (32, 32, 128), (9, 3, 64), (6, 2, 80)):
        k = torch.empty(2, n_kv, 32768, d, dtype=torch.float16)
        q, new = torch.empty(2, n_head, d), torch.empty(2, n_kv, d)
        for n_max in (64, 32768) if n_kv == 8 else (32768,):
            yield partial(score_rows, q, k, n, n_max, 1.0, new=NewRow(new, new), v=k)
