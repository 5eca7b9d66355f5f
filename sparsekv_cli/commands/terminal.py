"""Words to the user: what the program says goes to stderr, what the model says to stdout."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path

import click

SHOW_CURSOR = "\x1b[?25h"  # which rich hides while it shows a bar


def one_line(text: str) -> str:
    """``text`` on one line, with control characters (a file may hold any) shown as escapes."""
    joined = " ".join(part.strip() for part in text.splitlines() if part.strip())
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in joined)


def say(text: str) -> None:
    """A remark of the program, on stderr; nobody hears it where stderr is closed."""
    with contextlib.suppress(BrokenPipeError):
        click.echo(text, err=True)


def write_text(text: str) -> None:
    """Text of the model, on stdout, at once."""
    sys.stdout.write(text)
    sys.stdout.flush()


def explain_faults(model: Path | None = None) -> None:
    """Lets faults in native code end the program with a line, as long as the command runs.

    model: a file that is going to be mapped.
    """
    from sparsekv_cli.models import faults

    context = click.get_current_context(silent=True)
    if context is None:
        return
    start = f"{SHOW_CURSOR}\n" if sys.stderr.isatty() else ""  # after a bar or half an answer
    context.with_resource(faults.explain_abort(start))
    if model is not None:
        context.with_resource(faults.explain_cut(one_line(str(model)), start))
