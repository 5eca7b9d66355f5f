"""The products with quantised weights of scripts/gpu/bench, at the sizes of Llama-3.1-8B.

They are measured as they are, or with each of some tilings.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import product
from typing import Any

import torch
from gpu_timing import time_calls

from sparsekv_cli.kernels.weights import dot
from sparsekv_cli.kernels.weights.packed import FLOATS, PACKINGS, PackedMatrix, repack

FORMATS = ("Q4_0", "Q8_0", "Q4_K", "Q5_K", "Q6_K", "BF16")
SIZES = (("k", 1024, 4096), ("o", 4096, 4096), ("gate, up", 28672, 4096), ("down", 4096, 14336))
BATCHES = (1, 2, 4, 16)
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
            calls = [partial(dot.matvec, w, x) for w in (first, *copies)]
            ms = time_calls(calls, device).median
            moved = first.nbytes / ms / 1e6
            yield {
                "weights": label, "format": name, "B": n_batch, "ms": ms, "GB/s": moved,
                "of bandwidth": moved / bandwidth,
            }  # fmt: skip


# Rows of a program and warps along them for one vector; for several, of the tensor-core kernel also
# units of a step and stages of its pipeline.
TILINGS = [{"rows": rows, "warps": warps} for rows, warps in product((1, 2, 4, 8), (1, 2, 4, 8))]
MATMUL_TILINGS = [
    {"rows": rows, "units": units, "warps": warps, "stages": stages}
    for rows, units, warps, stages in product((32, 64, 128), (2, 4, 8), (4, 8), (2, 3, 4))
]


@contextmanager
def tiled(rows: int, warps: int, units: int = 0, stages: int = 0) -> Iterator[None]:
    """Products with one vector in this tiling; with several, if units and stages are given."""
    values: dict[str, Any] = {
        "_rows_a_program": lambda n_rows: rows, "_warps_along": lambda n, a_warp: warps,
    }  # fmt: skip
    if units:
        values = {
            "MATMUL_ROWS": rows, "MATMUL_UNITS": units, "MATMUL_WARPS": warps,
            "MATMUL_STAGES": stages,
        }  # fmt: skip
    before = {name: getattr(dot, name) for name in values}
    vars(dot).update(values)
    try:
        yield
    finally:
        vars(dot).update(before)


def sweep_rows(
    name: str, device: torch.device, tiny: bool, bandwidth: float
) -> Iterator[dict[str, Any]]:
    """A row a tiling, of the format ``name``: faster is how many times as fast as what is used.

    What does not compile, or not fit a multiprocessor, has no time.
    """
    label, n_rows, n_columns = ("tiny", 64, 512) if tiny else SIZES[2]
    w = random_matrix(name, n_rows, n_columns, device, end=60)
    for n_batch, tilings in ((1, TILINGS), (16, MATMUL_TILINGS)):
        x = torch.randn(n_batch, n_columns, device=device)
        call = partial(dot.matvec, w, x)
        expected, base = call(), time_calls([call], device).median
        for tiling in tilings[-1:] if tiny else tilings:
            row = {"weights": label, "format": name, "B": n_batch, **tiling}
            with tiled(**tiling):
                try:
                    out = call()
                except Exception as error:
                    yield {**row, "error": type(error).__name__}
                    continue
                ms = time_calls([call], device).median
            same = torch.allclose(out, expected, rtol=1e-3, atol=1e-3 * float(expected.abs().max()))
            moved = w.nbytes / ms / 1e6
            yield {
                **row, "ms": ms, "faster": base / ms, "of bandwidth": moved / bandwidth, "ok": same
            }  # fmt: skip
