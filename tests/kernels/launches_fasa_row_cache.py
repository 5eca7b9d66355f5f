"""Launches of kernels/fasa/row_cache.py to compile; see test_compile.py."""

from collections.abc import Callable, Iterator
from functools import partial

import torch

from sparsekv_cli.kernels.fasa import row_cache


def launches() -> Iterator[Callable[[], object]]:
    capacity, m = 4096, 256
    # The last two: N_tip = d/4, and sizes that are no powers of two.
    for n_head, n_kv, d, n_dim in ((32, 8, 128, 32), (32, 32, 128, 32), (9, 3, 64, 16),
                                   (32, 8, 128, 64), (6, 2, 80, 20)):  # fmt: skip
        dom = torch.zeros(2, n_kv, n_dim, capacity, dtype=torch.float16)
        rest = torch.zeros(2, n_kv, capacity, d - n_dim, dtype=torch.float16)
        v = torch.zeros(2, n_kv, capacity, d, dtype=torch.float16)
        n = torch.zeros(2, dtype=torch.int32)
        idx = torch.zeros(2, n_head, m, dtype=torch.int32)
        counts = torch.zeros(2, n_head, dtype=torch.int32)
        slots = row_cache.empty_resident(
            2, n_kv, n_head // n_kv * m, d, d, capacity, torch.device("cpu")
        )
        yield partial(row_cache.place_rows, slots, idx, counts, n, torch.zeros_like(idx))
        yield partial(row_cache.fetch_rows, slots, dom, rest, v)
