"""Launches of kernels/quest/pages.py to compile; see test_compile.py."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch

from sparsekv_cli.kernels.attention.decode import NewRow
from sparsekv_cli.kernels.quest import pages


def launches() -> Iterator[Callable[[], object]]:
    n = torch.zeros(2, dtype=torch.int32)
    for n_head, n_kv, d, page in (
        (32, 8, 128, 16),
        (32, 32, 128, 32),
        (9, 3, 64, 16),
        (6, 2, 80, 5),
    ):
        k = torch.empty(2, n_kv, 8192 * page // 4, d, dtype=torch.float16)
        hi = torch.empty(2, n_kv, 8192, d, dtype=torch.float16)
        q = torch.empty(2, n_head, d)
        new = NewRow(torch.empty(2, n_kv, d), torch.empty(2, n_kv, d))
        for meanstd in (True, False) if n_kv == 8 else (True,):
            yield partial(pages.page_summaries, k, hi, hi, page, meanstd, 0, 100)
            pool = partial(pages.pool_pages, q, hi, hi, n, n, 8192, page, 1.0)
            yield partial(pool, softmax=meanstd, new=new, into=(k, k), meanstd=meanstd, n_sinks=4)
        if n_kv == 8:
            yield partial(pool, softmax=True)
            few = partial(pages.pool_pages, q, hi, hi, n, n, 64, page, 1.0)
            yield partial(few, softmax=False, new=new, into=(k, k))
