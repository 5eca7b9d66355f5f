"""Output for the user: remarks of the program go to stderr, text of the model goes to stdout.

Only this module writes to the two streams. A text may come from a file, a hub or a model. Its
control characters could set the title or clear the screen. So a terminal gets them as visible
escapes. A pipe and a file get the text unchanged.
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
SHOW_CURSOR = "\x1b[?25h"  # rich hides the cursor while it shows a bar
# C0 and C1 controls except tab and line feed, DEL, and characters that change the text's direction.
CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
# A remark with the number 1 before a plural; ``are`` may follow the plural.
ONE = re.compile(
    r"(?<![\w.,:/-])1 (token|row|layer|file|message|turn|character|step|line|thread|core|model"
    r"|sample|chunk|byte|part|method|page|head|prompt|answer|draft|sequence|new one)s\b( are\b)?"
)
LEAST_COLUMNS = 30  # on narrower terminals remarks do not break between words


def escaped(text: str) -> str:
    r"""Returns ``text`` with escapes such as ``\\x1b`` for all characters that do not print."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def one_line(text: str) -> str:
    """Returns ``text`` on one line. Control characters become escapes."""
    return escaped(" ".join(part.strip() for part in text.splitlines() if part.strip()))


def visible(text: str, stream: TextIO) -> str:
    """Returns ``text`` as ``stream`` should get it: on a terminal, controls become escapes.

    Line feeds and tabs stay.
    """
    return CONTROLS.sub(lambda found: escaped(found[0]), text) if stream.isatty() else text


def in_singular(text: str) -> str:
    """Returns ``text`` with ``1 token is`` for ``1 tokens are``."""
    return ONE.sub(lambda found: f"1 {found[1]}{' is' if found[2] else ''}", text)


def say(text: str) -> None:
    """Prints a remark of the program on stderr. Errors of stderr are ignored.

    Passwords in the remark are removed. On a terminal its lines break between words.
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
    """Returns ``line`` with line breaks between words if it is too long."""
    if len(line) <= n_columns:
        return line
    wrapper = textwrap.TextWrapper(n_columns, break_long_words=False, break_on_hyphens=False)
    return wrapper.fill(line)


def write_json(value: Any, **options: Any) -> None:
    """Prints ``value`` for ``--json``. options: further arguments of json.dumps."""
    write_text(json.dumps(value, indent=2, **options) + "\n")


def write_text(text: str, stream: TextIO | None = None) -> None:
    """Writes text to ``stream`` (None: stdout) and flushes it. A terminal gets ``visible`` text."""
    stream = stream or sys.stdout
    write_styled(visible(text, stream), stream)


def write_styled(text: str, stream: TextIO | None = None) -> None:
    """Writes text in which only the program has put control sequences."""
    stream = stream or sys.stdout
    stream.write(text)
    stream.flush()


def shares_a_file(stream: TextIO, other: TextIO) -> bool:
    """Returns whether two streams write to the same file or terminal, as after ``2>&1``."""
    try:
        return os.path.sameopenfile(stream.fileno(), other.fileno())
    except (OSError, ValueError):  # a replaced stream has no number
        return False


def has_styles(stream: TextIO) -> bool:
    """Returns whether ``stream`` can show dim text: a terminal that can, if the user allows it."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


class ShownAnswer:
    """Writes an answer while it is generated: its text on stdout, its thinking on ``stream``.

    Thinking is dim if ``stream`` can show that. Otherwise it stands between the model's markers.
    """

    def __init__(
        self,
        stream: TextIO,
        markers: tuple[str, str] = ("", ""),
        wrap: Callable[[str], str] | None = None,
    ) -> None:
        """wrap: turns each piece of text into what the terminal gets."""
        self._stream, self._markers = stream, markers
        self._wrap = wrap or str
        self._is_styled = has_styles(stream)
        self._is_thinking = False
        self._last = "\n"  # the last character of the answer

    def think(self, text: str) -> None:
        """Writes the next piece of the thinking."""
        start, _ = self._markers
        if self._is_styled:
            self._say(text, DIM, PLAIN)
        else:
            self._say(text if self._is_thinking else f"{start}\n{text}")
        self._is_thinking = True

    def write(self, text: str) -> None:
        """Writes the next piece of the answer's text."""
        self.end_thinking("\n\n")
        self._last = text[-1:] or self._last
        write_styled(self._wrap(visible(text, sys.stdout)))

    def end_thinking(self, space: str = "\n") -> None:
        """Ends the thinking, so that the answer begins on a new line."""
        if self._is_thinking:
            self._is_thinking = False
            self._say(space if self._is_styled else f"\n{self._markers[1]}{space}")

    def end_line(self) -> None:
        """Ends the answer's last line if the next remark would be on the same line."""
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
    """Lets faults in native code end the program with a line that explains them.

    model: the file that will be mapped, or a text that names several.
    """
    from sparsekv_cli.models import faults

    context = click.get_current_context(silent=True)
    if context is None:
        return
    # a bar or half an answer may be on the line
    start = f"{SHOW_CURSOR}\n" if sys.stderr.isatty() else ""
    context.with_resource(faults.explain_abort(start))
    if model is not None:
        context.with_resource(faults.explain_cut(one_line(str(model)), start))
