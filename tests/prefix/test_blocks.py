"""A file of the prefix cache: what is read is what was written, or the file is refused."""

from pathlib import Path

import numpy as np
import pytest
from forged_headers import BAD_FIELDS, BAD_TEXTS, forge

from sparsekv_cli.commands.cache import prompts_of
from sparsekv_cli.prefix.blocks import (
    BlockHeader,
    BlockWriter,
    DamagedError,
    Piece,
    read_header,
    read_piece,
)
from sparsekv_cli.prefix.folder import PrefixFolder

TOKENS, LAYERS = (5, 3, 2, 7, 1), ((2, 64, 32), (1, 16, 16))
HEADER = BlockHeader("a model.gguf", "0" * 32, 512, TOKENS, ("f16", "q8_0"), LAYERS)


def pieces(fill: int | None = None) -> list[Piece]:
    """Rows of two layers: K in f16 and V in bytes; random, or all ``fill``."""
    random = np.random.RandomState(0)
    result = []
    for heads, k, v in LAYERS:
        shape = heads, len(TOKENS)
        keys = random.randint(0, 255, (*shape, k)).astype(np.uint8)
        values = random.randint(0, 255, (*shape, v)).astype(np.uint8)
        if fill is not None:
            keys[:], values[:] = fill, fill
        result.append((keys.view(np.float16), values))
    return result


@pytest.fixture
def written(tmp_path: Path) -> Path:
    writer = BlockWriter(tmp_path, HEADER)
    for layer, piece in enumerate(pieces()):
        writer.write(layer, piece)
    writer.finish(tmp_path / HEADER.name)
    return tmp_path / HEADER.name


def read(path: Path, n: int = len(TOKENS)) -> tuple[BlockHeader, list[Piece]]:
    """The header and the first n rows."""
    into = [(k[:, :n].copy(), v[:, :n].copy()) for k, v in pieces(fill=0)]
    with open(path, "rb", buffering=0) as file:
        header = read_header(file)
        for layer, piece in enumerate(into):
            read_piece(file, header, layer, piece)
    return header, into


@pytest.mark.parametrize("n", [0, 1, 4, 5])
def test_what_is_read_is_what_was_written(n, written):
    header, into = read(written, n)
    assert header.name == written.name == HEADER.name
    assert (header.tokens, header.first, header.types) == (TOKENS, 512, ("f16", "q8_0"))
    for found, expected in zip(into, pieces(), strict=True):
        for left, right in zip(found, expected, strict=True):
            np.testing.assert_array_equal(left.view(np.uint8), right[:, :n].view(np.uint8))
    assert written.stat().st_mode & 0o777 == 0o600
    assert [path.name for path in written.parent.iterdir()] == [HEADER.name]


def test_every_flipped_bit_is_noticed(written):
    data = written.read_bytes()
    text_ends = len(data) - sum(HEADER.piece_bytes)
    for at in range(len(data)):
        changed = bytearray(data)
        changed[at] ^= 1 << at % 8
        written.write_bytes(changed)
        if text_ends - 64 < at < text_ends and not data[at]:
            continue  # the zeros behind the header mean nothing
        for n in (2, 5):  # rows that are not wanted have to be whole too
            with pytest.raises(DamagedError):
                read(written, n)


def test_every_cut_is_noticed(written):
    data = written.read_bytes()
    for size in range(len(data)):
        written.write_bytes(data[:size])
        with pytest.raises(DamagedError):
            read(written)
    written.write_bytes(data + b"\0")
    with pytest.raises(DamagedError, match="bytes instead of"):
        read(written)


@pytest.mark.parametrize("change", [*({n: v} for n, v in BAD_FIELDS), *BAD_TEXTS])
def test_a_header_is_believed_field_by_field(change, written):
    forge(written, change)
    with pytest.raises(DamagedError, match=r"its header cannot be read|bytes instead of"):
        read(written)
    # In the folder it is one line, and a listing says so and goes on.
    said: list[str] = []
    folder = PrefixFolder(written.parent, 1 << 30, said.append)
    assert prompts_of(folder)[0] == [] and written.exists()
    assert folder.header(written.name) is None and not written.exists()
    assert len(said) == 2 and all(line.count("\n") == 0 for line in said)


def test_nothing_is_left_of_an_abandoned_file(tmp_path):
    writer = BlockWriter(tmp_path, HEADER)
    writer.write(0, pieces()[0])
    writer.abandon()
    assert not list(tmp_path.iterdir())
