"""What scripts/gpu/bench has found so far: tables on stdout, the same in a JSON file, as it goes.

A measurement that fails, or for which no time is left, costs the others nothing.
"""

import json
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from measuring import line, log, number

Row = Mapping[str, Any]


class Task(NamedTuple):
    """Some rows of a table. name: what is measured, for messages."""

    table: str
    name: str
    rows: Callable[[], Iterable[Row]]


class GpuReport:
    """path: the JSON file, if any. about: what to note there first. seconds: time for all tasks.
    match: a task runs if its name has one of these in it.

    errors and left_out: lines about tasks that failed or for which there was no time.
    """

    def __init__(
        self, path: Path | None, about: Mapping[str, Any], seconds: float, match: Sequence[str]
    ) -> None:
        self._path, self._about, self._match = path, about, match
        self._end = time.monotonic() + seconds
        self._tables: dict[str, list[Row]] = {}
        self._printing = ""  # the table that is being printed
        self.errors: list[str] = []
        self.left_out: list[str] = []

    def run(self, part: str, tasks: Iterable[Task], after: Callable[[], None]) -> None:
        """Runs ``tasks``, with ``after`` after each; what they raise is noted and printed."""
        try:
            for task in tasks:
                if not any(text in task.name for text in self._match):
                    continue
                if time.monotonic() >= self._end:
                    self.left_out.append(f"{task.table}, {task.name}: no time left")
                    continue
                try:
                    for row in task.rows():
                        self._add(task.table, row)
                except Exception as error:
                    self._note(f"{task.table}, {task.name}", error)
                after()
        except Exception as error:  # in making the tasks
            self._note(part, error)
        self.save()

    def _note(self, what: str, error: Exception) -> None:
        traceback.print_exc()
        # Kept without the traceback, whose frames would keep what they had allocated.
        self.errors.append(f"{what}: {type(error).__name__}: {error}")
        self.save()

    def _add(self, table: str, row: Row) -> None:
        """Prints and keeps a row; the columns are those of the table's first one."""
        rows = self._tables.setdefault(table, [])
        rows.append(row)
        if table != self._printing:
            self._printing = table
            print(f"\n## {table}\n\n{line(rows[0])}\n|{'---|' * len(rows[0])}")
        if row.get("ok") is False:
            self.errors.append(f"{table}: not ok: {line(map(number, row.values()))}")
        print(line(number(row.get(column)) for column in rows[0]), flush=True)
        self.save()

    def save(self) -> None:
        """Writes the file anew."""
        if self._path is not None:
            found = {"errors": self.errors, "left out": self.left_out, **self._tables}
            self._path.write_text(json.dumps({**self._about, **found}, indent=1), encoding="utf-8")

    def finish(self) -> bool:
        """Says on stderr what is missing; whether nothing has failed."""
        self.save()
        for heading, lines in (("left out", self.left_out), ("error", self.errors)):
            for each in lines:
                log(f"{heading}: {each}")
        return not self.errors
