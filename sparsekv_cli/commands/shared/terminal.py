"""Output for the user: the program's remarks go to stderr, and the model's text to stdout.

This module alone writes to the two streams. A text may come from a file, a hub or a model. Its
control characters would set the title or clear the screen. So a terminal gets them as visible
characters. A pipe and a file get the text as it is.
"""

import contextlib
import json
import os
import re
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

import click

from sparsekv_cli.errors import without_secrets

DIM, PLAIN = "\x1b[2m", "\x1b[0m"
SHOW_CURSOR = "\x1b[?25h"  # which rich hides while it shows a bar
# C0 and C1 controls except the tab and the line feed, DEL, and what turns the direction of a text.
CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
# One of what remarks count; ``are`` may follow it.
ONE = re.compile(
    r"(?<![\w.,:/-])1 (token|row|layer|file|message|turn|character|step|line|thread|core|model"
    r"|sample|chunk|byte|part|method|page|head|prompt|answer|draft|sequence|new one)s\b( are\b)?"
)
LEAST_COLUMNS = 30  # of a terminal on which remarks break between words


def escaped(text: str) -> str:
    """Returns ``text`` with an escape such as ``\\x1b`` for every character that does not print."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def one_line(text: str) -> str:
    """Returns ``text`` on one line, with control characters (a file may hold any) as escapes."""
    return escaped(" ".join(part.strip() for part in text.splitlines() if part.strip()))


def visible(text: str, stream: TextIO) -> str:
    """Returns what to write for ``text``: on a terminal controls are escapes such as ``\\x1b``.

    Line feeds and tabs stay.
    """
    return CONTROLS.sub(lambda found: escaped(found[0]), text) if stream.isatty() else text


def in_singular(text: str) -> str:
    """Returns ``text`` with ``1 token is`` for ``1 tokens are``."""
    return ONE.sub(lambda found: f"1 {found[1]}{' is' if found[2] else ''}", text)


def say(text: str) -> None:
    """Prints a remark of the program on stderr, unless stderr takes none.

    It has no passwords. On a terminal its lines break between words.
    """
    text = in_singular(visible(without_secrets(text), sys.stderr))
    with contextlib.suppress(OSError):  # a closed pipe, a full disk
        n_columns = _columns(sys.stderr)
        if n_columns >= LEAST_COLUMNS:
            text = "\n".join(_broken(line, n_columns) for line in text.split("\n"))
        write_styled(f"{text}\n", sys.stderr)


def _columns(stream: TextIO) -> int:
    """Returns the columns of a terminal; 0 for another stream."""
    try:
        return os.get_terminal_size(stream.fileno()).columns if stream.isatty() else 0
    except (OSError, ValueError):
        return 0


def _broken(line: str, n_columns: int) -> str:
    """Returns a line with line breaks between words, if it is too long."""
    if len(line) <= n_columns:
        return line
    wrapper = textwrap.TextWrapper(n_columns, break_long_words=False, break_on_hyphens=False)
    return wrapper.fill(line)


def write_json(value: Any, **options: Any) -> None:
    """Prints ``value`` for ``--json``. options: json.dumps's."""
    write_text(json.dumps(value, indent=2, **options) + "\n")


def write_text(text: str, stream: TextIO | None = None) -> None:
    """Writes text to stdout or ``stream``, at once. A terminal gets ``visible`` text."""
    stream = stream or sys.stdout
    write_styled(visible(text, stream), stream)


def write_styled(text: str, stream: TextIO | None = None) -> None:
    """Writes text whose control sequences are the program's own."""
    stream = stream or sys.stdout
    stream.write(text)
    stream.flush()


def shares_a_file(stream: TextIO, other: TextIO) -> bool:
    """Returns whether both write to the same place, as after ``2>&1``."""
    try:
        return os.path.sameopenfile(stream.fileno(), other.fileno())
    except (OSError, ValueError):  # a replaced stream has no number
        return False


def has_styles(stream: TextIO) -> bool:
    """Returns whether text can be dim there: on a terminal that can, unless the user objects."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


class ShownAnswer:
    """Shows an answer while it comes: the text on stdout, the thinking on ``stream``.

    Thinking is dim if possible. Otherwise it stands between the model's own markers.
    """

    def __init__(
        self,
        stream: TextIO,
        markers: tuple[str, str] = ("", ""),
        wrap: Callable[[str], str] | None = None,
    ) -> None:
        """wrap: turns each piece into the text for a terminal."""
        self._stream, self._markers = stream, markers
        self._wrap = wrap or str
        self._is_styled = has_styles(stream)
        self._is_thinking = False
        self._last = "\n"  # the last character of the answer

    def think(self, text: str) -> None:
        """Shows more of the thinking."""
        start, _ = self._markers
        if self._is_styled:
            self._say(text, DIM, PLAIN)
        else:
            self._say(text if self._is_thinking else f"{start}\n{text}")
        self._is_thinking = True

    def write(self, text: str) -> None:
        """Shows more of the answer."""
        self.end_thinking("\n\n")
        self._last = text[-1:] or self._last
        write_styled(self._wrap(visible(text, sys.stdout)))

    def end_thinking(self, space: str = "\n") -> None:
        """Ends the thinking. The answer then begins a line."""
        if self._is_thinking:
            self._is_thinking = False
            self._say(space if self._is_styled else f"\n{self._markers[1]}{space}")

    def end_line(self) -> None:
        """Ends the answer's last line where a remark would follow on it."""
        self.end_thinking()
        if self._last != "\n":
            if sys.stdout.isatty():
                write_text("\n")
            elif shares_a_file(sys.stdout, sys.stderr):
                say("")
        self._last = "\n"

    def _say(self, text: str, before: str = "", after: str = "") -> None:
        with contextlib.suppress(OSError):
            shown = self._wrap(visible(text, self._stream))
            write_styled(f"{before}{shown}{after}", self._stream)


def explain_faults(model: Path | str | None = None) -> None:
    """Makes faults in native code end the program with a line, while the command runs.

    model: a file that will be mapped, or a line that names several.
    """
    from sparsekv_cli.models import faults

    context = click.get_current_context(silent=True)
    if context is None:
        return
    start = f"{SHOW_CURSOR}\n" if sys.stderr.isatty() else ""  # after a bar or half an answer
    context.with_resource(faults.explain_abort(start))
    if model is not None:
        context.with_resource(faults.explain_cut(one_line(str(model)), start))
