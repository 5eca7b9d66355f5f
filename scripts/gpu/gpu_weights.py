"""The products with quantised weights of scripts/gpu/bench, at the sizes of Llama-3.1-8B."""

import math
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from gpu_timing import time_calls

from sparsekv_cli.kernels.weights import dot
from sparsekv_cli.kernels.weights.packed import FLOATS, PACKINGS, PackedMatrix, repack

PAIR = "Q4_K", "Q6_K"  # of q and k, and of v
PAIR_SIZES = 5120, 1024  # rows
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


def pair_rows(device: torch.device, tiny: bool, bandwidth: float) -> Iterator[dict[str, Any]]:
    """Products of q, k and v of two formats, in two launches and in one."""
    n_columns = 512 if tiny else 4096
    sets = [
        tuple(
            random_matrix(name, 64 if tiny else n, n_columns, device)
            for name, n in zip(PAIR, PAIR_SIZES, strict=True)
        )
        for _ in range(1 if tiny else 16)
    ]

    def apart(pair: tuple[PackedMatrix, ...], x: torch.Tensor) -> None:
        for each in pair:
            dot.multiply(each, x)

    n_bytes = sum(each.nbytes for each in sets[0])
    ways = {"apart": apart, "together": lambda pair, x: dot.multiply_pair(*pair, x)}
    for label, multiply in ways.items():
        for n_batch in (3,) if tiny else BATCHES:
            x = torch.randn(n_batch, n_columns, device=device)
            ms = time_calls([partial(multiply, pair, x) for pair in sets], device)
            yield _row(f"q, k, v {label}", "Q4_K and Q6_K", n_batch, ms, n_bytes, bandwidth)


def _row(
    label: str, name: str, n_batch: int, ms: float, n_bytes: int, bandwidth: float
) -> dict[str, Any]:
    moved = n_bytes / ms / 1e6
    return {
        "weights": label, "format": name, "B": n_batch, "ms": ms, "GB/s": moved,
        "of bandwidth": moved / bandwidth,
    }  # fmt: skip


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
            ways = {label: False}
            if n_batch > dot.MAX_FUSED and name not in FLOATS:
                ways[f"{label} joined"] = True
            for way, joined in ways.items():
                calls = [partial(dot.multiply, w, x, joined=joined) for w in (first, *copies)]
                ms = time_calls(calls, device)
                yield _row(way, name, n_batch, ms, first.nbytes, bandwidth)
