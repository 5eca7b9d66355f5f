"""Tables for a reader, on stdout, of texts that come from files."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from rich.console import Console, RenderableType


def print_tables(render: Callable[[Console], None]) -> None:
    """What ``render`` prints: made first, then written in one piece."""
    from rich.console import Console

    console = Console(highlight=False, markup=False)
    if not console.is_terminal:
        console = Console(highlight=False, markup=False, width=160)
    with console.capture() as capture:
        render(console)
    click.echo(capture.get(), nl=False)


def pairs(title: str, rows: list[tuple[str, Any]]) -> RenderableType:
    return table(title, (), [row for row in rows if row[1] is not None])


def table(title: str, columns: tuple[str, ...], rows: list[tuple[Any, ...]]) -> RenderableType:
    """A table whose cells are text from a file: no markup, no control characters."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    table = Table(
        title=title or None,
        title_justify="left",
        box=SIMPLE_HEAD if columns else None,
        show_header=bool(columns),
    )
    for column in columns or ("", ""):
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*(Text(printable(cell)) for cell in row))
    return table


def printable(cell: Any) -> str:
    """A cell's text, with everything that could move a terminal's cursor shown as escapes."""
    text = f"{cell:.7g}" if isinstance(cell, float) else str(cell)
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def count(number: int) -> str:
    for unit, size in (("B", 10**9), ("M", 10**6), ("K", 10**3)):
        if number >= size:
            return f"{number / size:.2f} {unit}"
    return str(number)


def size(n_bytes: int) -> str:
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if n_bytes >= size:
            return f"{n_bytes / size:.2f} {unit}"
    return f"{n_bytes} B"
