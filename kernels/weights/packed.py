"""Layout of quantised weights on the GPU: planes of integers, of scales and of minima.

With blocks of 18, 20, 34, 144 or 210 bytes no 16-byte load is aligned. So a matrix is rearranged
once when it is loaded. Every bit is kept. A row is cut into units of four 32-bit words, which one
thread loads at a time. Field k of word t is element 4 k + t of the unit. A unit has 32 elements of
4 bits, or 16 elements of 8 bits. Bits above the fourth have their own plane, with the fields of a
word side by side. A weight is (q - zero) * scale + minimum. In the K formats scale and minimum are
small integers times a float that 256 elements share. The scale and the minimum of a group of 32
elements lie in one word. Unpacked 6-bit scales make Q4_K and Q5_K 2.8% and 2.3% larger. Other
formats keep their size.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from itertools import groupby
from typing import Any

import torch

from sparsekv_cli.kernels.checks import check

ROWS_AT_ONCE = 1 << 24  # elements that are rearranged at a time; this bounds the memory
SUPER = 256  # elements of a block of the K formats


@dataclass(frozen=True)
class PackedMatrix:
    """W (rows, columns) on a device, n_unit units a row. Planes that a format lacks are None.

    low: int32 (rows, 4 n_unit), or plain floats (rows, columns). high (rows, 4 n_unit): uint8 for
    one bit a field, int16 for two bits. scale (rows, columns / 32): f16. With a minimum it is
    int32, the scale in the low f16. In the K formats it is int16, two bytes: scale and minimum.
    Q6_K has the signed scales of the first and of the second 16 elements. super_scale (rows,
    columns / 256), the factor of these: int32, two f16 for scale and minus the minimum, or f16
    (Q6_K).
    """

    name: str  # GGUF's name of the format
    n_rows: int
    n_columns: int
    low: torch.Tensor
    high: torch.Tensor | None = None
    scale: torch.Tensor | None = None
    super_scale: torch.Tensor | None = None

    @property
    def planes(self) -> list[torch.Tensor]:
        """The planes that this format has."""
        values = (getattr(self, f.name) for f in fields(self))
        return [value for value in values if isinstance(value, torch.Tensor)]

    @property
    def nbytes(self) -> int:
        return sum(plane.nbytes for plane in self.planes)


@dataclass(frozen=True)
class Packing:
    """How a block format is packed: bits of the planes, zero point, decoder of a block.

    decode: uint8 (n, block bytes) -> integers uint8 (n, elements), then the planes of scales.
    halves: 2 if the first and the second 16 elements of 32 have separate scales, else 1.
    """

    n_elements: int
    n_bytes: int
    low_bits: int
    high_bits: int
    zero: int
    decode: Callable[[torch.Tensor], dict[str, torch.Tensor]]
    has_minimum: bool = False
    halves: int = 1


def _halves(blocks: torch.Tensor, at: int) -> torch.Tensor:
    """Returns the f16 at byte ``at`` of each block, (n, 1)."""
    return blocks[:, at : at + 2].contiguous().view(torch.float16)


def _nibbles(bytes_: torch.Tensor) -> torch.Tensor:
    """uint8 (..., m) -> (..., 2 m): all low nibbles, then all high ones."""
    return torch.cat([bytes_ & 15, bytes_ >> 4], dim=-1)


def _single_bits(bytes_: torch.Tensor) -> torch.Tensor:
    """uint8 (n, m) -> (n, 8 m), lowest bit first."""
    shifts = torch.arange(8, dtype=torch.uint8, device=bytes_.device)
    return ((bytes_[..., None] >> shifts) & 1).flatten(-2)


def _q4_0(b: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"q": _nibbles(b[:, 2:]), "scale": _halves(b, 0)}


def _pairs(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """Joins two numbers to one integer of twice the size, the first in the low half."""
    wide = {1: torch.int16, 2: torch.int32}[first.itemsize]
    return torch.stack([first, second], dim=-1).view(wide).squeeze(-1)


def _q4_1(b: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"q": _nibbles(b[:, 4:]), "scale": _pairs(_halves(b, 0), _halves(b, 2))}


def _q5_0(b: torch.Tensor) -> dict[str, torch.Tensor]:
    q = _nibbles(b[:, 6:]) | _single_bits(b[:, 2:6]) << 4
    return {"q": q, "scale": _halves(b, 0)}


def _q5_1(b: torch.Tensor) -> dict[str, torch.Tensor]:
    q = _nibbles(b[:, 8:]) | _single_bits(b[:, 4:8]) << 4
    return {"q": q, "scale": _pairs(_halves(b, 0), _halves(b, 2))}


def _q8_0(b: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"q": b[:, 2:] ^ 128, "scale": _halves(b, 0)}


def _k_scales(b: torch.Tensor) -> dict[str, torch.Tensor]:
    """Decodes scales and minima of Q4_K and Q5_K: eight 6-bit pairs in the 12 bytes at 4."""
    first, second, third = b[:, 4:8], b[:, 8:12], b[:, 12:16]
    scale = torch.cat([first & 63, (third & 15) | first >> 6 << 4], dim=1)
    minimum = torch.cat([second & 63, third >> 4 | second >> 6 << 4], dim=1)
    return {"scale": _pairs(scale, minimum), "super_scale": _pairs(_halves(b, 0), _halves(b, 2))}


def _q4_k(b: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"q": _nibbles(b[:, 16:].unflatten(1, (4, 32))).flatten(1), **_k_scales(b)}


def _q5_k(b: torch.Tensor) -> dict[str, torch.Tensor]:
    shifts = torch.arange(8, dtype=torch.uint8, device=b.device)[:, None]
    high = (b[:, 16:48].unsqueeze(1) >> shifts) & 1  # (n, 8, 32)
    low = _nibbles(b[:, 48:].unflatten(1, (4, 32))).unflatten(2, (2, 32)).flatten(1, 2)
    return {"q": (low | high << 4).flatten(1), **_k_scales(b)}


def _q6_k(b: torch.Tensor) -> dict[str, torch.Tensor]:
    low = _nibbles(b[:, :128].unflatten(1, (2, 64)))  # (n, 2, 128)
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8, device=b.device)[:, None]
    high = (b[:, 128:192].unflatten(1, (2, 1, 32)) >> shifts) & 3  # (n, 2, 4, 32)
    scales = b[:, 192:208].unflatten(1, (8, 2))  # of the halves of 32 elements
    return {
        "q": (low | high.flatten(2) << 4).flatten(1),
        "scale": _pairs(scales[..., 0], scales[..., 1]),
        "super_scale": _halves(b, 208),
    }


PACKINGS: dict[str, Packing] = {
    "Q4_0": Packing(32, 18, 4, 0, 8, _q4_0),
    "Q4_1": Packing(32, 20, 4, 0, 0, _q4_1, has_minimum=True),
    "Q5_0": Packing(32, 22, 4, 1, 16, _q5_0),
    "Q5_1": Packing(32, 24, 4, 1, 0, _q5_1, has_minimum=True),
    "Q8_0": Packing(32, 34, 8, 0, 128, _q8_0),
    "Q4_K": Packing(256, 144, 4, 0, 0, _q4_k, has_minimum=True),
    "Q5_K": Packing(256, 176, 4, 1, 0, _q5_k, has_minimum=True),
    "Q6_K": Packing(256, 210, 4, 2, 32, _q6_k, halves=2),
}
FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
PACKABLE = (*PACKINGS, *FLOATS)


def _pack_low(q: torch.Tensor, bits: int) -> torch.Tensor:
    """Packs the lowest ``bits`` of q uint8 (rows, columns) in units: int32 (.., columns b / 32)."""
    unit = q.unflatten(1, (-1, 32 // bits, 4)).transpose(2, 3)  # (rows, units, word, field)
    if bits == 4:
        unit = (unit[..., 0::2] & 15) | unit[..., 1::2] << 4
    return unit.contiguous().view(torch.int32).flatten(1)


def _pack_high(q: torch.Tensor, bits: int) -> torch.Tensor:
    """Packs the ``bits`` above the fourth: returns uint8 or int16 (rows, columns / 8)."""
    unit = q.unflatten(1, (-1, 8, 4)).transpose(2, 3) >> 4  # (rows, units, word, field)
    per_byte = 8 // bits
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=q.device)
    packed = (unit.unflatten(3, (-1, per_byte)) << shifts).sum(4, dtype=torch.uint8)
    return packed.contiguous().view(torch.uint8 if bits == 1 else torch.int16).flatten(1)


def _planes(data: torch.Tensor, packing: Packing) -> dict[str, torch.Tensor]:
    """Returns the planes of a few rows, uint8 (rows, row bytes)."""
    n_rows = len(data)
    decoded = packing.decode(data.reshape(-1, packing.n_bytes))
    q = decoded.pop("q").reshape(n_rows, -1)
    planes = {"low": _pack_low(q, packing.low_bits)}
    if packing.high_bits:
        planes["high"] = _pack_high(q, packing.high_bits)
    planes |= {name: plane.reshape(n_rows, -1) for name, plane in decoded.items()}
    return planes


def repack(name: str, data: torch.Tensor, n_columns: int) -> PackedMatrix:
    """Repacks rows in format ``name`` and in file layout, uint8 (rows, row bytes), to planes.

    It runs on the device of ``data``. It reads and writes the matrix about eight times, and needs
    some 100 MB of scratch. Raises ValueError for a format not in PACKABLE, or if the row bytes do
    not fit n_columns.
    """
    if name not in PACKABLE:
        raise ValueError(f"format {name}: expected one of {', '.join(PACKABLE)}")
    check("data", data, torch.uint8, (None, None), data.device)
    n_rows, row_bytes = data.shape
    if name in FLOATS:
        dtype = FLOATS[name]
        if row_bytes != n_columns * dtype.itemsize:
            raise ValueError(f"rows of {row_bytes} bytes: expected {n_columns} elements of {name}")
        return PackedMatrix(name, n_rows, n_columns, data.view(dtype))
    packing = PACKINGS[name]
    if row_bytes * packing.n_elements != n_columns * packing.n_bytes:
        raise ValueError(f"rows of {row_bytes} bytes: expected {n_columns} elements of {name}")
    at_once = max(1, ROWS_AT_ONCE // n_columns)
    parts = [_planes(data[i : i + at_once], packing) for i in range(0, n_rows, at_once)]
    planes = {plane: torch.cat([part[plane] for part in parts]) for plane in parts[0]}
    return PackedMatrix(name, n_rows, n_columns, **planes)


def merge_alike(matrices: Sequence[PackedMatrix]) -> list[PackedMatrix]:
    """Joins neighbours of one format into one matrix with all their rows.

    Matrices that share an input then need one launch, which fills the GPU better.
    """
    merged: list[PackedMatrix] = []
    for _, group in groupby(matrices, lambda matrix: (matrix.name, matrix.n_columns)):
        parts = list(group)
        first = parts[0]
        if len(parts) > 1:
            planes: dict[str, Any] = {
                f.name: torch.cat([getattr(part, f.name) for part in parts])
                for f in fields(first)
                if isinstance(getattr(first, f.name), torch.Tensor)
            }
            first = replace(first, n_rows=sum(part.n_rows for part in parts), **planes)
        merged.append(first)
    return merged


def dequantize_ref(matrix: PackedMatrix) -> torch.Tensor:
    """Reference: returns f32 (rows, columns), bit for bit as ``gguf.quants.dequantize``."""
    if matrix.name in FLOATS:
        return matrix.low.float()
    packing = PACKINGS[matrix.name]
    bits, n_rows = packing.low_bits, matrix.n_rows
    shifts = torch.arange(0, 32, bits, device=matrix.low.device)[:, None]
    words = matrix.low.long().unflatten(1, (-1, 1, 4))  # (rows, units, 1, word)
    q = (words >> shifts) & (2**bits - 1)  # (rows, units, field, word)
    if matrix.high is not None:
        high = matrix.high.long().unflatten(1, (-1, 1, 4))
        shifts = torch.arange(0, 8 * packing.high_bits, packing.high_bits, device=q.device)
        q = q | ((high >> shifts[:, None]) & (2**packing.high_bits - 1)) << 4
    q = (q - packing.zero).float().reshape(n_rows, -1, 2, 16)  # by halves of a group
    assert matrix.scale is not None
    first, second = _group_values_ref(matrix.scale, matrix.super_scale, packing)
    if packing.halves == 2:
        weights = q * torch.stack([first, second], dim=-1)[..., None]
    else:
        weights = q * first[..., None, None]
        if packing.has_minimum:
            weights = weights + second[..., None, None]
    return weights.reshape(n_rows, -1)


def _group_values_ref(
    scale: torch.Tensor, of_super: torch.Tensor | None, packing: Packing
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns f32 (rows, groups): scale and minimum, or the scales of both halves of a group."""

    def unpaired(x: torch.Tensor, kind: torch.dtype) -> list[torch.Tensor]:
        return [half.float() for half in x.contiguous().view(kind).unflatten(1, (-1, 2)).unbind(2)]

    if of_super is None:
        if packing.has_minimum:
            first, second = unpaired(scale, torch.float16)
            return first, second
        return scale.float(), torch.zeros_like(scale, dtype=torch.float32)
    if packing.halves == 2:
        first, second = unpaired(scale, torch.int8)
        wide = of_super.float().repeat_interleave(8, dim=1)
        return first * wide, second * wide
    first, second = unpaired(scale, torch.uint8)
    d, m = (x.repeat_interleave(8, dim=1) for x in unpaired(of_super, torch.float16))
    return first * d, -second * m
