"""Launches of kernels/quest/pages.py to compile; see test_compile.py."""

from collections.abc import Callable, Iterator
from functools import partial

import torch

from sparsekv_cli.kernels.attention.decode import NewRow
from sparsekv_cli.kernels.quest import pages


def launches() -> Iterator[Callable[[], object]]:
    n = torch.zeros(2, dtype=torch.int32)
    for n_kv, d, page in ((8, 128, 16), (32, 128, 32), (3, 64, 16), (2, 80, 5)):
        k = torch.empty(2, n_kv, 8192 * page // 4, d, dtype=torch.float16)
        hi = torch.empty(2, n_kv, 8192, d, dtype=torch.float16)
        new = NewRow(torch.empty(2, n_kv, d), torch.empty(2, n_kv, d))
        for meanstd in (True, False) if n_kv == 8 else (True,):
            yield partial(pages.page_summaries, k, hi, hi, page, meanstd, 0, 100)
            yield partial(pages.append_row, new, k, k, hi, hi, n, page, meanstd, 4)
