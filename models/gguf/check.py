"""Finds NaN and infinity in tensors: in values, or in the scales of quantised blocks."""

from dataclasses import dataclass

import numpy as np

from sparsekv_cli.errors import SparseKVError
from sparsekv_cli.models.gguf.file import GGMLType, GGUFFile, TensorInfo

# bytes that are checked in one step, so that memory does not grow with the model
CHUNK_BYTES = 8 << 20

# IEEE 754: the exponent bits that are all set in NaN and infinity.
_EXPONENTS: dict[GGMLType, tuple[str, int]] = {
    GGMLType.F16: ("<u2", 0x7C00),
    GGMLType.BF16: ("<u2", 0x7F80),
    GGMLType.F32: ("<u4", 0x7F80_0000),
    GGMLType.F64: ("<u8", 0x7FF0_0000_0000_0000),
}
_INTEGERS = frozenset({GGMLType.I8, GGMLType.I16, GGMLType.I32, GGMLType.I64})
_NAN_E8M0 = 255  # OCP MX: the only NaN of an E8M0 scale
# Types whose scales are no plain f16. NVFP4 has no NaN: ggml reads the byte of NaN as zero.
_OTHER_SCALES = frozenset({GGMLType.MXFP4, GGMLType.NVFP4, GGMLType.IQ1_M})


@dataclass(frozen=True)
class TensorCheck:
    """n_bad values or blocks of a tensor are not finite. The first is in row ``first_row``."""

    tensor: TensorInfo
    n_bad: int
    first_row: int


@dataclass(frozen=True)
class CheckResult:
    """The result of a check of all tensors."""

    n_tensors: int
    bad: tuple[TensorCheck, ...]  # tensors with NaN or infinity
    unchecked: tuple[GGMLType, ...]  # types whose scales were not checked


def find_non_finite(file: GGUFFile) -> CheckResult:
    """Checks all tensors of a file for NaN and infinity."""
    bad: list[TensorCheck] = []
    unchecked: set[GGMLType] = set()
    for info in file.tensors.values():
        blocks = file.data(info).reshape(-1, info.type.block_bytes)
        if not _can_check(info.type):
            unchecked.add(info.type)
            continue
        step = max(1, CHUNK_BYTES // info.type.block_bytes)
        n_bad, first_block = 0, -1
        for start in range(0, len(blocks), step):
            file.check_intact()
            flags = non_finite_blocks(info.type, blocks[start : start + step])
            if flags is not None and flags.any():
                if not n_bad:
                    first_block = start + int(flags.argmax())
                n_bad += int(flags.sum())
        if n_bad:
            row = first_block * info.type.block // info.shape[-1]
            bad.append(TensorCheck(info, n_bad, row))
    return CheckResult(len(file.tensors), tuple(bad), tuple(sorted(unchecked)))


def check_tensors(file: GGUFFile) -> CheckResult:
    """Checks all tensors. Raises SparseKVError, which names the first with NaN or infinity."""
    result = find_non_finite(file)
    if result.bad:
        first = result.bad[0]
        what = "values" if first.tensor.type in _EXPONENTS else "blocks"
        total = first.tensor.n_elements // first.tensor.type.block
        raise SparseKVError(
            f"{file.path}: {len(result.bad)} of {result.n_tensors} tensors hold NaN or infinity; "
            f"first {first.tensor.name!r} ({first.tensor.type.name}): {first.n_bad} of {total} "
            f"{what}, from row {first.first_row} on (the file is damaged; download it again)"
        )
    return result


def non_finite_blocks(kind: GGMLType, blocks: np.ndarray) -> np.ndarray | None:
    """Returns bool (n,): which of n blocks, uint8 (n, block bytes), have a non-finite float.

    Returns None for integer types, which have no floats.
    """
    if kind in _EXPONENTS:
        dtype, exponent = _EXPONENTS[kind]
        return (blocks.view(dtype)[:, 0] & exponent) == exponent
    if kind == GGMLType.MXFP4:
        return blocks[:, 0] == _NAN_E8M0
    if kind == GGMLType.NVFP4:
        return np.zeros(len(blocks), bool)
    if kind == GGMLType.IQ1_M:
        top = blocks[:, 53::2] >> 4  # the high eight bits of the scale
        return ((top[:, 1] & 7) == 7) & (top[:, 0] >= 12)
    flags: np.ndarray | None = None
    dtype, exponent = _EXPONENTS[GGMLType.F16]
    for first, count in kind.scales:
        scales = np.ascontiguousarray(blocks[:, first : first + 2 * count]).view(dtype)
        found = ((scales & exponent) == exponent).any(axis=1)
        flags = found if flags is None else flags | found
    return flags


def _can_check(kind: GGMLType) -> bool:
    return kind in _EXPONENTS or kind in _INTEGERS or bool(kind.scales) or kind in _OTHER_SCALES
