"""Files of rows whose headers say something else, with the checksums that this takes."""

import json
import zlib
from pathlib import Path
from typing import Any

from sparsekv_cli.prefix.blocks import ALIGNMENT, LENGTHS, MAGIC

# What a header may say that it must not, by field; or a text in place of the whole header.
BAD_FIELDS: list[tuple[str, Any]] = [
    ("first", -1), ("first", 2**70), ("first", True), ("first", 1.5), ("first", float("inf")),
    ("first", "0"), ("tokens", [2**70]), ("tokens", [-1]), ("tokens", ["5"]), ("tokens", []),
    ("tokens", {"0": 5}), ("types", ["bogus", "f16"]), ("types", "f16"),
    ("types", [["f16"], "f16"]), ("types", ["f16", "f16", "f16"]),
    ("layers", [[-1, 64, 32], [1, 16, 16]]), ("layers", [[2, 64]]), ("layers", 7),
    ("layers", [[2, float("nan"), 1]]), ("layers", [[2**31, 2**31, 2**31]]), ("rows", [1]),
    ("rows", None), ("sums", "zz"), ("sums", ["0"]), ("parent", "../../etc/passwd"),
    ("parent", None), ("model", ["a"]),
]  # fmt: skip
BAD_TEXTS = ["[" * 100_000, "{}", "null", "[]", '{"first": ' + "9" * 5000 + "}", "\x00"]


def forge(path: Path, changes: dict[str, Any] | str) -> None:
    """Changes the fields of a file's header, or its whole text; its pieces stay as they are."""
    data = path.read_bytes()
    length, _ = LENGTHS.unpack_from(data, len(MAGIC))
    start = len(MAGIC) + LENGTHS.size
    pieces = data[-(-(start + length) // ALIGNMENT) * ALIGNMENT :]
    text = changes
    if not isinstance(text, str):
        text = json.dumps({**json.loads(data[start : start + length]), **text})
    header = text.encode()
    head = MAGIC + LENGTHS.pack(len(header), zlib.crc32(header)) + header
    path.write_bytes(head + bytes(-len(head) % ALIGNMENT) + pieces)
