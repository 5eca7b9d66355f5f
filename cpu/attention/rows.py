"""Memory layout of rows of K and V: f16, or quantised as llama.cpp's cache types of these names.

A row has ``width`` elements, a multiple of 16. An f16 row is only its elements. A quantised row has
blocks of 32 elements (the last may have 16). It holds the quants of all blocks, then the other
numbers of all blocks:

    q8_0   32 int8                                          then a scale
    q5_1   16 bytes: element i in the low four bits of      then a scale and a minimum, after the
           byte i, element 16 + i in the high four          fifth bits of all blocks, 4 bytes each
    q4_0   the same 16 bytes                                then a scale

Scales and minima are f16. An element is q * scale in q8_0, (q - 8) * scale in q4_0 and q * scale +
minimum in q5_1. The rows of a kv head are contiguous. An array called the layout has their
addresses.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from sparsekv_cli.cpu.jit.kernel import njit

GATHER = 1  # mode of attention/tile.py: rows are listed by number
F16, Q8_0, Q5_1, Q4_0 = 0, 2, 4, 6  # the kinds of rows; kind + GATHER is a mode
KIND = 6  # the bits of a mode that are its kind
QUANT_BLOCK = 32  # elements that share a scale (ggml's QK8_0)
NIBBLES = 16  # bytes of a block's quants in q5_1 and q4_0
HIGH_BITS = 4  # bytes of a block's fifth bits in q5_1
INFINITE = 0x7C00  # the bits of f16's infinity; those of a NaN are more
LAST = QUANT_BLOCK // 2  # elements of a last block that is not whole

# Columns of a layout, int64 (8,): addresses of K and V, bytes between kv heads and between rows,
# kinds of rows.
K, V, K_HEAD, V_HEAD, K_ROW, V_ROW, K_KIND, V_KIND = range(8)


def n_blocks(width: int) -> int:
    """Returns the number of blocks of a quantised row."""
    return -(-width // QUANT_BLOCK)


def row_bytes(kind: int, width: int) -> int:
    """Returns the bytes of one row."""
    if kind == F16:
        return 2 * width
    quants = width if kind == Q8_0 else NIBBLES * n_blocks(width)
    return quants + {Q8_0: 2, Q5_1: HIGH_BITS + 4, Q4_0: 2}[kind] * n_blocks(width)


def are_finite(rows: np.ndarray, kind: int, width: int) -> bool:
    """Returns whether all elements of rows (..., row) are finite: their halves or their scales."""
    if kind != F16:  # the halves are at the end
        rows = np.ascontiguousarray(rows[..., -(4 if kind == Q5_1 else 2) * n_blocks(width) :])
    magnitudes = rows.view(np.uint16) & np.uint16(0x7FFF)
    return not magnitudes.size or bool(magnitudes.max() < INFINITE)


def layout_of(k: np.ndarray, v: np.ndarray, k_kind: int = F16, v_kind: int = F16) -> np.ndarray:
    """Returns the layout of K and V, (kv head, capacity, row) each; the caller keeps them alive."""
    places = (x.__array_interface__["data"][0] for x in (k, v))
    strides = k.strides[0], v.strides[0], k.strides[1], v.strides[1]
    return np.array([*places, *strides, k_kind, v_kind], np.int64)


class HeadRows(NamedTuple):
    """The rows of a kv head that its query heads attend to.

    They are the first n rows. With GATHER in the mode, they are the rows with n numbers.
    """

    k: np.int64  # address of the first row
    v: np.int64
    k_row: np.int64  # bytes of a row
    v_row: np.int64
    mode: np.int64  # kind of K + 4 times kind of V, and GATHER
    numbers: np.int64  # address of int32 numbers of rows; 0 without GATHER
    n: np.int64


@njit(cache=True, nogil=True)
def successive_rows(layout, kv_head, first, count):
    """Returns ``count`` rows of a kv head from row ``first`` on, as HeadRows."""
    k = layout[K] + kv_head * layout[K_HEAD] + first * layout[K_ROW]
    v = layout[V] + kv_head * layout[V_HEAD] + first * layout[V_ROW]
    mode = layout[K_KIND] | layout[V_KIND] << 2
    return HeadRows(k, v, layout[K_ROW], layout[V_ROW], mode, np.int64(0), np.int64(count))


@njit(cache=True, nogil=True)
def listed_rows(layout, kv_head, numbers, count):
    """Returns a kv head's rows with ``count`` int32 numbers, at an address, as HeadRows."""
    k, v, k_row, v_row, mode, _, n = successive_rows(layout, kv_head, 0, count)
    return HeadRows(k, v, k_row, v_row, mode | GATHER, np.int64(numbers), n)


def quantize_rows_ref(x: np.ndarray, kind: int = Q8_0) -> np.ndarray:
    """Returns f32 (..., width) as rows of a quantised kind, uint8 (..., bytes).

    The result is that of ggml's quantize_row_q8_0, q5_1 and q4_0, which compute with scales before
    they are rounded to f16. A q8_0 block whose scale is 0 in f16 has quants 0. In q4_0 the element
    with the largest magnitude gets -8, the end of the range. If both signs have that magnitude, the
    positive element gets it.
    """
    n, width = n_blocks(x.shape[-1]), x.shape[-1]
    padding = [(0, 0)] * (x.ndim - 1) + [(0, QUANT_BLOCK * n - width)]
    blocks = np.pad(x, padding).reshape(*x.shape[:-1], n, QUANT_BLOCK)
    if kind == Q8_0:
        scale = np.abs(blocks).max(-1, keepdims=True) / np.float32(127)
        half = scale.astype(np.float16)
        q = np.rint(blocks * _inverse(np.where(half == 0, np.float32(0), scale))).astype(np.int8)
        return _joined(q.reshape(*x.shape[:-1], -1)[..., :width], half)
    if width % QUANT_BLOCK:  # the last block has 16 elements
        blocks[..., -1, LAST:] = blocks[..., -1, :1]
    low, high = blocks.min(-1, keepdims=True), blocks.max(-1, keepdims=True)
    if kind == Q4_0:
        scale = np.where(high >= -low, high, low) / np.float32(-8)
        q = np.minimum(blocks * _inverse(scale) + np.float32(8.5), np.float32(15)).astype(np.uint8)
    else:
        scale = (high - low) / np.float32(31)
        q = ((blocks - low) * _inverse(scale) + np.float32(0.5)).astype(np.uint8)
    if width % QUANT_BLOCK:
        q[..., -1, LAST:] = 0
    if kind == Q4_0:
        return _joined(_nibbles(q), scale.astype(np.float16))
    fifth = np.packbits(q >> 4, axis=-1, bitorder="little")
    return _joined(_nibbles(q), fifth, np.concatenate([scale, low], -1).astype(np.float16))


def _inverse(scale: np.ndarray) -> np.ndarray:
    """Returns 1 / scale in f32, or 0 for 0."""
    return np.where(scale == 0, np.float32(0), np.float32(1) / np.where(scale == 0, 1, scale))


def _nibbles(q: np.ndarray) -> np.ndarray:
    """Returns uint8 (..., 32) as (..., 16): each byte has the low four bits of two elements."""
    return q[..., :LAST] & 15 | (q[..., LAST:] & 15) << 4


def _joined(*parts: np.ndarray) -> np.ndarray:
    """Concatenates the bytes of all parts: uint8 (..., bytes)."""
    lead = parts[-1].shape[:-2]
    flat = [np.ascontiguousarray(part).reshape(*lead, -1).view(np.uint8) for part in parts]
    return np.concatenate(flat, -1)


def dequantize_rows_ref(rows: np.ndarray, width: int, kind: int = Q8_0) -> np.ndarray:
    """Returns rows of a quantised kind, uint8 (..., bytes), as f32 (..., width), rounded once."""
    n, lead = n_blocks(width), rows.shape[:-1]
    if kind == Q8_0:
        values = rows[..., :width].view(np.int8).astype(np.float32)
        scales = np.ascontiguousarray(rows[..., width:]).view(np.float16).astype(np.float32)
        for block in range(n):
            values[..., QUANT_BLOCK * block : QUANT_BLOCK * (block + 1)] *= scales[..., block, None]
        return values
    packed = rows[..., : NIBBLES * n].reshape(*lead, n, NIBBLES)
    q = np.concatenate([packed & 15, packed >> 4], -1).astype(np.float32)  # products are exact
    if kind == Q4_0:
        scales = np.ascontiguousarray(rows[..., NIBBLES * n :]).view(np.float16)
        values = (q - 8) * scales[..., None].astype(np.float32)
    else:
        at = (NIBBLES + HIGH_BITS) * n
        fifth = rows[..., NIBBLES * n : at].reshape(*lead, n, HIGH_BITS)
        q += 16 * np.unpackbits(fifth, axis=-1, bitorder="little")
        pairs = np.ascontiguousarray(rows[..., at:]).view(np.float16).astype(np.float32)
        pairs = pairs.reshape(*lead, n, 2)
        values = q * pairs[..., :1] + pairs[..., 1:]
    return values.reshape(*lead, -1)[..., :width]
