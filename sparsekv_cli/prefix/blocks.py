"""A file of rows, of up to 512 tokens of a prompt or of a whole prompt; or a snapshot.

    magic, length of the header, checksum of the header: 16 + 4 + 4 bytes
    header: JSON, then zeros up to a multiple of 64 bytes
    a piece a layer: K (kv heads, rows, bytes of a row), then V, as cache/store.py keeps them

Numbers are little-endian; a checksum is a CRC-32, and each piece has one in the header. A block is
named by its parent, the block of the tokens before it, and by a hash. The hash is of the parent's
name and the block's tokens. Equal names mean equal prompts up to the block's end. Layers whose
memory does not grow with the sequence (BoundedCache) have nothing in a block. Their memory at the
end of a block is its snapshot. It is a file of the same form and name with another suffix. A
layer's rows in it are not the tokens'.
"""

import contextlib
import hashlib
import json
import os
import re
import secrets
import struct
import zlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property
from io import BufferedWriter, FileIO
from pathlib import Path
from typing import Any

import numpy as np

from sparsekv_cli.cache.row_sizes import CACHE_TYPES
from sparsekv_cli.system.files import open_regular, open_written

BLOCK = 512  # tokens
KIND = b"sparsekv rows "  # begins the files of all versions
MAGIC = KIND + b"2\n"
SUFFIX, SNAPSHOT, TEMPORARY = ".rows", ".snapshot", ".tmp"
TEMPORARY_START = ".sparsekv-"
NAME_DIGITS = 32
BLOCK_NAME = re.compile(rf"[0-9a-f]{{{NAME_DIGITS}}}-[0-9a-f]{{{NAME_DIGITS}}}\.(rows|snapshot)")
TEMPORARY_NAME = re.compile(r"\.sparsekv-[a-z0-9_]{8}\.tmp")
ALIGNMENT = 64
LENGTHS = struct.Struct("<II")
MOST_HEADER = 1 << 24  # bytes
LARGEST_NUMBER = (1 << 31) - 1  # of every number in a header
Piece = tuple[np.ndarray, np.ndarray]  # K and V, (kv heads, tokens, items of a row)


class DamagedError(ValueError):
    """A file with other contents than were written."""


@dataclass(frozen=True)
class BlockHeader:
    """The header of a file of rows."""

    model: str  # the name of the model's file
    parent: str
    first: int  # position of the first token
    tokens: tuple[int, ...]
    types: tuple[str, str]  # of K and of V
    # for each layer its kv heads (0: no piece), and the bytes of a row of K and of V
    layers: tuple[tuple[int, int, int], ...]
    rows: tuple[int, ...] = ()  # of each piece of a snapshot; empty: a row for each token
    sums: str = ""  # checksums of the pieces, eight hex digits each

    @property
    def name(self) -> str:
        return block_name(self.parent, self.tokens, SNAPSHOT if self.rows else SUFFIX)

    @property
    def layer_rows(self) -> tuple[int, ...]:
        """Rows of each layer's piece."""
        return self.rows or (len(self.tokens),) * len(self.layers)

    @property
    def piece_bytes(self) -> list[int]:
        sizes = zip(self.layer_rows, self.layers, strict=True)
        return [n * heads * (k + v) for n, (heads, k, v) in sizes]

    @cached_property
    def n_packed(self) -> int:
        """Bytes ahead of the pieces."""
        return len(self.packed())

    def packed(self) -> bytes:
        """Returns the file's bytes before its pieces. Checksums do not change their number."""
        sums = self.sums or "0" * 8 * len(self.layers)
        text = json.dumps(asdict(replace(self, sums=sums)), separators=(",", ":")).encode()
        start = MAGIC + LENGTHS.pack(len(text), zlib.crc32(text)) + text
        return start + bytes(-len(start) % ALIGNMENT)


def block_hash(parent: str, tokens: Sequence[int]) -> str:
    """Returns the second half of a block's name, and the first half of its children's names."""
    ids = np.asarray(tokens, "<i4").tobytes()
    return hashlib.sha256(parent.encode() + ids).hexdigest()[:NAME_DIGITS]


def block_name(parent: str, tokens: Sequence[int], suffix: str = SUFFIX) -> str:
    """Returns the file of a block, or of its snapshot."""
    return f"{parent}-{block_hash(parent, tokens)}{suffix}"


def own_hash(name: str) -> str:
    """Returns the second half of the name of a block or snapshot."""
    return name.partition(".")[0].partition("-")[2]


def is_own(path: Path) -> bool:
    """Returns whether a file has a name that only this program gives, and starts as its files do.

    A shorter file is left by a writer that was killed at once.
    """
    if not BLOCK_NAME.fullmatch(path.name) and not TEMPORARY_NAME.fullmatch(path.name):
        return False
    try:
        if path.is_symlink():
            return False
        with open_regular(path) as file:
            start = file.read(len(KIND))
    except OSError:
        return False
    return KIND.startswith(start)


def read_header(file: FileIO) -> BlockHeader:
    """Returns the header of a file open at its beginning. Raises DamagedError for a wrong file."""
    start = file.read(len(MAGIC) + LENGTHS.size)
    if len(start) < len(MAGIC) + LENGTHS.size or not start.startswith(MAGIC):
        raise DamagedError("it is no file of this version")
    length, checksum = LENGTHS.unpack(start[len(MAGIC) :])
    text = file.read(length) if length <= MOST_HEADER else b""
    if len(text) != length or zlib.crc32(text) != checksum:
        raise DamagedError("its header has another checksum")
    try:
        values = json.loads(text)
    except (ValueError, RecursionError):
        raise DamagedError("its header cannot be read: it is no JSON") from None
    header = _header_of(values)
    expected = -(-(len(start) + length) // ALIGNMENT) * ALIGNMENT + sum(header.piece_bytes)
    size = os.fstat(file.fileno()).st_size
    if size != expected:
        raise DamagedError(f"it has {size} bytes instead of {expected}")
    return header


_HASH = re.compile(rf"[0-9a-f]{{{NAME_DIGITS}}}")
_SUMS = re.compile(r"[0-9a-f]*")


def _header_of(values: Any) -> BlockHeader:
    """Returns the header from JSON. Raises DamagedError unless all fields have type and range."""
    names = [field.name for field in fields(BlockHeader)]
    if not isinstance(values, dict) or sorted(values) != sorted(names):
        expected = ", ".join(names)
        raise DamagedError(f"its header cannot be read: it must have the fields {expected}")

    def check(name: str, is_right: bool) -> None:
        if not is_right:
            raise DamagedError(f"its header cannot be read: {name} is not what it must be")

    model, parent, first, tokens, types, layers, rows, sums = (values[name] for name in names)
    check("model", isinstance(model, str))
    check("parent", isinstance(parent, str) and bool(_HASH.fullmatch(parent)))
    check("first", _are_counts([first]))
    check("tokens", _are_counts(tokens) and bool(tokens))
    check("types", isinstance(types, list) and len(types) == 2)
    check("types", all(isinstance(name, str) and name in CACHE_TYPES for name in types))
    check("layers", isinstance(layers, list))
    check("layers", all(_are_counts(layer) and len(layer) == 3 for layer in layers))
    check("rows", _are_counts(rows) and len(rows) in (0, len(layers)))
    check("sums", isinstance(sums, str) and bool(_SUMS.fullmatch(sums)))
    check("sums", len(sums) == 8 * len(layers))
    return BlockHeader(
        model,
        parent,
        first,
        tuple(tokens),
        (types[0], types[1]),
        tuple((heads, k, v) for heads, k, v in layers),
        tuple(rows),
        sums,
    )


def _are_counts(values: Any) -> bool:
    """Returns whether a value is a list of whole numbers from 0 to LARGEST_NUMBER."""
    return isinstance(values, list) and all(
        type(n) is int and 0 <= n <= LARGEST_NUMBER for n in values
    )


def read_piece(file: FileIO, header: BlockHeader, layer: int, piece: Piece) -> None:
    """Reads a layer's first rows into arrays whose heads are contiguous. Raises DamagedError.

    It reads all rows to verify the checksum, also those beyond ``piece``.
    """
    file.seek(header.n_packed + sum(header.piece_bytes[:layer]))
    checksum, n_heads, n_rows = 0, header.layers[layer][0], header.layer_rows[layer]
    for rows, row_bytes in zip(piece, header.layers[layer][1:], strict=True):
        rest = np.empty((n_rows - rows.shape[1]) * row_bytes, np.uint8)
        for head in range(n_heads):
            for part in (rows[head], rest):
                if part.nbytes and file.readinto(part.data) != part.nbytes:
                    raise DamagedError("it is cut off")
                checksum = zlib.crc32(part.data, checksum)
    if header.sums[8 * layer : 8 * layer + 8] != f"{checksum:08x}":
        raise DamagedError(f"the rows of layer {layer} have another checksum")


class BlockWriter:
    """A file that is written layer by layer under a temporary name, and appears as a whole."""

    def __init__(self, folder: Path, header: BlockHeader) -> None:
        """Raises OSError if the folder cannot be written."""
        self.header = header
        self._sums = [0] * len(header.layers)
        self._temporary = folder / f"{TEMPORARY_START}{secrets.token_hex(4)}{TEMPORARY}"
        try:
            with BufferedWriter(open_written(self._temporary)) as file:
                file.write(MAGIC)  # marks it as the program's file
        except BaseException:
            self.abandon()
            raise

    @property
    def rows(self) -> slice:
        """The block's positions."""
        return slice(self.header.first, self.header.first + len(self.header.tokens))

    def write(self, layer: int, piece: Piece) -> None:
        """Writes one layer's rows. Raises OSError."""
        at = self.header.n_packed + sum(self.header.piece_bytes[:layer])
        with BufferedWriter(open_written(self._temporary, os.O_WRONLY)) as file:
            file.seek(at)
            checksum = 0
            for head in (np.ascontiguousarray(head) for array in piece for head in array):
                file.write(head.data)
                checksum = zlib.crc32(head.data, checksum)
        self._sums[layer] = checksum

    def finish(self, path: Path) -> None:
        """Writes the header and gives the file its name, in the same folder. Raises OSError."""
        sums = "".join(f"{checksum:08x}" for checksum in self._sums)
        with BufferedWriter(open_written(self._temporary, os.O_WRONLY)) as file:
            file.write(replace(self.header, sums=sums).packed())
        os.replace(self._temporary, path)

    def abandon(self) -> None:
        with contextlib.suppress(OSError):
            self._temporary.unlink()
