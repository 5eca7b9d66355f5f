"""The control groups of this process: what a container may take of memory and of CPU time (Linux).

Limits of all groups hold, from the process's own group up to the root, so the smallest counts.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

PROC = Path("/proc")
GROUPS = Path("/sys/fs/cgroup")


class MemoryGroup(NamedTuple):
    """Bytes that a group allows, that it uses, and that it could drop of these."""

    most: int
    used: int | None
    droppable: int


# The files of version 2 and 1: the limits, what is used, and in the statistics the pages of files
# that can be dropped. Beyond memory.high the system slows a group down until it has freed memory.
MEMORY_FILES = {
    2: (("memory.max", "memory.high"), "memory.current", "inactive_file"),
    1: (("memory.limit_in_bytes",), "memory.usage_in_bytes", "total_inactive_file"),
}


def memory_groups() -> Iterator[MemoryGroup]:
    """Yields the control groups of the process that limit its memory."""
    for version, folder in _folders("memory"):
        limits, used, cache = MEMORY_FILES[version]
        found = [_number(_words(folder / limit)) for limit in limits]
        if known := [most for most in found if most is not None]:
            statistics = counts(folder / "memory.stat")
            yield MemoryGroup(min(known), _number(_words(folder / used)), statistics.get(cache, 0))


def cpu_quota() -> float | None:
    """Returns how many CPUs' time the process may take on average; None: there is no limit.

    A group may run for a quota of microseconds in each period. A quota of -1 or ``max`` is none.
    """
    quotas = []
    for version, folder in _folders("cpu"):
        if version == 2:
            words = _words(folder / "cpu.max")
        else:
            words = _words(folder / "cpu.cfs_quota_us") + _words(folder / "cpu.cfs_period_us")
        quota, period = _number(words[:1]), _number(words[1:])
        if quota is not None and period is not None and quota > 0 and period > 0:
            quotas.append(quota / period)
    return min(quotas, default=None)


def counts(file: Path, unit: int = 1) -> dict[str, int]:
    """Returns a file of names and numbers, such as ``MemFree: 12 kB``; empty if there is none."""
    try:
        words = [line.split() for line in file.read_text().splitlines()]
    except OSError:
        return {}
    return {each[0].rstrip(":"): unit * int(each[1]) for each in words if len(each) > 1}


def _folders(controller: str) -> Iterator[tuple[int, Path]]:
    """Yields the version and folder of the groups of a controller, from the own up to the root.

    In a container the path may be the host's. Then only the root is there, which is the container's
    group.
    """
    try:
        lines = (PROC / "self" / "cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers and controller not in controllers.split(","):
            continue
        root = GROUPS / (controllers if (GROUPS / controllers).is_dir() else controller)
        own = root / path.lstrip("/")
        for folder in (own, *own.parents):
            yield 1 if controllers else 2, folder
            if folder == root:
                break


def _words(file: Path) -> list[str]:
    """Returns the words of a file; none if it cannot be read."""
    try:
        return file.read_text().split()
    except (OSError, ValueError):
        return []


def _number(words: list[str]) -> int | None:
    """Returns the first word as a number; None for ``max`` and for no word."""
    try:
        return int(words[0])
    except (IndexError, ValueError):
        return None
