"""GGUF files built byte by byte, so that every field can be made wrong."""

import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from sparsekv_cli.errors import SparseKVError
from sparsekv_cli.models.gguf.file import open_gguf

UINT8, UINT16, UINT32, INT32, FLOAT32, BOOL, STRING, ARRAY, UINT64 = 0, 2, 4, 5, 6, 7, 8, 9, 10
F32, Q4_0 = 0, 2


def text(value: str | bytes) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw)) + raw


def pair(key: str | bytes, kind: int, payload: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + payload


def string(key: str, value: str | bytes) -> bytes:
    return pair(key, STRING, text(value))


def uint32(key: str, value: int) -> bytes:
    return pair(key, UINT32, struct.pack("<I", value))


def float32(key: str, value: float) -> bytes:
    return pair(key, FLOAT32, struct.pack("<f", value))


def array(key: str, element: int, count: int, payload: bytes) -> bytes:
    return pair(key, ARRAY, struct.pack("<IQ", element, count) + payload)


def strings(key: str, values: Sequence[str | bytes]) -> bytes:
    return array(key, STRING, len(values), b"".join(map(text, values)))


@dataclass
class Tensor:
    """One line of the tensor table and its data; dims in GGUF order (row length first)."""

    name: str | bytes = "a.weight"
    dims: tuple[int, ...] = (8, 4)
    kind: int = F32
    data: bytes = bytes(8 * 4 * 4)
    offset: int | None = None  # None: where it belongs
    n_dims: int | None = None


@dataclass
class Builder:
    """A whole file; counts default to what is there."""

    pairs: list[bytes] = field(default_factory=lambda: [string("general.architecture", "llama")])
    tensors: list[Tensor] = field(default_factory=lambda: [Tensor()])
    version: int = 3
    magic: bytes = b"GGUF"
    n_tensors: int | None = None
    n_keys: int | None = None
    alignment: int = 32

    def header(self) -> bytes:
        n_tensors = len(self.tensors) if self.n_tensors is None else self.n_tensors
        n_keys = len(self.pairs) if self.n_keys is None else self.n_keys
        counts = struct.pack("<QQ", n_tensors & (2**64 - 1), n_keys & (2**64 - 1))
        return self.magic + struct.pack("<I", self.version) + counts + b"".join(self.pairs)

    def build(self) -> bytes:
        table, data = b"", b""
        for tensor in self.tensors:
            offset = len(data) if tensor.offset is None else tensor.offset
            n_dims = len(tensor.dims) if tensor.n_dims is None else tensor.n_dims
            table += text(tensor.name) + struct.pack("<I", n_dims)
            table += b"".join(struct.pack("<Q", dim & (2**64 - 1)) for dim in tensor.dims)
            table += struct.pack("<IQ", tensor.kind, offset & (2**64 - 1))
            data += tensor.data + bytes(-len(tensor.data) % self.alignment)
        head = self.header() + table
        return head + bytes(-len(head) % self.alignment) + data

    def write(self, folder: Path, name: str = "m.gguf") -> Path:
        path = folder / name
        path.write_bytes(self.build())
        return path


def failure(path: Path, **options: bool) -> str:
    """The message of the SparseKVError that opening ``path`` must raise, within 2 seconds."""
    start = time.thread_time()
    with pytest.raises(SparseKVError) as caught:
        open_gguf(path, **options)
    assert time.thread_time() - start < 2.0
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) < 600 + len(str(path))
    return message


def write_raw(folder: Path, data: bytes) -> Path:
    path = folder / "m.gguf"
    path.write_bytes(data)
    return path
