"""Launches of kernels/quest/scores.py to compile; see test_compile.py."""

from collections.abc import Callable, Iterator
from functools import partial

import torch

from sparsekv_cli.kernels.quest import scores


def launches() -> Iterator[Callable[[], object]]:
    n = torch.zeros(2, dtype=torch.int32)
    for n_head, n_kv, d, page in (
        (32, 8, 128, 16),
        (32, 32, 128, 32),
        (9, 3, 64, 16),
        (6, 2, 80, 5),
    ):
        hi = torch.empty(2, n_kv, 8192, d, dtype=torch.float16)
        q = torch.empty(2, n_head, d)
        for n_page_max in (8192, 64) if n_kv == 8 else (8192,):
            yield partial(scores.largest_scores, q, hi, hi, n, n, n_page_max, page, 1.0)
