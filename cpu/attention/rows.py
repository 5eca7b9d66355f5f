"""How rows of K and V lie in memory: as f16, or as q8_0, llama.cpp's cache type of that name.

A row has ``width`` elements, a multiple of 16. An f16 row is just these. A q8_0 row is ``width``
int8, then one f16 scale for every 32 of them (the last scale may stand for 16): its element c is
int8[c] * scale[c // 32]. All rows of a kv head follow each other; one array says where they are.
"""

from __future__ import annotations

import numpy as np

GATHER = 1  # mode of attention/tile.py: rows are listed by number
F16, Q8_0 = 0, 2  # the kinds of rows; kind + GATHER is a mode
QUANT_BLOCK = 32  # elements that share a scale (ggml's QK8_0)

# Columns of a layout, int64 (8,): addresses of K and V, bytes between kv heads and between rows,
# kinds of rows.
K, V, K_HEAD, V_HEAD, K_ROW, V_ROW, K_KIND, V_KIND = range(8)


def row_bytes(kind: int, width: int) -> int:
    """Bytes of one row."""
    return width + 2 * -(-width // QUANT_BLOCK) if kind == Q8_0 else 2 * width


def layout_of(k: np.ndarray, v: np.ndarray, k_kind: int = F16, v_kind: int = F16) -> np.ndarray:
    """The layout of K and V, (kv head, capacity, row) each; the caller keeps them alive."""
    places = (x.__array_interface__["data"][0] for x in (k, v))
    strides = k.strides[0], v.strides[0], k.strides[1], v.strides[1]
    return np.array([*places, *strides, k_kind, v_kind], np.int64)


def quantize_rows_ref(x: np.ndarray) -> np.ndarray:
    """f32 (..., width) -> q8_0 rows, uint8 (..., bytes).

    The scale is the largest magnitude / 127 and quants are rounded to the nearest with the scale
    before it is rounded to f16, as in ggml's quantize_row_q8_0. A block whose scale is 0 in f16 has
    quants 0.
    """
    width = x.shape[-1]
    quants, scales = [], []
    for start in range(0, width, QUANT_BLOCK):
        block = x[..., start : start + QUANT_BLOCK]
        scale = np.abs(block).max(-1, keepdims=True) / np.float32(127)
        rounded = scale.astype(np.float16)
        inverse = np.float32(1) / np.where(rounded == 0, np.float32(1), scale)
        quants.append(np.rint(np.where(rounded == 0, np.float32(0), block * inverse)))
        scales.append(rounded)
    parts = [np.concatenate(quants, -1).astype(np.int8), np.concatenate(scales, -1)]
    return np.concatenate([np.ascontiguousarray(part).view(np.uint8) for part in parts], -1)


def dequantize_rows_ref(rows: np.ndarray, width: int) -> np.ndarray:
    """q8_0 rows, uint8 (..., bytes) -> f32 (..., width), exactly."""
    quants = rows[..., :width].view(np.int8).astype(np.float32)
    scales = np.ascontiguousarray(rows[..., width:]).view(np.float16).astype(np.float32)
    return quants * np.repeat(scales, QUANT_BLOCK, axis=-1)[..., :width]
