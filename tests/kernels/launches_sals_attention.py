"""Launches of kernels/sals/attention.py to compile; see test_compile.py."""

from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import torch

from sparsekv_cli.kernels.sals import attention, latent

CPU = torch.device("cpu")


def launches() -> Iterator[Callable[[], object]]:
    m = 432
    for n_batch, n_head, n_kv, d, n_rot, rank, bits in (
        (1, 32, 8, 128, 128, 256, 4), (2, 32, 8, 128, 128, 256, 4), (1, 32, 32, 128, 128, 1024, 4),
        (16, 32, 32, 128, 128, 512, 2), (1, 9, 3, 64, 64, 48, 4), (1, 6, 2, 80, 40, 40, 16),
    ):  # fmt: skip
        ones, theta = np.ones(n_kv * d), np.ones(n_rot // 2)
        basis = latent.make_basis(np.ones((n_kv * d, rank)), ones, theta, 1.0, n_kv, CPU)
        latents = torch.zeros(n_batch, 512, rank, dtype=torch.float16)
        shape = n_batch, 512, n_kv, latent.head_bytes(d, bits)
        values = torch.zeros(shape, dtype=torch.uint8)
        idx = torch.zeros(n_batch, 1, m, dtype=torch.int32)
        counts = torch.zeros(n_batch, 1, dtype=torch.int32)
        out = attention.empty_pieces(n_batch, n_head, n_kv, d, m, CPU)
        yield partial(
            attention.attend_latents, torch.zeros(n_batch, n_head, d), idx, counts, latents,
            values, basis, bits, d, 1.0, 16, out,
        )  # fmt: skip
