"""Launches of kernels/freekv/recall.py to compile; see test_compile.py."""

from collections.abc import Callable, Iterator
from functools import partial

import torch

from sparsekv_cli.kernels.freekv import pages as page_cache
from sparsekv_cli.kernels.freekv import recall


def launches() -> Iterator[Callable[[], object]]:
    n = torch.zeros(1, dtype=torch.int32)
    for n_head, n_kv, d, page, m in (
        (32, 8, 128, 32, 128), (32, 32, 128, 8, 54), (9, 3, 64, 4, 108), (6, 2, 80, 5, 3)
    ):  # fmt: skip
        layout = page_cache.Layout(4, 5, meanstd=page != 32)
        pages = page_cache.empty_pages(
            1, n_kv, d, d, page, 100, 2 * m, m, layout, torch.device("cpu")
        )
        q = torch.empty(1, n_head, d)
        heads, lists = torch.zeros(1, n_kv, dtype=torch.int32), torch.zeros(1, n_kv, 8192).int()
        leave = partial(recall.offload_pages, pages, layout, n, 64)
        apart = torch.zeros(1, dtype=torch.int64)
        yield partial(leave, ahead=1, budget=n, reserved=9, wanted=heads)
        assign = partial(recall.assign_slots, pages, layout, lists, heads, heads, n, n, 64, 128)
        yield partial(assign, q=q, previous=q)
        yield partial(recall.fetch_pages, pages, layout, n, 64, lists, heads)
        if n_kv == 8:
            yield leave
            yield assign
            yield partial(leave, pools=apart)
            yield partial(recall.fetch_pages, pages, layout, pools=apart)
            yield partial(recall.fetch_pages, pages, layout)
