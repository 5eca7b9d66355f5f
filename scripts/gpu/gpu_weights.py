"""The products with quantised weights of scripts/gpu/bench, at the sizes of Llama-3.1-8B."""

import math
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from gpu_timing import time_calls

from sparsekv_cli.kernels.weights import dot
from sparsekv_cli.kernels.weights.packed import FLOATS, PACKINGS, PackedMatrix, repack

FORMATS = ("Q4_K", "Q6_K", "Q8_0", "Q4_0", "Q5_K", "BF16")
SIZES = (("k", 1024, 4096), ("o", 4096, 4096), ("gate, up", 28672, 4096), ("down", 4096, 14336))
BATCHES = (1, 2, 4, 8, 16)
MOVED = 400 << 20  # bytes of several matrices together, so that no cache holds them


def random_matrix(
    name: str, n_rows: int, n_columns: int, device: torch.device, end: int = 256
) -> PackedMatrix:
    """Random bytes below ``end``: of 256 the scales may be anything, which takes as long; of 60
    they are numbers up to 1."""
    if name in FLOATS:
        n_bytes = n_columns * FLOATS[name].itemsize
    else:
        n_bytes = n_columns // PACKINGS[name].n_elements * PACKINGS[name].n_bytes
    rows = torch.randint(0, end, (n_rows, n_bytes), dtype=torch.uint8, device=device)
    return repack(name, rows, n_columns)


def weight_rows(
    name: str, device: torch.device, tiny: bool, bandwidth: float
) -> Iterator[dict[str, Any]]:
    """A row a size and number of vectors, of the format ``name``; bandwidth in GB/s."""
    for label, n_rows, n_columns in (("tiny", 64, 512),) if tiny else SIZES:
        first = random_matrix(name, n_rows, n_columns, device)
        more = 0 if tiny else min(15, math.ceil(MOVED / first.nbytes) - 1)
        copies = [random_matrix(name, n_rows, n_columns, device) for _ in range(more)]
        for n_batch in (3,) if tiny else BATCHES:
            x = torch.randn(n_batch, n_columns, device=device)
            calls = [partial(dot.multiply, w, x) for w in (first, *copies)]
            ms = time_calls(calls, device)
            moved = first.nbytes / ms / 1e6
            yield {
                "weights": label, "format": name, "B": n_batch, "ms": ms, "GB/s": moved,
                "of bandwidth": moved / bandwidth,
            }  # fmt: skip
