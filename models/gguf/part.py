"""One GGUF file, v2 or v3, little-endian, mapped into memory; every size is checked before its use.

Source of the layout: ggml's GGUF specification and gguf.cpp (llama.cpp). A file is: magic, version,
tensor count, key count, key/value pairs, tensor table, padding, tensor data. The file may be
damaged. A count is compared with the remaining bytes before anything is allocated. The header has
at most ``MAX_HEADER_BYTES``. The tensors must follow one another without gaps (ggml).
"""

import contextlib
import math
import mmap
import os
import stat
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from sparsekv_cli.cpu.weights.types import REMOVED_TYPES, GGMLType
from sparsekv_cli.errors import LostModelError, SparseKVError
from sparsekv_cli.models.gguf.foreign import describe_foreign
from sparsekv_cli.models.gguf.header import ARRAY, SCALARS, STRING, UINT32, HeaderCursor, show

HEADER_BYTES = 24  # magic, version (u32), tensor count, key count (u64)
MAX_KEYS = 1 << 16
MAX_TENSORS = 1 << 16
MAX_KEY_BYTES = (1 << 16) - 1  # GGUF specification
MAX_NAME_BYTES = 63  # GGML_MAX_NAME - 1
MAX_DIMS = 4  # GGML_MAX_DIMS
MAX_ALIGNMENT = 1 << 20
DEFAULT_ALIGNMENT = 32  # GGUF specification, general.alignment


@dataclass(frozen=True)
class TensorInfo:
    """A line of the tensor table: type, shape and place of a tensor."""

    name: str
    shape: tuple[int, ...]  # numpy order, GGUF's reversed: a weight is (rows, row length)
    type: GGMLType
    n_bytes: int
    offset: int  # bytes from the start of the file to the tensor
    part: int = 0  # the number of its file in a split model, from 0

    @property
    def n_elements(self) -> int:
        return math.prod(self.shape)


class GGUFPart:
    """An open GGUF file. Data are read-only views on the memory map, without a copy.

    metadata, value_types, tensors: as in GGUFFile.
    data_offset: start of the tensor data in bytes. size: bytes of the file when it was opened.
    has_data: whether the file has the data of all tensors.
    mark: identifies the file's content on this machine by device, inode, size and times.
    changed: time of the last change, in seconds since 1970.
    """

    def __init__(self, path: Path, descriptor: int, size: int, header_only: bool = False) -> None:
        """Reads the header of the file. This object closes ``descriptor``, also on an error."""
        self.path = path
        self.size = size
        self._descriptor: int | None = descriptor
        status = os.fstat(descriptor)
        self.mark, self.changed = _mark(status), max(status.st_mtime, status.st_ctime)
        self._map: mmap.mmap | None = None
        self._bytes = np.empty(0, np.uint8)
        try:
            self._map = mmap.mmap(descriptor, size, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:
            self.close()
            reason = getattr(error, "strerror", None) or error
            raise SparseKVError(f"{path}: cannot be mapped into memory: {reason}") from None
        try:
            cursor = HeaderCursor(path, self._map, size)
            self.version, n_tensors, n_keys = _read_counts(cursor)
            metadata, value_types = _read_metadata(cursor, n_keys)
            self.metadata: Mapping[str, Any] = MappingProxyType(metadata)
            self.value_types: Mapping[str, str] = MappingProxyType(value_types)
            alignment = _read_alignment(cursor, metadata, value_types)
            self.tensors, self.data_offset = _read_tensors(cursor, n_tensors, alignment)
            cut = [info for info in self.tensors.values() if info.offset + info.n_bytes > size]
            self.has_data = not cut
            if cut and not header_only:
                end = cut[-1].offset + cut[-1].n_bytes
                raise cursor.fail(
                    f"{end - size} bytes are missing: the tensors end at {end}, the file at "
                    f"{size} (from {show(cut[0].name)} on; download it again)"
                )
        except BaseException:
            self.close()
            raise
        self._bytes = np.frombuffer(self._map, np.uint8)  # read-only like the map

    def data(self, info: TensorInfo) -> np.ndarray:
        """Returns a tensor's bytes: a read-only view on the map, uint8 (rows, bytes per row)."""
        if self._descriptor is None:
            raise ValueError(f"{self.path} is closed")
        row_bytes = info.type.row_bytes(info.shape[-1])
        return self._bytes[info.offset : info.offset + info.n_bytes].reshape(-1, row_bytes)

    def release(self, data: np.ndarray) -> None:
        """Releases the memory pages of ``data`` if it is a view on the map (madvise)."""
        if self._descriptor is None or self._map is None or not hasattr(mmap, "MADV_DONTNEED"):
            return
        first = data.__array_interface__["data"][0] - self._bytes.__array_interface__["data"][0]
        start, stop = -(-first // mmap.PAGESIZE), (first + data.nbytes) // mmap.PAGESIZE
        if first >= 0 and first + data.nbytes <= self.size and start < stop:
            length = (stop - start) * mmap.PAGESIZE
            self._map.madvise(mmap.MADV_DONTNEED, start * mmap.PAGESIZE, length)

    def check_intact(self) -> None:
        """Raises LostModelError if the file has become shorter. A read would raise SIGBUS."""
        if self._descriptor is None:
            raise ValueError(f"{self.path} is closed")
        size = os.fstat(self._descriptor).st_size
        if size < self.size:
            raise LostModelError(
                f"{self.path}: was cut from {self.size} to {size} bytes while in use; "
                "stop what writes to it and start again"
            )

    def is_unchanged(self) -> bool:
        """Returns whether the file is open and unchanged since it was opened."""
        return self._descriptor is not None and _mark(os.fstat(self._descriptor)) == self.mark

    def is_current(self) -> bool:
        """Returns whether the path names this unchanged file, or no file any more."""
        try:
            return _mark(os.stat(self.path)) == self.mark
        except OSError:  # the path is gone: the open file is the only one
            return True

    def reopened(self) -> FileIO:
        """Returns a second file object of the open file, at offset 0.

        By now the path may name another file.
        """
        if self._descriptor is None:
            raise ValueError(f"{self.path} is closed")
        file = FileIO(os.dup(self._descriptor), "rb")
        file.seek(0)
        return file

    def close(self) -> None:
        """Closes the file. The map stays open while arrays view it."""
        if self._descriptor is None:
            return
        os.close(self._descriptor)
        self._descriptor = None
        self._bytes = np.empty(0, np.uint8)
        if self._map is not None:
            with contextlib.suppress(BufferError):  # raised while arrays view the map
                self._map.close()

    def __del__(self) -> None:
        if getattr(self, "_descriptor", None) is not None:
            self.close()


def _mark(status: os.stat_result) -> str:
    times = status.st_mtime_ns, status.st_ctime_ns
    return ":".join(map(str, (status.st_dev, status.st_ino, status.st_size, *times)))


def _read_counts(cursor: HeaderCursor) -> tuple[int, int, int]:
    """Returns the version, the number of tensors and the number of keys."""
    start = cursor.buffer[: min(cursor.size, 512)]
    if start[:4] != b"GGUF":
        raise cursor.fail(f"not a GGUF file: {describe_foreign(start)}")
    if cursor.size < HEADER_BYTES:
        raise cursor.fail(f"is {cursor.size} bytes long; a GGUF header takes {HEADER_BYTES}")
    cursor.take(4, "the magic")
    version = cursor.u32("the version")
    if version and version & 0xFFFF == 0:
        raise cursor.fail(
            "is a big-endian GGUF file; convert it with gguf-py's gguf_convert_endian.py"
        )
    if version not in (2, 3):
        advice = "convert the model again with a current llama.cpp" if version < 2 else "too new"
        raise cursor.fail(f"is GGUF version {version}; versions 2 and 3 can be read ({advice})")
    n_tensors = cursor.u64("the tensor count")
    n_keys = cursor.u64("the key count")
    for count, most, what in ((n_tensors, MAX_TENSORS, "tensors"), (n_keys, MAX_KEYS, "keys")):
        if count > most:
            raise cursor.fail(f"claims {count} {what}; at most {most} are allowed (damaged file)")
    return version, n_tensors, n_keys


def _read_metadata(cursor: HeaderCursor, n_keys: int) -> tuple[dict[str, Any], dict[str, str]]:
    metadata: dict[str, Any] = {}
    value_types: dict[str, str] = {}
    for index in range(n_keys):
        key = cursor.text(f"the name of key {index + 1} of {n_keys}", MAX_KEY_BYTES)
        if not key:
            raise cursor.fail(f"key {index + 1} of {n_keys} has an empty name")
        if key in metadata:
            raise cursor.fail(f"key {show(key)} occurs twice")
        metadata[key], number = cursor.value(key)
        names = {STRING: "string", ARRAY: "array"}
        value_types[key] = names[number] if number in names else SCALARS[number][0]
    return metadata, value_types


def _read_alignment(
    cursor: HeaderCursor, metadata: Mapping[str, Any], value_types: Mapping[str, str]
) -> int:
    key = "general.alignment"
    if key not in metadata:
        return DEFAULT_ALIGNMENT
    if value_types[key] != SCALARS[UINT32][0]:
        raise cursor.fail(f"{key} is of type {value_types[key]}; it must be uint32")
    alignment: int = metadata[key]
    if alignment < 8 or alignment > MAX_ALIGNMENT or alignment & (alignment - 1):
        raise cursor.fail(f"{key} is {alignment}; it must be a power of two from 8 to 1 MiB")
    return alignment


def _read_tensors(
    cursor: HeaderCursor, n_tensors: int, alignment: int
) -> tuple[dict[str, TensorInfo], int]:
    """Returns the tensor table with absolute offsets, and the offset of the tensor data."""
    relative: list[TensorInfo] = []
    names: set[str] = set()
    expected = 0  # ggml writes tensors one after the other, each padded to the alignment
    for index in range(n_tensors):
        info = _read_tensor(cursor, f"tensor {index + 1} of {n_tensors}")
        if info.name in names:
            raise cursor.fail(f"tensor {show(info.name)} occurs twice")
        if info.offset != expected:
            raise cursor.fail(
                f"tensor {show(info.name)} is at data offset {info.offset}, but the tensors "
                f"before it end at {expected} (they must follow one another; the file is damaged)"
            )
        names.add(info.name)
        relative.append(info)
        expected = -(-(expected + info.n_bytes) // alignment) * alignment
    base = -(-cursor.position // alignment) * alignment
    tensors = {
        i.name: TensorInfo(i.name, i.shape, i.type, i.n_bytes, base + i.offset) for i in relative
    }
    return tensors, base


def _read_tensor(cursor: HeaderCursor, what: str) -> TensorInfo:
    """Returns a line of the tensor table. Its offset is relative to the tensor data."""
    name = cursor.text(f"the name of {what}", MAX_NAME_BYTES)
    if not name:
        raise cursor.fail(f"{what} has an empty name")
    what = f"tensor {show(name)}"
    n_dims = cursor.u32(f"the number of dimensions of {what}")
    if not 1 <= n_dims <= MAX_DIMS:
        raise cursor.fail(f"{what} has {n_dims} dimensions; 1 to {MAX_DIMS} are allowed")
    start = cursor.take(8 * n_dims, f"the shape of {what}")
    dims = struct.unpack_from(f"<{n_dims}q", cursor.buffer, start)
    if min(dims) < 1:
        least = next(length for length in dims if length < 1)
        raise cursor.fail(f"{what} has a dimension of {least}; all must be 1 or more")
    n_elements = math.prod(dims)
    number = cursor.u32(f"the type of {what}")
    try:
        kind = GGMLType(number)  # type: ignore[call-arg]
    except ValueError:
        if number in REMOVED_TYPES:
            detail = f"{number} ({REMOVED_TYPES[number]}), which llama.cpp has removed"
        else:
            detail = f"{number}, which this version does not know"
        raise cursor.fail(f"{what} has type {detail}; convert the model again") from None
    if dims[0] % kind.block:
        raise cursor.fail(
            f"{what} has rows of {dims[0]} elements, not a multiple of {kind.name}'s block of "
            f"{kind.block}"
        )
    n_bytes = n_elements // kind.block * kind.block_bytes
    if n_elements >= 1 << 63 or n_bytes >= 1 << 63:
        raise cursor.fail(f"{what} of shape {dims[::-1]} is larger than any file (damaged file)")
    offset = cursor.u64(f"the offset of {what}")
    return TensorInfo(name, dims[::-1], kind, n_bytes, offset)


def open_part(path: Path, header_only: bool = False) -> GGUFPart:
    """Opens one file and checks its whole header. Raises SparseKVError for a wrong one.

    header_only: also accept a file that ends before the end of its last tensor.
    """
    try:
        status = os.stat(path)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise SparseKVError(f"{path}: cannot be opened: {reason}") from None
    if stat.S_ISDIR(status.st_mode):
        raise SparseKVError(f"{path}: is a directory; name the .gguf file in it")
    if not stat.S_ISREG(status.st_mode):
        raise SparseKVError(f"{path}: is not a regular file (a pipe or device cannot be mapped)")
    try:
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_BINARY", 0))
    except OSError as error:
        raise SparseKVError(f"{path}: cannot be opened: {error.strerror}") from None
    size = os.fstat(descriptor).st_size
    if size == 0:
        os.close(descriptor)
        raise SparseKVError(f"{path}: is empty; a GGUF model was expected")
    return GGUFPart(path, descriptor, size, header_only)
