"""Reads the text that the user typed, piped or wrote in a file, as a prompt."""

import codecs
import sys
from collections.abc import Sequence
from pathlib import Path

from sparsekv_cli.commands.shared.terminal import one_line
from sparsekv_cli.errors import SparseKVError
from sparsekv_cli.system.documents import document_text, kind_of

# The mark that begins a text of another encoding than UTF-8. Python reads the order of bytes there.
MARKS = {codecs.BOM_UTF16_LE: "utf-16", codecs.BOM_UTF16_BE: "utf-16"}


def read_prompt(
    text: str | None,
    file: str | Sequence[str] | None,
    what: str = "prompt",
    ways: str = "-p TEXT, -f FILE",
) -> str:
    """Returns the prompt: files' or piped text, a blank line, then ``text``. One may be missing.

    file: paths, or ``-`` for stdin. Several files are read in order, each after a line with its
    name. Without one, stdin is read when it is no terminal. One trailing newline of a file or of
    stdin is dropped, and a byte order mark at its start. Nothing else is changed. Raises
    SparseKVError for an empty prompt and for bytes that are not UTF-8. Raises OSError for a file
    that cannot be read. what, ways: the names of the prompt and of its sources in error messages.
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
    """Returns the name of a file in messages and before its text."""
    return "stdin" if name == "-" else name


def read_stdin() -> bytes:
    """Returns all of stdin as bytes (a replaced stdin may have only text)."""
    buffer = getattr(sys.stdin, "buffer", None)
    return buffer.read() if buffer is not None else sys.stdin.read().encode()


def decode_file(data: bytes, source: str) -> str:
    """Returns the text of a file or of stdin, of any kind, without a byte order mark.

    A PDF or Word file gives its text. A text is UTF-8, or UTF-16 if it begins with that mark.
    Nothing else is changed. Raises SparseKVError, which names ``source`` and a bad byte.
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
    """Returns a typed text, in any locale. Raises SparseKVError if it is not UTF-8.

    Python decodes the command line by the locale, and keeps bytes that do not fit it as surrogates.
    """
    try:
        data = text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError as error:
        raise SparseKVError(f"{source} is not UTF-8 at character {error.start}") from None
    return _decoded(data, "utf-8", source)
