"""The memory, files and threads of a process, and whether they stay as they are."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, NamedTuple

from sparsekv_cli.errors import SparseKVError

WARM = 0.25  # share of a run in which memory may grow
SLACK_MB = 24.0  # that it may grow by afterwards
SLACK = 0.05  # the same as a share


class Usage(NamedTuple):
    """seconds: since the start. pss_mb: memory; pages that are mapped twice count once."""

    seconds: float
    pss_mb: float
    files: int
    threads: int


def pss_kib(pid: int | str) -> int:
    """The memory of a process. Linux only."""
    lines = (Path("/proc") / str(pid) / "smaps_rollup").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("Pss:"))


def usage_of(pid: int | str, started: float) -> Usage:
    """Returns what a process takes now. started: time.monotonic() at the start."""
    folder = Path("/proc") / str(pid)
    files, threads = (len(list((folder / name).iterdir())) for name in ("fd", "task"))
    return Usage(time.monotonic() - started, pss_kib(pid) / 1024, files, threads)


class Curve:
    """What a process takes in the course of a run."""

    def __init__(self, pid: int | str = "self") -> None:
        self._pid, self._started = pid, time.monotonic()
        self.points = [usage_of(pid, self._started)]

    def look(self) -> None:
        self.points.append(usage_of(self._pid, self._started))

    def check(self, what: str, n_sockets: int = 0) -> dict[str, Any]:
        """Returns the curve. SparseKVError if it is not flat. n_sockets: open ones of clients."""
        self.look()
        last = self.points[-1].seconds
        early = [each for each in self.points if each.seconds <= last / 2]
        warm = [each for each in early if each.seconds >= last * WARM] or early
        late = [each for each in self.points if each.seconds > last / 2]
        for name, slack in (("pss_mb", SLACK_MB), ("files", 2 + n_sockets), ("threads", 2)):
            before, after = (max(getattr(each, name) for each in part) for part in (warm, late))
            if after > before + max(slack, SLACK * before):
                raise SparseKVError(f"{what}: {name} grows from {before:.0f} to {after:.0f}")
        step = max(1, len(self.points) // 32)
        points = self.points[::step]
        return {
            "seconds": round(last), "pss_mb": [round(each.pss_mb) for each in points],
            "files": max(each.files for each in late),
            "threads": max(each.threads for each in late),
        }  # fmt: skip
