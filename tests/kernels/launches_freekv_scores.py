"""Launches of kernels/freekv/scores.py to compile; see test_compile.py."""

from collections.abc import Callable, Iterator
from functools import partial

import torch

from sparsekv_cli.kernels.freekv import scores


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
        score = partial(scores.softmax_scores, q, hi, hi, n, n, 8192, page, 1.0)
        wanted = torch.zeros(2, n_kv, dtype=torch.int32)
        yield partial(score, scores.PageCandidates(4, 64, 80), wanted)
        if n_kv == 8:
            yield partial(score, scores.PageCandidates(0, 1, 80))
