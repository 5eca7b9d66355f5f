"""Reads the text that the user typed, piped or wrote in a file, as a prompt."""

import sys
from pathlib import Path

from sparsekv_cli.errors import SparseKVError
from sparsekv_cli.system.documents import document_text, kind_of


def read_prompt(
    text: str | None, file: str | None, what: str = "prompt", ways: str = "-p TEXT, -f FILE"
) -> str:
    """Returns the prompt: a file's or piped text, a blank line, then ``text``. One may be missing.

    file: a path, or ``-`` for stdin. Without one, stdin is read when it is no terminal. One
    trailing newline of a file or of stdin is dropped, and a byte order mark at its start. Nothing
    else is changed. Raises SparseKVError for an empty prompt and for bytes that are not UTF-8.
    Raises OSError for a file that cannot be read. what, ways: the names of the prompt and of its
    sources in error messages.
    """
    parts = []
    if file is not None and file != "-":
        parts.append(decode_file(Path(file).read_bytes(), file).removesuffix("\n"))
    elif file == "-" or not sys.stdin.isatty():
        parts.append(decode_file(read_stdin(), "stdin").removesuffix("\n"))
    if text is not None:
        parts.append(check_utf8(text, "the prompt given with -p"))
    prompt = "\n\n".join(part for part in parts if part)
    if not prompt:
        raise SparseKVError(
            f"the {what} is empty: give {ways}, or pipe a text that is not empty to stdin"
        )
    return prompt


def read_stdin() -> bytes:
    """Returns all of stdin as bytes (a replaced stdin may have only text)."""
    buffer = getattr(sys.stdin, "buffer", None)
    return buffer.read() if buffer is not None else sys.stdin.read().encode()


def decode_file(data: bytes, source: str) -> str:
    """Returns ``text_of`` a file or stdin without a byte order mark."""
    return text_of(data, source).removeprefix("\ufeff")


def text_of(data: bytes, source: str) -> str:
    """Returns the text of a PDF or a Word file, or ``decode_utf8`` of another file."""
    return document_text(data, source) if kind_of(data) else decode_utf8(data, source)


def decode_utf8(data: bytes, source: str) -> str:
    """Returns ``data`` as text. Raises SparseKVError, which names ``source`` and a bad byte."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise SparseKVError(
            f"{source} is not UTF-8: byte 0x{data[error.start]:02x} at offset {error.start}; "
            "convert it first, for example with iconv"
        ) from None


def check_utf8(text: str, source: str) -> str:
    """Returns a typed text, in any locale. Raises SparseKVError if it is not UTF-8.

    Python decodes the command line by the locale, and keeps bytes that do not fit it as surrogates.
    """
    try:
        data = text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError as error:
        raise SparseKVError(f"{source} is not UTF-8 at character {error.start}") from None
    return decode_utf8(data, source)
