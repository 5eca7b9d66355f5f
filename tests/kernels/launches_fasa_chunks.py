"""Launches of kernels/fasa/chunks.py to compile; see test_compile.py."""

from collections.abc import Callable, Iterator
from functools import partial

import torch

from sparsekv_cli.kernels.attention.decode import NewRow
from sparsekv_cli.kernels.fasa import chunks


def launches() -> Iterator[Callable[[], object]]:
    capacity = 4096
    # The last two: N_tip = d/4, and sizes that are no powers of two.
    for n_head, n_kv, d, n_dim in ((32, 8, 128, 32), (32, 32, 128, 32), (9, 3, 64, 16),
                                   (32, 8, 128, 64), (6, 2, 80, 20)):  # fmt: skip
        q, new = torch.zeros(2, n_head, d), torch.zeros(2, n_kv, d)
        dims = torch.zeros(n_kv, d, dtype=torch.int32)
        dom = torch.zeros(2, n_kv, n_dim, capacity, dtype=torch.float16)
        rest = torch.zeros(2, n_kv, capacity, d - n_dim, dtype=torch.float16)
        v = torch.zeros(2, n_kv, capacity, d, dtype=torch.float16)
        n = torch.zeros(2, dtype=torch.int32)
        score = partial(chunks.score_chunks, q, dims[:, :n_dim], dom, n, capacity)
        if (n_kv, n_dim) == (8, 32):
            yield partial(score, new=NewRow(new, new), into=(v, v))
        yield partial(score, new=NewRow(new, new), into=(rest, v), k_dims=dims[:, n_dim:])
