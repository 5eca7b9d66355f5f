"""Random weights in GGUF's formats: every bit pattern of the quants, finite scales."""

from __future__ import annotations

import numpy as np
from gguf import GGMLQuantizationType
from gguf.constants import GGML_QUANT_SIZES

# Byte offsets of the f16 scales of each block format (MXFP4 has an 8-bit exponent instead).
HALF_SCALES = {
    "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,), "Q2_K": (80, 82),
    "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "IQ4_NL": (0,), "IQ4_XS": (0,),
    "MXFP4": (),
}  # fmt: skip


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
    for at in HALF_SCALES[name]:
        scale = (rng.standard_normal((n_rows, n_blocks)) * 0.1).astype(np.float16)
        blocks[:, :, at : at + 2] = scale[..., None].view(np.uint8)
    if name == "MXFP4":
        blocks[:, :, 0] = rng.integers(118, 132, (n_rows, n_blocks))
        blocks[0, 0, 0] = 1  # a subnormal scale
    return blocks.reshape(n_rows, -1)
