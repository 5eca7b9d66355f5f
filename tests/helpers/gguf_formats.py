"""What the gguf package lacks of ggml's weight formats, added to its tables when this is imported.

No gguf has a number for Q2_0, and none dequantises Q1_0; the oldest that we accept know no NVFP4.
They are written here in numpy from their definition. What ggml itself makes of such blocks is
recorded in tests/cpu/weights/test_grids.py.
"""

from __future__ import annotations

import numpy as np
from gguf import GGMLQuantizationType, quants
from gguf.constants import GGML_QUANT_SIZES

_Quant = vars(quants)["__Quant"]  # its subclasses are what gguf can dequantise
_NEW = {"NVFP4": (40, 64, 36), "Q1_0": (41, 128, 18), "Q2_0": (42, 64, 18)}
_FOUR_BITS = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)

for _name, (_number, *_sizes) in _NEW.items():
    if _name not in GGMLQuantizationType.__members__:
        _member = int.__new__(GGMLQuantizationType, _number)
        _member._name_, _member._value_ = _name, _number
        GGMLQuantizationType._member_map_[_name] = _member
        GGMLQuantizationType._value2member_map_[_number] = _member
        GGML_QUANT_SIZES[_member] = tuple(_sizes)


def _is_missing(name: str) -> bool:
    """Whether gguf cannot dequantise a type of ``_NEW``."""
    try:
        quants.dequantize(np.zeros(_NEW[name][2], np.uint8), GGMLQuantizationType[name])
    except NotImplementedError:
        return True
    return False


def half_scales(blocks: np.ndarray) -> np.ndarray:
    """f32 (n, 1): the f16 that blocks (n, bytes) begin with."""
    return np.ascontiguousarray(blocks[:, :2]).view(np.float16).astype(np.float32)


def q1_0(blocks: np.ndarray) -> np.ndarray:
    """A bit an element, the lowest first: 1 is the scale, 0 its negative."""
    bits = np.unpackbits(blocks[:, 2:], axis=-1, bitorder="little")
    return np.where(bits == 1, half_scales(blocks), -half_scales(blocks))


def q2_0(blocks: np.ndarray) -> np.ndarray:
    """Two bits an element, the lowest first: 0 to 3 are -1 to 2 scales."""
    fields = blocks[:, 2:, None] >> np.arange(0, 8, 2, dtype=np.uint8) & 3
    return half_scales(blocks) * (fields.reshape(len(blocks), -1).astype(np.float32) - 1)


def nvfp4(blocks: np.ndarray) -> np.ndarray:
    """16 elements of E2M1 under an E4M3 without its sign: low halves of 8 bytes, then high ones."""
    scale = blocks[:, :4].astype(int) & 127
    exponent, mantissa = scale >> 3, scale & 7
    number = np.where(exponent, (8 + mantissa) * 2.0 ** (exponent - 11), mantissa * 2.0**-10)
    number = np.where(blocks[:, :4] == 127, 0.0, number)
    bytes_ = blocks[:, 4:].reshape(-1, 4, 8)
    nibbles = np.concatenate([bytes_ & 15, bytes_ >> 4], -1)
    values = np.array(_FOUR_BITS)[nibbles] * number[..., None]
    return values.reshape(len(blocks), -1).astype(np.float32)


DEQUANTIZE = {"NVFP4": nvfp4, "Q1_0": q1_0, "Q2_0": q2_0}
for _name, _function in DEQUANTIZE.items():
    if _is_missing(_name):
        _body = {"dequantize_blocks": staticmethod(_function)}
        type(_Quant)(_name, (_Quant,), _body, qtype=GGMLQuantizationType[_name])
