"""The document of ``advise``: where it comes from, which part is read, and its question."""

import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sparsekv_cli.commands.shared.prompt import MARKS, decode_file, read_stdin
from sparsekv_cli.commands.shared.terminal import say
from sparsekv_cli.errors import SparseKVError
from sparsekv_cli.system.documents import kind_of

BOM = b"\xef\xbb\xbf"
BUILT_IN = "built-in"  # name of the source, if the program's own text is used
# the question in the last line of the report, if the user has given none
ASKED = "What is this text about?"


@dataclass(frozen=True)
class Document:
    """The text for which ``advise`` gives advice."""

    source: str  # a file's name, stdin or built-in
    text: str
    n_skipped: int = 0  # bytes of the file before the text
    is_text: bool = True  # True: the bytes are UTF-8 text, so that a shell command can cut it

    def reading(self, text: str) -> tuple[str, list[str]]:
        """Returns how ``run`` gets ``text``, the document's beginning: a pipe, and options."""
        name = "" if self.source == "stdin" else self.source
        if self.is_text and len(text) < len(self.text):
            n_bytes = self.n_skipped + len(text.encode())
            return f"{shlex.join(['head', '-c', str(n_bytes), *filter(None, [name])])} | ", []
        return "", ["-f", name or "-"]


@dataclass(frozen=True)
class Reading:
    """The part of a document that was read, as ``run`` would give it to the model."""

    document: Document
    text: str
    ids: Sequence[int]
    n_after: int  # most tokens of a prompt after the text
    seconds: float
    again_s: float
    is_kept: bool

    def as_dict(self) -> dict[str, Any]:
        """Returns the object for ``--json``."""
        return {
            "source": self.document.source,
            "tokens": len(self.ids),
            "share_read": len(self.text) / len(self.document.text),
            "seconds": self.seconds,
            "seconds_again": self.again_s,
            "is_kept": self.is_kept,
        }


def read_document(file: str | None) -> Document:
    """Returns the text of a file, of stdin (``-``, or piped text), or the program's own text.

    Raises SparseKVError for a document that is empty or not text.
    """
    if file is None and sys.stdin.isatty():
        return _built_in()
    is_piped = file is None or file == "-"
    source = "stdin" if file is None or file == "-" else file
    data = read_stdin() if is_piped else Path(source).read_bytes()
    if file is None and not data:
        return _built_in()
    is_text = not kind_of(data) and not data.startswith(tuple(MARKS))
    text = decode_file(data, source).removesuffix("\n")
    if (at := text.find("\0")) >= 0:
        raise SparseKVError(
            f"{source}: this is not a text: zero byte at character {at}; give a text in UTF-8"
        )
    if not text.strip():
        raise SparseKVError(
            f"{source}: the document is empty: give one with words, or leave it out to measure a "
            "built-in text"
        )
    return Document(source, text, len(BOM) if data.startswith(BOM) else 0, is_text)


def _built_in() -> Document:
    from sparsekv_cli.calibration.calibrations import built_in_text

    say("no document is given, so a built-in text is measured: give yours with -f FILE")
    return Document(BUILT_IN, built_in_text().text)


def command_line(
    document: Document, text: str, question: str | None, model: Sequence[str], rest: Sequence[str]
) -> str:
    """Returns the command that asks a question about ``text``, the part that was read.

    model, rest: options before and after those of the prompt.
    """
    if document.source == BUILT_IN:
        return shlex.join(["sparsekv-cli", "chat", *model, *rest])
    pipe, options = document.reading(text)
    asked = ["-p", question or ASKED]
    return pipe + shlex.join(["sparsekv-cli", "run", *model, *options, *asked, *rest])
