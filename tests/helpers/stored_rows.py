"""K and V as a layer stores them, in every cache type, for tests of kernels."""

from typing import NamedTuple

import numpy as np

from sparsekv_cli.cpu.attention.rows import (
    F16,
    Q4_0,
    Q5_1,
    Q8_0,
    dequantize_rows_ref,
    layout_of,
    quantize_rows_ref,
)
from sparsekv_cli.cpu.attention.tile import prepare

# Of K and V; all are compiled, so that tests may call kernels with them.
KINDS = [(F16, F16), (Q8_0, Q8_0), (F16, Q8_0), (Q8_0, F16), (Q5_1, Q4_0), (Q4_0, Q5_1)]
for kind in (Q8_0, Q5_1, Q4_0):
    prepare(kind)


class Stored(NamedTuple):
    """Rows in memory, (G, n, items), and what they stand for, f32 (G, n, d)."""

    array: np.ndarray
    kind: int
    exact: np.ndarray


def store(x: np.ndarray, kind: int) -> Stored:
    """f32 (G, n, d), d a multiple of 16, as rows of ``kind``."""
    if kind != F16:
        rows = quantize_rows_ref(x.astype(np.float32), kind)
        return Stored(rows, kind, dequantize_rows_ref(rows, x.shape[-1], kind))
    half = x.astype(np.float16)
    return Stored(half, kind, half.astype(np.float32))


def layout(k: Stored, v: Stored) -> np.ndarray:
    """What kernels take: int64 (8,), see cpu/attention/rows.py."""
    return layout_of(k.array, v.array, k.kind, v.kind)
