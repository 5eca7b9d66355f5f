"""The tensor types of ggml: number, block length and block bytes, as data.

Source: ggml's ``enum ggml_type`` and ``type_traits``. The table equals that of ``gguf.constants``
(``GGMLQuantizationType``, ``GGML_QUANT_SIZES``); a test compares them. It is repeated here because
importing ``gguf`` takes as long as opening a model. A file can be opened without
weights/formats.py, which has the decoders.
"""

from __future__ import annotations

from enum import IntEnum


class GGMLType(IntEnum):
    """Number of a tensor type; equal (and hash-equal) to ``gguf.GGMLQuantizationType``."""

    block: int  # elements of one block
    block_bytes: int  # bytes of one block
    scales: tuple[tuple[int, int], ...]  # (first byte, count) of the f16 scales of one block

    def __new__(
        cls, number: int, block: int, block_bytes: int, scales: tuple[tuple[int, int], ...] = ()
    ) -> GGMLType:
        member = int.__new__(cls, number)
        member._value_ = number
        member.block = block
        member.block_bytes = block_bytes
        member.scales = scales
        return member

    F32 = 0, 1, 4
    F16 = 1, 1, 2
    Q4_0 = 2, 32, 18, ((0, 1),)  # d, 16 nibble bytes
    Q4_1 = 3, 32, 20, ((0, 2),)  # d, m, 16 nibble bytes
    Q5_0 = 6, 32, 22, ((0, 1),)  # d, 4 high-bit bytes, 16 nibble bytes
    Q5_1 = 7, 32, 24, ((0, 2),)  # d, m, 4 high-bit bytes, 16 nibble bytes
    Q8_0 = 8, 32, 34, ((0, 1),)  # d, 32 x i8
    Q8_1 = 9, 32, 40, ((0, 2),)  # d, s, 32 x i8
    Q2_K = 10, 256, 84, ((80, 2),)  # 16 scale bytes, 64 quants, d, dmin
    Q3_K = 11, 256, 110, ((108, 1),)  # 32 high-bit bytes, 64 quants, 12 scale bytes, d
    Q4_K = 12, 256, 144, ((0, 2),)  # d, dmin, 12 scale bytes, 128 nibble bytes
    Q5_K = 13, 256, 176, ((0, 2),)  # d, dmin, 12 scale bytes, 32 high-bit, 128 nibble bytes
    Q6_K = 14, 256, 210, ((208, 1),)  # 128 low, 64 high, 16 x i8 scales, d
    Q8_K = 15, 256, 292  # an f32 scale; never stored in files
    IQ2_XXS = 16, 256, 66, ((0, 1),)
    IQ2_XS = 17, 256, 74, ((0, 1),)
    IQ3_XXS = 18, 256, 98, ((0, 1),)
    IQ1_S = 19, 256, 50, ((0, 1),)
    IQ4_NL = 20, 32, 18, ((0, 1),)  # d, 16 nibble bytes
    IQ3_S = 21, 256, 110, ((0, 1),)
    IQ2_S = 22, 256, 82, ((0, 1),)
    IQ4_XS = 23, 256, 136, ((0, 1),)  # d, 2 scale-high bytes, 4 scale-low bytes, 128 nibble bytes
    I8 = 24, 1, 1
    I16 = 25, 1, 2
    I32 = 26, 1, 4
    I64 = 27, 1, 8
    F64 = 28, 1, 8
    IQ1_M = 29, 256, 56  # its f16 scale is scattered over the high nibbles of four words
    BF16 = 30, 1, 2
    TQ1_0 = 34, 256, 54, ((52, 1),)
    TQ2_0 = 35, 256, 66, ((64, 1),)
    MXFP4 = 39, 32, 17  # one E8M0 byte (no infinity; 255 is NaN), 16 nibble bytes
    NVFP4 = 40, 64, 36  # four scales of a byte (none is NaN or infinite), 32 nibble bytes
    Q1_0 = 41, 128, 18, ((0, 1),)  # d, 16 bytes of a bit an element
    Q2_0 = 42, 64, 18, ((0, 1),)  # d, 16 bytes of two bits an element

    def row_bytes(self, n_elements: int) -> int:
        """Returns the bytes of a row of ``n_elements`` (a multiple of ``block``)."""
        return n_elements // self.block * self.block_bytes


#: The types that no weights have: integers, doubles, and the types of ggml's rounded activations.
_NOT_WEIGHTS = ("I8", "I16", "I32", "I64", "F64", "Q8_1", "Q8_K")

#: The types that the decoder computes with, each a record in weights/formats.py. Other types can
#: only be inspected.
DECODABLE_TYPES = frozenset(kind for kind in GGMLType if kind.name not in _NOT_WEIGHTS)

#: Numbers that ggml has taken out of use (ggml.h, comments in ``enum ggml_type``).
REMOVED_TYPES: dict[int, str] = {
    4: "Q4_2",
    5: "Q4_3",
    31: "Q4_0_4_4",
    32: "Q4_0_4_8",
    33: "Q4_0_8_8",
    36: "IQ4_NL_4_4",
    37: "IQ4_NL_4_8",
    38: "IQ4_NL_8_8",
}
