"""The control groups of this process: how much memory and CPU time a container may use (Linux).

All groups from the process's own up to the root set limits, so the smallest limit counts.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

PROC = Path("/proc")
GROUPS = Path("/sys/fs/cgroup")


class MemoryGroup(NamedTuple):
    """The memory of one group in bytes: its limit, what is used, and what can be dropped of it."""

    most: int
    used: int | None
    droppable: int


# For versions 2 and 1: the files with limits, the file with the bytes in use, and the name in
# memory.stat of pages of files that can be dropped. Above memory.high the system slows a group down
# until memory is free.
MEMORY_FILES = {
    2: (("memory.max", "memory.high"), "memory.current", "inactive_file"),
    1: (("memory.limit_in_bytes",), "memory.usage_in_bytes", "total_inactive_file"),
}


def memory_groups() -> Iterator[MemoryGroup]:
    """Yields the groups that limit this process's memory."""
    for version, folder in _folders("memory"):
        limits, used, cache = MEMORY_FILES[version]
        found = [_number(_words(folder / limit)) for limit in limits]
        if known := [most for most in found if most is not None]:
            statistics = counts(folder / "memory.stat")
            yield MemoryGroup(min(known), _number(_words(folder / used)), statistics.get(cache, 0))


def cpu_quota() -> float | None:
    """Returns how many CPUs the process may use on average; None: there is no limit.

    A group may run for a quota of microseconds in each period: 150000 in 100000 are 1.5 CPUs. A
    quota of -1 or ``max`` is no limit.
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
    """Returns name -> number of a file with lines such as ``MemFree: 12 kB``; {} without the file.

    unit: factor of the numbers.
    """
    try:
        words = [line.split() for line in file.read_text().splitlines()]
    except OSError:
        return {}
    return {each[0].rstrip(":"): unit * int(each[1]) for each in words if len(each) > 1}


def _folders(controller: str) -> Iterator[tuple[int, Path]]:
    """Yields (version, folder) for each group of a controller, from the process's own to the root.

    In a container the path may be that of the host and not exist here. Then only the root exists,
    which is the container's group.
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
    """Returns the words of a file; [] if it cannot be read."""
    try:
        return file.read_text().split()
    except (OSError, ValueError):
        return []


def _number(words: list[str]) -> int | None:
    """Returns the first word as a number; None for ``max`` and without a word."""
    try:
        return int(words[0])
    except (IndexError, ValueError):
        return None
