"""Arrays as kernels want them in memory."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import DTypeLike

LINE = 64  # bytes, a cache line


def on_lines(shape: Any, dtype: DTypeLike, *, zeros: bool = False) -> np.ndarray:
    """An array, uninitialised or of zeros, that begins on a cache line.

    numpy's own begin 16 bytes behind one where they are large (glibc): a row of 128 bytes is on
    three lines then instead of two, and gathering such rows from memory takes half as long again.
    """
    count, dtype = int(np.prod(shape, dtype=np.int64)), np.dtype(dtype)
    room = (np.zeros if zeros else np.empty)(count * dtype.itemsize + LINE, np.uint8)
    start = -room.ctypes.data % LINE
    return room[start : start + count * dtype.itemsize].view(dtype).reshape(shape)
