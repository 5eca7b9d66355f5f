"""A JSONL file of records: a first line that describes the run, then one record a line.

Each record is written at once, so that an interrupted run can continue.
"""

import json
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, ClassVar

from sparsekv_cli.errors import SparseKVError
from sparsekv_cli.system.files import AppendedFile, naming

CALIBRATION = "calibration"  # field of a record: the hash of its method's calibration


class Records(ExitStack, ABC):
    """The records of a file by key. New records are written to the file at once.

    path: None: there is no file. configuration: the fields of the first line. calibrations:
    method's name -> hash; records with another hash are ignored. Raises SparseKVError if the file
    has another configuration, is another kind of file, or if another process writes to it. An
    incomplete last line is cut off. A with block closes the file.
    """

    command: ClassVar[str]  # the command that writes the file

    def __init__(
        self,
        path: Path | None,
        configuration: Mapping[str, Any],
        calibrations: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__()
        self.path = path
        self.calibrations = calibrations or {}
        self.by_key: dict[Any, dict[str, Any]] = {}
        self._write: Callable[[str], None] = lambda text: None
        if path is None:
            return
        self._write = self.enter_context(AppendedFile(path, is_alone=True)).write
        try:
            self._read(path, configuration)
        except BaseException:
            self.close()
            raise

    def _read(self, path: Path, configuration: Mapping[str, Any]) -> None:
        """Reads the records of the file. Writes the first line of a new file."""
        expected = {"format": f"sparsekv-cli {self.command}", **configuration}
        head = json.dumps(expected)
        data = path.read_bytes() if path.is_file() else b""
        whole = data[: data.rfind(b"\n") + 1]
        lines = whole.splitlines()
        if lines:
            self._check_head(lines[0], json.loads(head))
        elif data and not (head + "\n").encode().startswith(data):
            raise SparseKVError(f"{path}: is no file of {self.command}: name another file")
        for number, line in enumerate(lines[1:], 2):
            try:
                record = json.loads(line)
                self.check(record)
                if record.get(CALIBRATION) == self.calibrations.get(record["name"]):
                    self.by_key[self.key_of(record)] = record
            except (ValueError, TypeError, KeyError, RecursionError):
                raise SparseKVError(
                    f"{path}: line {number} is no record of {self.command}: name another file"
                ) from None
        if len(whole) < len(data):
            with naming(path):
                os.truncate(path, len(whole))
        if not lines:
            self._write(head + "\n")

    @staticmethod
    @abstractmethod
    def key_of(record: Mapping[str, Any]) -> Any:
        """Returns the key by which a record is found."""

    @staticmethod
    @abstractmethod
    def check(record: Mapping[str, Any]) -> None:
        """Raises KeyError, TypeError or ValueError if a field is missing or wrong."""

    def _check_head(self, line: bytes, expected: Mapping[str, Any]) -> None:
        try:
            found = json.loads(line)
            is_ours = found.get("format") == expected["format"]
        except (ValueError, AttributeError, RecursionError):
            is_ours = False
        if not is_ours:
            raise SparseKVError(f"{self.path}: is no file of {self.command}: name another file")
        for name in (*expected, *found):
            if found.get(name) != expected.get(name):
                raise SparseKVError(
                    f"{self.path}: its records are of {name} {found.get(name)!r}, not "
                    f"{expected.get(name)!r}: give the same options, or name another file"
                )

    def add_all(self, records: Iterable[dict[str, Any]]) -> None:
        for record in records:
            self.add(record)

    def add(self, record: dict[str, Any]) -> None:
        """Adds a record and writes it. Does nothing if its key exists already."""
        if self.key_of(record) in self.by_key:
            return
        if calibration := self.calibrations.get(record["name"]):
            record = {**record, CALIBRATION: calibration}
        self.by_key[self.key_of(record)] = record
        self._write(json.dumps(record) + "\n")
