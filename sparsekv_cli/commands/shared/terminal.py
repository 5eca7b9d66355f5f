"""Words to the user: what the program says goes to stderr, what the model says to stdout."""

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
    """``text`` on one line, with control characters (a file may hold any) shown as escapes."""
    joined = " ".join(part.strip() for part in text.splitlines() if part.strip())
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in joined)


def say(text: str) -> None:
    """A remark of the program, on stderr; nobody hears it where stderr is closed."""
    with contextlib.suppress(BrokenPipeError):
        click.echo(text, err=True)


def write_json(value: Any, **options: Any) -> None:
    """Prints ``value`` for ``--json``. options: json.dumps's."""
    write_text(json.dumps(value, indent=2, **options) + "\n")


def write_text(text: str, stream: TextIO | None = None) -> None:
    """Text of the model, on stdout or ``stream``, at once."""
    stream = stream or sys.stdout
    stream.write(text)
    stream.flush()


def has_styles(stream: TextIO) -> bool:
    """Whether text can be dim there: on a terminal that knows how, unless the user wants none."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


class ShownAnswer:
    """An answer on its way to the user: the text to stdout, what was thought before to ``stream``.

    Thinking is dim where that is possible; elsewhere it stands between the model's own markers.
    """

    def __init__(
        self,
        stream: TextIO,
        markers: tuple[str, str] = ("", ""),
        wrap: Callable[[str], str] | None = None,
    ) -> None:
        """wrap: makes of each piece what a terminal is to get."""
        self._stream, self._markers = stream, markers
        self._wrap = wrap or str
        self._is_styled = has_styles(stream)
        self._is_thinking = False

    def think(self, text: str) -> None:
        """More of the thinking."""
        start, _ = self._markers
        if self._is_styled:
            self._say(f"{DIM}{self._wrap(text)}{PLAIN}")
        else:
            self._say(self._wrap(text if self._is_thinking else f"{start}\n{text}"))
        self._is_thinking = True

    def write(self, text: str) -> None:
        """More of the answer."""
        self.end_thinking("\n\n")
        write_text(self._wrap(text))

    def end_thinking(self, space: str = "\n") -> None:
        """The thinking is over: what follows begins a line."""
        if self._is_thinking:
            self._is_thinking = False
            self._say(self._wrap(space if self._is_styled else f"\n{self._markers[1]}{space}"))

    def _say(self, text: str) -> None:
        with contextlib.suppress(BrokenPipeError):
            self._stream.write(text)
            self._stream.flush()


def explain_faults(model: Path | str | None = None) -> None:
    """Lets faults in native code end the program with a line, as long as the command runs.

    model: a file that is going to be mapped, or a line that names several.
    """
    from sparsekv_cli.models import faults

    context = click.get_current_context(silent=True)
    if context is None:
        return
    start = f"{SHOW_CURSOR}\n" if sys.stderr.isatty() else ""  # after a bar or half an answer
    context.with_resource(faults.explain_abort(start))
    if model is not None:
        context.with_resource(faults.explain_cut(one_line(str(model)), start))
