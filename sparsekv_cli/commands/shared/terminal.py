"""Output for the user: the program's remarks go to stderr, and the model's text to stdout."""

import contextlib
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

import click

DIM, PLAIN = "\x1b[2m", "\x1b[0m"
SHOW_CURSOR = "\x1b[?25h"  # which rich hides while it shows a bar


def one_line(text: str) -> str:
    """Returns ``text`` on one line, with control characters (a file may hold any) as escapes."""
    joined = " ".join(part.strip() for part in text.splitlines() if part.strip())
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in joined)


def say(text: str) -> None:
    """Prints a remark of the program on stderr, unless stderr takes none."""
    with contextlib.suppress(OSError):  # a closed pipe, a full disk
        click.echo(text, err=True)


def write_json(value: Any, **options: Any) -> None:
    """Prints ``value`` for ``--json``. options: json.dumps's."""
    write_text(json.dumps(value, indent=2, **options) + "\n")


def write_text(text: str, stream: TextIO | None = None) -> None:
    """Writes text of the model to stdout or ``stream``, at once."""
    stream = stream or sys.stdout
    stream.write(text)
    stream.flush()


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

    def think(self, text: str) -> None:
        """Shows more of the thinking."""
        start, _ = self._markers
        if self._is_styled:
            self._say(f"{DIM}{self._wrap(text)}{PLAIN}")
        else:
            self._say(self._wrap(text if self._is_thinking else f"{start}\n{text}"))
        self._is_thinking = True

    def write(self, text: str) -> None:
        """Shows more of the answer."""
        self.end_thinking("\n\n")
        write_text(self._wrap(text))

    def end_thinking(self, space: str = "\n") -> None:
        """Ends the thinking. The answer then begins a line."""
        if self._is_thinking:
            self._is_thinking = False
            self._say(self._wrap(space if self._is_styled else f"\n{self._markers[1]}{space}"))

    def _say(self, text: str) -> None:
        with contextlib.suppress(OSError):
            write_text(text, self._stream)


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
