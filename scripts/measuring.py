"""Programs that measure share these options, tables, files of figures and lines of errors."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import wraps
from pathlib import Path
from typing import Any, NamedTuple

from sparsekv_cli.errors import SparseKVError

ROOT = Path(__file__).resolve().parents[1]
PROSE = ROOT / "scripts" / "accuracy" / "texts" / "prose.txt"


def parser_of(about: str | None, model: str = "smollm2", threads: int | None = 0) -> ArgumentParser:
    """A parser with the common options. model, threads: defaults; empty: a model must be given;
    None: there is no option for threads.
    """
    parser = ArgumentParser(description=about, formatter_class=RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("-m", "--model", default=model, required=not model, help="GGUF file or packaged model")
    if threads is not None:
        add("-t", "--threads", type=int, default=threads, help="0: the physical cores")
    add("--json", type=Path, metavar="FILE", help="write the figures here too")
    return parser


def errors_in_a_line(main: Callable[..., int]) -> Callable[..., int]:
    """A ``main`` that ends with a line on stderr and status 1 where it raised SparseKVError."""

    @wraps(main)
    def run(arguments: Sequence[str] | None = None) -> int:
        try:
            return main(arguments)
        except SparseKVError as error:
            log(f"error: {error}")
            return 1

    return run


def log(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def write_json(path: Path | None, figures: Any) -> None:
    """Writes a file of figures, if there is a path."""
    if path is not None:
        path.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")


class Ended(NamedTuple):
    """A process that has ended: its exit code, what it printed, and the most memory it had."""

    code: int
    stdout: str
    stderr: str
    peak_bytes: int

    @property
    def last_line(self) -> str:
        """The last line of its errors."""
        return (self.stderr.strip().splitlines() or ["it said nothing"])[-1]


def run(
    command: Sequence[str], environment: Mapping[str, str], folder: Path | None = None
) -> Ended:
    """Runs a program in a folder. OSError when it cannot be started."""
    with (
        tempfile.TemporaryFile("w+", encoding="utf-8") as out,
        tempfile.TemporaryFile("w+", encoding="utf-8") as err,
    ):
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=out, stderr=err, env=environment, cwd=folder
        )
        try:
            _, status, usage = os.wait4(process.pid, 0)
        except BaseException:
            process.kill()
            process.wait()
            raise
        process.returncode = os.waitstatus_to_exitcode(status)
        out.seek(0), err.seek(0)
        unit = 1 if sys.platform == "darwin" else 1024
        return Ended(process.returncode, out.read(), err.read(), usage.ru_maxrss * unit)


def three(value: float | None) -> str:
    """Three figures, as many as a measurement has."""
    if value is None:
        return ""
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


def number(value: object) -> str:
    """A float with three digits, another value as it is, and nothing for None."""
    return three(value) if value is None or isinstance(value, float) else str(value)


def difference(row: Mapping[str, Any], name: str) -> str:
    """``-4.2 (-9 to 1)``: a mean and the ends of its interval, if it has one; else nothing."""
    if f"{name}_mean" not in row:
        return ""
    ends = [f"{row[f'{name}_{end}']:.0f}" for end in ("low", "high") if f"{name}_{end}" in row]
    return f"{row[f'{name}_mean']:+.1f}" + (f" ({' to '.join(ends)})" if ends else "")


def line(cells: Iterable[object]) -> str:
    """A line of a Markdown table."""
    return f"| {' | '.join(map(str, cells))} |"


def table(titles: Sequence[str], rows: Iterable[Iterable[object]]) -> str:
    """A Markdown table whose columns are numbers, but for the first one."""
    head = [line(titles), "|---" + "|---:" * (len(titles) - 1) + "|"]
    return "\n".join([*head, *map(line, rows)])
