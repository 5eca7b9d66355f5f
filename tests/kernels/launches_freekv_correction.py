"""Launches of kernels/freekv/correction.py to compile; see test_compile.py."""

from collections.abc import Callable, Iterator
from functools import partial

import torch

from sparsekv_cli.kernels.freekv import correction
from sparsekv_cli.kernels.freekv import pages as page_cache


def launches() -> Iterator[Callable[[], object]]:
    n, layout = torch.zeros(1, dtype=torch.int32), page_cache.Layout(4, 5, meanstd=True)
    for n_head, n_kv, d, page in ((32, 8, 128, 32), (32, 32, 128, 8), (9, 3, 64, 8), (6, 2, 80, 5)):
        pages = page_cache.empty_pages(1, n_kv, d, d, page, 9, 8, 4, layout, torch.device("cpu"))
        q, new = torch.empty(1, n_head, d), torch.empty(1, n_kv, d)
        wanted = torch.zeros(1, n_kv, dtype=torch.int32)
        enter = partial(correction.enter_row, pages, layout, q, q, new, new, n, n, 64, 128, 0.8)
        for current in (False, True):
            yield partial(enter, current=current, wanted=wanted, query=q)
