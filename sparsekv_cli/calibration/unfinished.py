"""The scores of trials of a calibration that has not ended, on disk.

The next run of the same calibration reads them instead of computing its first trials.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from sparsekv_cli.errors import SparseKVError
from sparsekv_cli.system.files import DAY, AppendedFile, naming, open_regular

SUFFIX = ".unfinished"
KEPT_DAYS = 30  # after the last write to a file


class UnfinishedScores(ExitStack):
    """Scores in the order in which a calibration measures them, a line of JSON a part.

    A calibration measures the same parts in the same order each time. A damaged line and all after
    it are cut off. If the file cannot be written, or another process has it, nothing is kept. A
    with block closes the file.
    """

    def __init__(self, folder: Path | None, name: str) -> None:
        """name: of the calibration, its model and its text. folder: None: nothing is kept."""
        super().__init__()
        self._path = folder / f"{name}{SUFFIX}" if folder else None
        self._file: AppendedFile | None = None
        self._parts: list[list[list[float]]] = []
        if self._path is not None and os.path.lexists(self._path):
            self._open(self._path)

    def _open(self, path: Path) -> None:
        """Opens the file, and reads what it has."""
        try:
            with naming(path):
                path.parent.mkdir(parents=True, exist_ok=True)
                _remove_old(path.parent)
                if os.path.lexists(path):
                    open_regular(path).close()  # refuses a pipe, which would wait
            self._file = self.enter_context(AppendedFile(path, 0o600, is_alone=True))
            with naming(path):
                self._read(path)
        except SparseKVError:
            self._path = self._file = None

    def _read(self, path: Path) -> None:
        with open_regular(path) as file:
            data = file.read()
        n_right = 0
        for line in data.splitlines(keepends=True):
            try:
                part = json.loads(line)
                scores = np.array(part, np.float64)
            except (ValueError, TypeError, RecursionError):
                break
            if scores.ndim != 2 or len(scores) != 2 or not np.isfinite(scores).all():
                break
            if not line.endswith(b"\n"):
                break
            self._parts.append(part)
            n_right += len(line)
        if n_right < len(data):
            os.truncate(path, n_right)
        self._parts.reverse()  # so that the next one is the last

    @property
    def n_trials(self) -> int:
        """How many scores of trials are known and not used yet."""
        return sum(len(part[0]) for part in self._parts)

    def next(self, n: int, measure: Callable[[], np.ndarray]) -> np.ndarray:
        """Returns the next part, f64 (2, n): a kept one, or what ``measure`` returns."""
        if self._parts and len(self._parts[-1][0]) == n:
            return np.array(self._parts.pop())
        self._parts.clear()
        scores = measure()
        if self._path is not None and self._file is None:
            self._open(self._path)
            if self._parts:  # of a run that began and ended meanwhile: this one is elsewhere
                self._parts.clear()
                self._path = self._file = None
        if self._file is not None and np.isfinite(scores).all():
            try:
                self._file.write(json.dumps(scores.tolist()) + "\n")
            except SparseKVError:  # a full disk: the calibration itself goes on
                self._path = self._file = None
        return scores

    def remove(self) -> None:
        """Removes the file, when the calibration has ended."""
        if self._path is not None and self._file is not None:
            self._path.unlink(missing_ok=True)


def _remove_old(folder: Path) -> None:
    for path in folder.glob(f"*{SUFFIX}"):
        if time.time() - path.lstat().st_mtime > KEPT_DAYS * DAY:
            path.unlink(missing_ok=True)
