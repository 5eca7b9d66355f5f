"""The output of ``compare``: a table for people, an HTML page, a picture."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparsekv_cli import __version__
from sparsekv_cli.commands.shared.tables import print_table
from sparsekv_cli.commands.shared.terminal import one_line, write_text
from sparsekv_cli.errors import SparseKVError
from sparsekv_cli.evaluation.roofline import cpu_name
from sparsekv_cli.system.files import naming, replacing

if TYPE_CHECKING:
    from sparsekv_cli.model import Model


def about(model: Model) -> dict[str, Any]:
    """Returns what was measured and where, for the reports."""
    arguments = sys.argv[1:] if sys.argv[1:2] == ["compare"] else ["compare"]
    name = model.gguf.metadata.get("general.name")
    return {
        "model": one_line(name if name and isinstance(name, str) else model.gguf.path.name),
        "cpu": cpu_name(),
        "device": model.config.device,
        "threads": model.n_threads,
        "version": f"sparsekv-cli {__version__}",
        "date": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "command": shlex.join(["sparsekv-cli", *arguments]),
    }


def check_outputs(*paths: str | None) -> None:
    """Raises SparseKVError if a report could not be written, before anything is measured."""
    from sparsekv_cli.evaluation.report.figures import check_matplotlib

    for path in (Path(path) for path in paths if path is not None):
        check_matplotlib()
        if not path.parent.is_dir():
            raise SparseKVError(f"{path}: there is no folder {path.parent}")
        place = path if path.exists() else path.parent
        if (place == path and not path.is_file()) or not os.access(place, os.W_OK):
            raise SparseKVError(f"{path}: cannot be written: name another file")


def write_reports(found: Mapping[str, Any], html: str | None, png: str | None) -> None:
    """Writes the HTML page and the picture, if the user has named files for them."""
    from sparsekv_cli.evaluation.report import figures, page

    if html is not None:
        with naming(html), replacing(Path(html), 0o666) as file:
            file.write(page.page(found).encode(errors="replace"))
    if png is not None:
        with naming(png), replacing(Path(png), 0o666) as file:
            file.write(figures.png_picture(found, page.headline(found)))


def print_report(found: Mapping[str, Any]) -> None:
    """Prints a table with intervals, and the methods that differ only by noise."""
    from sparsekv_cli.evaluation.report.page import cells, columns_of, doubt, equal_sentences

    columns = columns_of(found)
    rows = []
    for row in found["methods"]:
        values = cells(row, columns)
        rows.append([row["spec"], *(value for value, _ in values)])
        rows.append(["", *(interval for _, interval in values)])
    heads = ["method", *(heading for _, heading, _ in columns)]
    print_table(f"{found['context']} tokens, {found['steps']} steps", heads, rows)
    lines = [f"{name}, equal within noise: {methods}" for name, methods in equal_sentences(found)]
    lines += filter(None, [doubt(found)])
    write_text("".join(f"  {line}\n" for line in [*lines, *_needle_lines(found)]))


def _needle_lines(found: Mapping[str, Any]) -> list[str]:
    """Returns lines such as ``needles found: full 10, topk 10, streaming 2 of 10``."""
    needles = found["needles"]
    if not needles:
        return []
    specs = [row["spec"] for row in found["methods"]]
    counts = ", ".join(f"{spec} {sum(each['found'][spec] for each in needles)}" for spec in specs)
    return [f"needles found: {counts} of {len(needles)}"]
