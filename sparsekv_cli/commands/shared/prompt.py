"""Reads a prompt that the user typed, piped or wrote into files."""

import codecs
import sys
from collections.abc import Sequence
from pathlib import Path

from sparsekv_cli.commands.shared.terminal import one_line
from sparsekv_cli.errors import SparseKVError
from sparsekv_cli.system.documents import document_text, kind_of

# Byte order marks of other encodings than UTF-8. Python's utf-16 reads the order from the mark.
MARKS = {codecs.BOM_UTF16_LE: "utf-16", codecs.BOM_UTF16_BE: "utf-16"}


def read_prompt(
    text: str | None,
    file: str | Sequence[str] | None,
    what: str = "prompt",
    ways: str = "-p TEXT, -f FILE",
) -> str:
    """Returns the prompt: text of files or stdin, a blank line, then ``text``. One may be missing.

    file: paths, or ``-`` for stdin. Several files come in order, each after a line with its name.
    Without a file, stdin is read if it is no terminal. A byte order mark and one newline at the end
    of a file or of stdin are dropped. Nothing else is changed. what, ways: names of the prompt and
    of its sources, for errors.

    Raises SparseKVError for an empty prompt and for bytes that are not UTF-8. Raises OSError for a
    file that cannot be read.
    """
    names = [file] if isinstance(file, str) else list(file or ())
    if names.count("-") > 1:
        raise SparseKVError("-f - is given twice: stdin can be read once")
    if not names and not sys.stdin.isatty():
        names = ["-"]
    parts = [
        decode_file(read_stdin() if name == "-" else Path(name).read_bytes(), source_of(name))
        for name in names
    ]
    parts = [part.removesuffix("\n") for part in parts]
    if len(names) > 1:
        titled = zip(names, parts, strict=True)
        parts = [f"{one_line(source_of(name))}:\n\n{part}" for name, part in titled]
    if text is not None:
        parts.append(check_utf8(text, "the prompt given with -p"))
    prompt = "\n\n".join(part for part in parts if part)
    if not prompt:
        raise SparseKVError(
            f"the {what} is empty: give {ways}, or pipe a text that is not empty to stdin"
        )
    return prompt


def source_of(name: str) -> str:
    """Returns the name of a source, for messages and the line before its text."""
    return "stdin" if name == "-" else name


def read_stdin() -> bytes:
    """Returns all bytes of stdin. A replaced stdin may have text instead of bytes."""
    buffer = getattr(sys.stdin, "buffer", None)
    return buffer.read() if buffer is not None else sys.stdin.read().encode()


def decode_file(data: bytes, source: str) -> str:
    """Returns the text in the bytes of a file or of stdin, without a byte order mark.

    The bytes may be a PDF or Word file, UTF-8, or UTF-16 with a byte order mark. Raises
    SparseKVError, which names ``source`` and a bad byte.
    """
    if kind_of(data):
        return document_text(data, source)
    encoding = next((name for mark, name in MARKS.items() if data.startswith(mark)), "utf-8")
    return _decoded(data, encoding, source).removeprefix("\ufeff")


def _decoded(data: bytes, encoding: str, source: str) -> str:
    try:
        return data.decode(encoding)
    except UnicodeDecodeError as error:
        raise SparseKVError(
            f"{source} is not {encoding.upper()}: byte 0x{data[error.start]:02x} at offset "
            f"{error.start}; convert it first, for example with iconv"
        ) from None


def check_utf8(text: str, source: str) -> str:
    """Returns a text that the user typed. Raises SparseKVError if it is not UTF-8.

    Python decodes the command line by the locale. Bytes that do not fit the locale become
    surrogates, which this function decodes as UTF-8.
    """
    try:
        data = text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError as error:
        raise SparseKVError(f"{source} is not UTF-8 at character {error.start}") from None
    return _decoded(data, "utf-8", source)
