"""Faults in a job that writes files: at its n-th operation on the disk it is killed, or refused.

The job runs in a copy of this process. An operation is a write of a WrittenFile, through which the
program writes everything, or a call of ``os`` that makes, names, shortens or removes a file. From
the operation on all of its kind fail, as they do on a full disk.
"""

from __future__ import annotations

import contextlib
import errno
import io
import json
import os
import shutil
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sparsekv_cli.errors import SparseKVError
from sparsekv_cli.system.files import WrittenFile

KILLED = 9  # exit code
ERRORS = {name: getattr(errno, name) for name in ("ENOSPC", "EDQUOT", "EROFS")}
FAULTS = ("kill", "kill within", *ERRORS, "short write", "no folder")
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT


@dataclass
class Outcome:
    """The end of a job: its exit code, its lines, and the number of its disk operations."""

    code: int
    error: str = ""
    said: list[str] = field(default_factory=list)
    n: int = 0


class Disk:
    """Counts the operations of this process on the disk, and puts a fault into the n-th.

    n: 0 for no fault.
    """

    def __init__(self, fault: str, n: int, folder: Path) -> None:
        self.fault, self.at, self.folder = fault, n, folder
        self.n = 0
        self._write: Any = WrittenFile.write
        disk = self

        def write(file: WrittenFile, data: Any) -> int:
            return disk.write(file, data)

        WrittenFile.write = write  # type: ignore[method-assign]
        for name in ("replace", "mkdir", "truncate", "unlink"):
            setattr(os, name, self._around(name, getattr(os, name)))
        os.open = self._around("open", os.open)

    def _around(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(path: Any, *arguments: Any, **options: Any) -> Any:
            flags = arguments[0] if name == "open" and arguments else WRITING
            if flags & WRITING and not str(path).startswith("/dev/"):
                self.step(name, path)
            return function(path, *arguments, **options)

        return call

    def step(self, name: str, path: Any) -> None:
        """An operation begins. Raises OSError, or ends the process, if it is to fail."""
        self.n += 1
        if not self.at or self.n < self.at:
            return
        if self.n == self.at:
            if self.fault.startswith("kill"):
                os._exit(KILLED)
            if self.fault == "no folder":
                shutil.rmtree(self.folder)
        if self.fault == "EROFS" or (self.fault in ERRORS and name != "unlink"):
            number = ERRORS[self.fault]
            raise OSError(number, os.strerror(number), None if name == "write" else os.fspath(path))

    def write(self, file: WrittenFile, data: Any) -> int:
        is_fatal = self.n + 1 == self.at
        if is_fatal and self.fault in ("kill within", "short write") and len(data) > 1:
            n = int(self._write(file, memoryview(data)[: len(data) // 2]))
            if self.fault == "kill within":
                os._exit(KILLED)
            self.n, self.fault = self.n + 1, "ENOSPC"
            return n
        self.step("write", file.name)
        return int(self._write(file, data))


def run(job: Callable[[Path], None], folder: Path, fault: str = "", n: int = 0) -> Outcome:
    """Runs a job in a copy of this process with a fault at its n-th operation."""
    reading, writing = os.pipe()
    child = os.fork()
    if child:
        os.close(writing)
        with open(reading, encoding="utf-8") as pipe:
            told = pipe.read()
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        return Outcome(code, **json.loads(told)) if told else Outcome(code)
    error, stderr = "", io.StringIO()
    try:
        with contextlib.redirect_stderr(stderr):
            disk = Disk(fault, n, folder)
            try:
                job(folder)
            except SparseKVError as raised:
                error = str(raised)
    except BaseException:
        error = traceback.format_exc()
    told = json.dumps({"error": error, "said": stderr.getvalue().splitlines(), "n": disk.n})
    os.write(writing, told.encode())
    os._exit(0)


def problem_of(outcome: Outcome) -> str:
    """Returns the fault of a process, or an empty text."""
    if outcome.code not in (0, KILLED):
        return f"it ended with {outcome.code}"
    for text in (outcome.error, *outcome.said):
        if "\n" in text or "Traceback" in text:
            return f"no one line: {text}"
    return ""


def at_once(job: Callable[[Path], None], folder: Path, n: int) -> list[Outcome]:
    """Runs a job in n processes at the same time."""
    children, results = [], []
    for i in range(n):
        child = os.fork()
        if not child:
            outcome = run(job, folder)
            (folder.parent / f"{folder.name}.{i}").write_text(json.dumps(vars(outcome)))
            os._exit(0)
        children.append(child)
    for i, child in enumerate(children):
        os.waitpid(child, 0)
        path = folder.parent / f"{folder.name}.{i}"
        results.append(Outcome(**json.loads(path.read_text())))
        path.unlink()
    sys.stdout.flush()
    return results
