"""Launches of kernels/sals/scores.py to compile; see test_compile.py."""

from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import torch

from sparsekv_cli.kernels.sals import latent, scores


def launches() -> Iterator[Callable[[], object]]:
    capacity = 8192
    for n_head, n_kv, d, n_rot, rank in ((32, 8, 128, 128, 256), (32, 32, 128, 128, 1024),
                                         (9, 3, 64, 64, 48), (6, 2, 80, 40, 40)):  # fmt: skip
        ones, theta = np.ones(n_kv * d), np.ones(n_rot // 2)
        basis = latent.make_basis(
            np.ones((n_kv * d, rank)), ones, theta, 1.0, n_kv, torch.device("cpu")
        )
        latents = torch.zeros(2, capacity, rank, dtype=torch.float16)
        n = torch.zeros(2, dtype=torch.int32)
        yield partial(
            scores.score_latents, torch.zeros(2, n_head, d), torch.zeros(n_rot // 2), basis,
            latents, rank // 2, n, capacity, 1.0, 16, torch.zeros(2, n_head),
        )  # fmt: skip
        yield partial(scores.score_summed, torch.zeros(2, rank // 2), latents, n, capacity, 16)
