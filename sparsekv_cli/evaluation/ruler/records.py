"""A file of records, a line a sample and setting, behind a line that says what they are of."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sparsekv_cli.errors import SparseKVError
from sparsekv_cli.evaluation.ruler.samples import RulerPlan
from sparsekv_cli.evaluation.ruler.scores import TaskScore, mean_score
from sparsekv_cli.methods.base import Method

Key = tuple[str, int, int, str, str]  # task, length, sample, method, its options as JSON
FORMAT = "sparsekv-cli eval ruler"


def key_of(record: Mapping[str, Any]) -> Key:
    """What a record is of."""
    options = json.dumps(record["options"], sort_keys=True)
    return record["task"], record["length"], record["sample"], record["name"], options


class RulerRecords:
    """The records by key: those of the file and new ones, which are written at once.

    configuration: what all records have in common; None as a path: no file. SparseKVError for a
    file of another configuration, or of something else. Half a line at its end is cut off.
    """

    def __init__(self, path: Path | None, configuration: Mapping[str, Any]) -> None:
        self.path = path
        self.by_key: dict[Key, dict[str, Any]] = {}
        if path is None:
            return
        head = json.dumps({"format": FORMAT, **configuration}, ensure_ascii=False)
        data = path.read_bytes() if path.exists() else b""
        whole = data[: data.rfind(b"\n") + 1]
        lines = whole.splitlines()
        if lines:
            self._check(lines[0], json.loads(head))
        elif data and not (head + "\n").encode().startswith(data):
            raise SparseKVError(f"{path}: is no file of eval ruler: name another file")
        for number, line in enumerate(lines[1:], 2):
            try:
                record = json.loads(line)
                self.by_key[key_of(record)] = record
                float(record["score"])
            except (ValueError, TypeError, KeyError, RecursionError):
                raise SparseKVError(
                    f"{path}: line {number} is no record of eval ruler: name another file"
                ) from None
        if len(whole) < len(data):
            os.truncate(path, len(whole))
        if not lines:
            self._append(head)

    def _check(self, line: bytes, expected: Mapping[str, Any]) -> None:
        try:
            found = json.loads(line)
            is_ours = found.get("format") == FORMAT
        except (ValueError, AttributeError, RecursionError):
            is_ours = False
        if not is_ours:
            raise SparseKVError(f"{self.path}: is no file of eval ruler: name another file")
        for name in (*expected, *found):
            if found.get(name) != expected.get(name):
                raise SparseKVError(
                    f"{self.path}: its records are of {name} {found.get(name)!r}, not "
                    f"{expected.get(name)!r}: give the same options, or name another file"
                )

    def add(self, record: dict[str, Any]) -> None:
        """Keeps a new record."""
        self.by_key[key_of(record)] = record
        if self.path is not None:
            self._append(json.dumps(record, ensure_ascii=False))

    def of(
        self, method: Method, plan: RulerPlan, length: int, tasks: Sequence[str]
    ) -> list[dict[str, Any]]:
        """A method's records of some tasks at a length."""
        what = {"name": method.name, "options": method.options(), "length": length}
        return [
            self.by_key[key_of({**what, "task": task, "sample": number})]
            for task in tasks
            for number in range(plan.n_samples)
        ]

    def score(
        self, method: Method, plan: RulerPlan, length: int, tasks: Sequence[str]
    ) -> TaskScore:
        """Of some tasks together."""
        return mean_score([each["score"] for each in self.of(method, plan, length, tasks)])

    def rows(self, method: Method, plan: RulerPlan, length: int) -> float | None:
        """Rows that a head read in a step, in the mean of the samples that had steps."""
        told = [each["rows_attended_mean"] for each in self.of(method, plan, length, plan.tasks)]
        found = [each for each in told if each is not None]
        return sum(found) / len(found) if found else None

    def _append(self, line: str) -> None:
        assert self.path is not None
        with self.path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")
