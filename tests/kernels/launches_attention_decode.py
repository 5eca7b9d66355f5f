"""Launches of kernels/attention/decode.py to compile; see test_compile.py."""

from collections.abc import Callable, Iterator
from functools import partial

import torch

from sparsekv_cli.kernels.attention import decode

# (H, G, d), (B, capacity, rows listed): few small tiles, or many large ones.
CASES = (
    ((32, 8, 128), (1, 128, 64)),
    ((32, 8, 128), (2, 32768, 8192)),
    ((32, 32, 128), (2, 32768, 8192)),
    ((9, 3, 64), (2, 32768, 8192)),
    ((6, 2, 80), (1, 128, 64)),
)


def launches() -> Iterator[Callable[[], object]]:
    for (n_head, n_kv, d), (n_batch, capacity, m) in CASES:
        new = torch.empty(n_batch, n_kv, d)
        cache = torch.empty(n_batch, n_kv, capacity, d, dtype=torch.float16)
        n = torch.zeros(n_batch, dtype=torch.int32)
        q = torch.empty(n_batch, n_head, d)
        row = decode.NewRow(new, new)
        yield partial(decode.attend_dense, q, cache, cache, n, capacity, 1.0, new=row)
        if (n_kv, capacity) == (8, 32768):
            yield partial(decode.attend_dense, q, cache, cache, n, capacity, 1.0)
            others = decode.Attended(torch.empty(n_batch, n_head, d), torch.empty(n_batch, n_head))
            yield partial(decode.attend_dense, q, cache, cache, n, 4, 1.0, others=others)
        n_list = n_kv if d == 64 else n_head
        idx = torch.zeros(n_batch, n_list, m, dtype=torch.int32)
        counts = torch.zeros(n_batch, n_list, dtype=torch.int32)
        lse = torch.empty(n_batch, n_head)
        yield partial(decode.attend_rows, q, cache, cache, idx, counts, 1.0, lse=lse)
    yield partial(decode.attend_dense, q.half(), cache, cache, n, capacity, 1.0)
