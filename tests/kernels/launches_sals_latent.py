"""Launches of kernels/sals/latent.py to compile; see test_compile.py."""

from collections.abc import Callable, Iterator
from functools import partial

import torch

from sparsekv_cli.kernels.sals import latent

CPU = torch.device("cpu")


def launches() -> Iterator[Callable[[], object]]:
    for n_kv, d, rank, bits in (
        (8, 128, 256, 4),
        (32, 128, 1024, 4),
        (3, 64, 48, 2),
        (2, 80, 40, 16),
    ):
        exact = latent.empty_exact(2, n_kv, (d, d), 16, 64, 80, CPU)
        latents = torch.zeros(2, 512, rank, dtype=torch.float16)
        size = latent.head_bytes(d, bits)
        values = torch.zeros(2, 512, n_kv, size, dtype=torch.uint8)
        z, new, n = torch.zeros(2, rank), torch.zeros(2, n_kv, d), torch.zeros(2, dtype=torch.int32)
        yield partial(
            latent.append_latent, z, new, new, n, n, latents, values, exact, 1.0, bits, 16, 64
        )
