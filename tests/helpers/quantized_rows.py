"""Random weights in GGUF's formats: every bit pattern of the quants, finite scales."""

from __future__ import annotations

import gguf_formats  # noqa: F401
import numpy as np
from gguf import GGMLQuantizationType
from gguf.constants import GGML_QUANT_SIZES

from sparsekv_cli.cpu.weights.types import GGMLType


def set_iq1_m_scale(blocks: np.ndarray, scale: np.ndarray) -> None:
    """Writes f16 scales (...,) to blocks (..., 56) of IQ1_M: four bits on top of each last word."""
    words = blocks[..., 48:].view("<u2")
    bits = scale[..., None].view(np.uint16) >> np.array([0, 4, 8, 12], np.uint16)
    words[...] = words & 0x0FFF | bits << 12


def random_rows(name: str, n_rows: int, n_columns: int, seed: int = 0) -> np.ndarray:
    """uint8 (n_rows, row bytes)."""
    rng = np.random.default_rng(seed)
    if name in ("F32", "F16", "BF16"):
        values = rng.standard_normal((n_rows, n_columns)).astype(np.float32)
        if name == "F32":
            return values.view(np.uint8)
        if name == "F16":
            return values.astype(np.float16).view(np.uint8)
        return (values.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
    n_elements, n_bytes = GGML_QUANT_SIZES[GGMLQuantizationType[name]]
    n_blocks = n_columns // n_elements
    blocks = rng.integers(0, 256, (n_rows, n_blocks, n_bytes), dtype=np.uint8)
    for at in (first + 2 * i for first, n in GGMLType[name].scales for i in range(n)):
        scale = (rng.standard_normal((n_rows, n_blocks)) * 0.1).astype(np.float16)
        blocks[:, :, at : at + 2] = scale[..., None].view(np.uint8)
    if name == "IQ1_M":
        scale = (rng.standard_normal((n_rows, n_blocks)) * 0.1).astype(np.float16)
        set_iq1_m_scale(blocks, scale)
    if name == "MXFP4":
        blocks[:, :, 0] = rng.integers(118, 132, (n_rows, n_blocks))
        blocks[0, 0, 0] = 1  # a subnormal scale
    return blocks.reshape(n_rows, -1)
