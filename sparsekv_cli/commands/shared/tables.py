"""Tables on stdout, of texts that come from files.

A terminal gets rich's tables, folded to its width. In a narrow terminal the last cell of a row
stands below the others. Other outputs get lines of columns, which are never folded.
"""

import sys
from collections.abc import Sequence
from typing import Any

import click

NARROW = 72  # characters of a line that is too short for three columns


def print_pairs(title: str, rows: Sequence[tuple[str, Any]]) -> None:
    """Prints names and values, except values of None."""
    print_table(title, (), [row for row in rows if row[1] is not None])


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """Prints a table whose cells are text from a file: no markup, no control characters.

    columns: the heads of the columns, if any.
    """
    cells = [[printable(cell) for cell in row] for row in rows]
    if sys.stdout.isatty():
        _print_rich(title, columns, cells)
        return
    lines = [columns, *cells] if columns else cells
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    text = [f"{title}:"] if title else []
    for line in lines:
        padded = [cell.ljust(width) for cell, width in zip(line, widths, strict=True)]
        text.append(("  " * bool(title) + "  ".join(padded)).rstrip())
    click.echo("\n".join(text))


def _print_rich(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False, markup=False)
    table = Table(
        title=Text(title, "bold") if title else None,
        title_justify="left",
        box=SIMPLE_HEAD if columns else None,
        show_header=bool(columns),
    )
    heads = columns or [""] * max(map(len, rows), default=0)
    for i, head in enumerate(heads):
        table.add_column(Text(head), style="cyan" if i == 0 else "", overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row))
    natural = sum(max(map(len, column)) + 3 for column in zip(heads, *rows, strict=True))
    is_narrow = len(columns) > 2 and natural > console.width < NARROW
    with console.capture() as capture:  # made first, then written in one piece
        console.print(_stacked(title, rows) if is_narrow else table)
    lines = [line.rstrip() for line in capture.get().splitlines() if line.strip()]
    click.echo("\n".join([*lines, ""] if columns else lines))


def _stacked(title: str, rows: Sequence[Sequence[str]]) -> Any:
    """Returns a table of rows whose last cells stand below the others."""
    from rich.console import Group
    from rich.padding import Padding
    from rich.text import Text

    lines: list[Any] = [Text(title, "bold")] if title else []
    for first, *middle, last in rows:
        lines.append(Text("  ").join([Text(first, "cyan"), *map(Text, middle)]))
        lines.append(Padding(Text(last), (0, 0, 0, 4)))
    return Group(*lines)


def printable(cell: Any) -> str:
    """Returns a cell's text; characters that could move a terminal's cursor become escapes."""
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
