"""bf16 arrays. numpy has no bf16, so they are arrays of uint16: the upper halves of f32."""

import numpy as np


def as_f32(x: np.ndarray) -> np.ndarray:
    """Returns an f32 or bf16 array as f32; may share its memory."""
    if x.dtype == np.uint16:
        return (x.astype(np.uint32) << 16).view(np.float32)
    return x


def as_type_of(other: np.ndarray, x: np.ndarray) -> np.ndarray:
    """Returns finite f32 ``x`` in the type of ``other`` (f32 or bf16), rounded to nearest even."""
    if other.dtype != np.uint16:
        return x
    bits = np.ascontiguousarray(x).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)
