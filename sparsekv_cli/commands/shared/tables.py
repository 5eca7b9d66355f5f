"""Tables on stdout, with texts that may come from files.

A terminal gets rich's tables. Columns that have no room follow in further tables, and long texts
are folded. Other outputs get lines with columns, which are never folded.
"""

import sys
from collections.abc import Sequence
from typing import Any

from sparsekv_cli.commands.shared.terminal import (
    escaped,
    in_singular,
    write_styled,
    write_text,
)

LONG = 30  # characters of a text that may be folded; figures are shorter


def print_pairs(title: str, rows: Sequence[tuple[str, Any]]) -> None:
    """Prints a table of names and values. Rows with the value None are left out."""
    print_table(title, (), [row for row in rows if row[1] is not None])


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """Prints a table. Cells are plain text: markup and control characters in them have no effect.

    columns: the heads of the columns; (): no heads.
    """
    cells, title = (
        [[printable(cell) for cell in row] for row in rows],
        in_singular(printable(title)),
    )
    if sys.stdout.isatty():
        _print_rich(title, columns, cells)
        return
    lines = [columns, *cells] if columns else cells
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    text = [f"{title}:"] if title else []
    for line in lines:
        padded = [cell.ljust(width) for cell, width in zip(line, widths, strict=True)]
        text.append(("  " * bool(title) + "  ".join(padded)).rstrip())
    write_text("\n".join([*text, ""]))


def _print_rich(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False, markup=False)
    heads = columns or [""] * max(map(len, rows), default=0)
    parts = _split([heads, *rows], console.width) if columns else [range(len(heads))]
    with console.capture() as capture:  # the text is made first and then written at once
        for part in parts:
            table = Table(
                title=Text(title, "bold") if title and part is parts[0] else None,
                title_justify="left",
                box=SIMPLE_HEAD if columns else None,
                show_header=bool(columns),
            )
            for i in part:
                table.add_column(Text(heads[i]), style="" if i else "cyan", overflow="fold")
            for row in rows:
                if len(parts) == 1 or any(row[i] for i in part[1:]):
                    table.add_row(*(Text(row[i]) for i in part))
            console.print(table)
    lines = [line.rstrip() for line in capture.get().splitlines() if line.strip()]
    write_styled("\n".join([*lines, "", ""] if columns else [*lines, ""]))


def _split(lines: Sequence[Sequence[str]], width: int) -> list[list[int]]:
    """Returns the columns of each table, as lists of indexes. The first column is in all tables."""
    first, *widths = (3 + max(map(len, column)) for column in zip(*lines, strict=True))
    parts, left = [[0]], width - first
    for i, each in enumerate(widths, 1):
        needed = min(each, LONG)
        if needed > left and len(parts[-1]) > 1:
            parts, left = [*parts, [0]], width - first
        parts[-1].append(i)
        left -= needed
    return parts


def printable(cell: Any) -> str:
    """Returns a cell's text. Characters that could move a terminal's cursor become escapes."""
    return escaped(f"{cell:.7g}" if isinstance(cell, float) else str(cell))


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
