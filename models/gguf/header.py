"""Reads the header of a GGUF file, front to back. Every length is checked before it is used.

Source of the layout: ggml's GGUF specification. The reader allocates memory only for bytes that are
within the file and within ``MAX_HEADER_BYTES``.
"""

import mmap
import struct
from array import array as compact_array
from collections.abc import Sequence
from pathlib import Path
from typing import Any, overload

import numpy as np

from sparsekv_cli.errors import SparseKVError

MAX_HEADER_BYTES = 128 << 20  # everything before the tensor data; large vocabularies take 16 MB
MAX_STRINGS = 1 << 21  # elements of all string arrays; large vocabularies hold 0.8 M with merges

# GGUF specification, enum gguf_metadata_value_type: number -> (name, struct code, numpy dtype).
UINT32, BOOL, STRING, ARRAY = 4, 7, 8, 9
SCALARS: dict[int, tuple[str, struct.Struct, np.dtype[Any]]] = {
    number: (name, struct.Struct("<" + code), np.dtype(dtype))
    for number, name, code, dtype in (
        (0, "uint8", "B", "u1"),
        (1, "int8", "b", "i1"),
        (2, "uint16", "H", "<u2"),
        (3, "int16", "h", "<i2"),
        (4, "uint32", "I", "<u4"),
        (5, "int32", "i", "<i4"),
        (6, "float32", "f", "<f4"),
        (7, "bool", "B", "u1"),
        (10, "uint64", "Q", "<u8"),
        (11, "int64", "q", "<i8"),
        (12, "float64", "d", "<f8"),
    )
}
_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")


def show(text: str) -> str:
    """Returns text from a file, quoted and short enough for one line."""
    return repr(text if len(text) <= 80 else text[:77] + "...")


class StringArray(Sequence[str]):
    """An array of strings in the file's layout. An element is decoded when it is read.

    raw: the bytes of the array, pairs of (length u64, text).
    starts, ends: (n,) int64, the start and the end of each text in ``raw``.
    """

    __slots__ = ("ends", "raw", "starts")

    def __init__(self, raw: bytes, starts: np.ndarray, ends: np.ndarray) -> None:
        self.raw = raw
        self.starts = starts
        self.ends = ends

    def __len__(self) -> int:
        return len(self.starts)

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        return str(self.raw[self.starts[index] : self.ends[index]], "utf-8")

    def tolist(self) -> list[str]:
        """Returns all elements, decoded (0.2 s a million)."""
        raw = self.raw
        pairs = zip(self.starts.tolist(), self.ends.tolist(), strict=True)
        return [str(raw[start:end], "utf-8") for start, end in pairs]

    def __repr__(self) -> str:
        return f"<StringArray of {len(self)}>"


class HeaderCursor:
    """A position in the header, which only moves forward and never past the end."""

    def __init__(self, path: Path, buffer: mmap.mmap, size: int) -> None:
        self.path = path
        self.buffer = buffer
        self.size = size
        self.end = min(size, MAX_HEADER_BYTES)
        self.position = 0
        self.n_strings = 0

    def fail(self, message: str) -> SparseKVError:
        return SparseKVError(f"{self.path}: {message}")

    def past_end(self, n_bytes: int, what: str) -> SparseKVError:
        left = self.end - self.position
        if self.position + n_bytes > self.size:
            return self.fail(
                f"{what} takes {n_bytes} bytes at offset {self.position}, but only {left} are left "
                "(the file is cut short or damaged; download it again)"
            )
        return self.fail(
            f"{what} takes {n_bytes} bytes at offset {self.position}, beyond the "
            f"{MAX_HEADER_BYTES >> 20} MiB that a header may have (the file is damaged)"
        )

    def take(self, n_bytes: int, what: str) -> int:
        """Moves forward by ``n_bytes`` and returns their start."""
        start = self.position
        if n_bytes > self.end - start:
            raise self.past_end(n_bytes, what)
        self.position = start + n_bytes
        return start

    def u32(self, what: str) -> int:
        return int(_U32.unpack_from(self.buffer, self.take(4, what))[0])

    def u64(self, what: str) -> int:
        return int(_U64.unpack_from(self.buffer, self.take(8, what))[0])

    def text(self, what: str, max_bytes: int = MAX_HEADER_BYTES) -> str:
        n_bytes = self.u64(f"the length of {what}")
        if n_bytes > max_bytes and n_bytes <= self.end - self.position:
            raise self.fail(f"{what} is {n_bytes} bytes long; at most {max_bytes} are allowed")
        start = self.take(n_bytes, what)
        try:
            return str(self.buffer[start : start + n_bytes], "utf-8")
        except UnicodeDecodeError as error:
            raise self.fail(f"{what} is not UTF-8 (byte {error.start} of {n_bytes})") from None

    def value(self, key: str) -> tuple[Any, int]:
        """Returns the value of ``key`` and its type number."""
        what = f"key {show(key)}"
        number = self.u32(f"the value type of {what}")
        if number == STRING:
            return self.text(f"the value of {what}"), number
        if number == ARRAY:
            return self.array(what), number
        if number not in SCALARS:
            raise self.fail(f"{what} has value type {number}; GGUF knows 0 to 12")
        _, layout, _ = SCALARS[number]
        value = layout.unpack_from(self.buffer, self.take(layout.size, f"the value of {what}"))[0]
        return (value != 0 if number == BOOL else value), number

    def array(self, what: str) -> np.ndarray | StringArray:
        element = self.u32(f"the element type of {what}")
        if element == ARRAY:
            raise self.fail(f"{what} is an array of arrays, which no model uses")
        if element != STRING and element not in SCALARS:
            raise self.fail(f"{what} is an array of type {element}; GGUF knows 0 to 12")
        count = self.u64(f"the length of {what}")
        if element == STRING:
            return self.strings(count, what)
        dtype = SCALARS[element][2]
        start = self.take(count * dtype.itemsize, f"the array of {count} elements in {what}")
        values = np.frombuffer(self.buffer, dtype, count, start).copy()
        if element == BOOL:
            values = values != 0
        values.flags.writeable = False
        return values

    def strings(self, count: int, what: str) -> StringArray:
        """Reads ``count`` strings in one pass over their lengths. It does not decode them."""
        if count * 8 > self.end - self.position:
            raise self.past_end(count * 8, f"the array of {count} strings in {what}")
        self.n_strings += count
        if self.n_strings > MAX_STRINGS:
            raise self.fail(
                f"{what} brings the strings in arrays to {self.n_strings}; "
                f"at most {MAX_STRINGS} are allowed"
            )
        buffer, length_at, base = self.buffer, _U64.unpack_from, self.position
        position = base
        ends = compact_array("q")
        append = ends.append
        try:
            for _ in range(count):
                position += 8 + length_at(buffer, position)[0]
                append(position)
        except (struct.error, OverflowError):  # a length leads out of the file
            position = self.size + 1
        end_positions = np.frombuffer(ends, np.int64)
        if position > self.end:
            bad = int(np.searchsorted(end_positions, self.end, side="right"))
            self.position = ends[bad - 1] if bad else base
            message = f"string {bad} of the array in {what}"
            if self.position + 8 > self.end:
                raise self.past_end(8, message)
            raise self.past_end(8 + length_at(buffer, self.position)[0], message)
        end_positions = end_positions - base
        starts = np.empty_like(end_positions)
        starts[:1] = 8
        starts[1:] = end_positions[:-1] + 8
        raw = buffer[base:position]
        self.position = position
        array = StringArray(raw, starts, end_positions)
        self._check_utf8(array, what)
        return array

    def _check_utf8(self, array: StringArray, what: str) -> None:
        """Checks that all strings are UTF-8, in one call. For that, the lengths become spaces."""
        joined = np.frombuffer(array.raw, np.uint8).copy()
        for byte in range(1, 9):
            joined[array.starts - byte] = 0x20
        try:
            str(joined.data, "utf-8")
        except UnicodeDecodeError as error:
            index = int(np.searchsorted(array.ends, error.start, side="right"))
            raise self.fail(f"string {index} of the array in {what} is not UTF-8") from None
