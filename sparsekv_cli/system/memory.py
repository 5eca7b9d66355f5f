"""Memory that is available, and that of the machine code in this process.

Most of that code runs only while a model is opened.
"""

import ctypes
import mmap
import os
from collections.abc import Iterator
from pathlib import Path

MAPS = Path("/proc/self/maps")  # Linux: the process's memory maps
LARGE = 8 << 20  # bytes; LLVM, BLAS, torch: nothing that others would patch


def large_code() -> Iterator[tuple[int, int]]:
    """Address and bytes of every large library's machine code; none if the system does not tell."""
    if not MAPS.exists():
        return
    for line in MAPS.read_text(encoding="utf-8", errors="replace").splitlines():
        addresses, rights, _offset, _device, inode, *_path = line.split()
        start, stop = (int(number, 16) for number in addresses.split("-"))
        if rights == "r-xp" and inode != "0" and stop - start >= LARGE:
            yield start, stop - start


def release_code() -> None:
    """Releases the pages of large libraries' code; those that run are mapped again.

    Opening a model runs up to 120 MB of code, mostly LLVM's. Prefill and decode run a small part of
    it. The pages stay in the system's cache of the file as long as there is memory.
    """
    if not hasattr(mmap, "MADV_DONTNEED"):
        return
    libc = ctypes.CDLL(None)
    for start, size in large_code():
        libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(size), mmap.MADV_DONTNEED)


PROC = Path("/proc")
GROUPS = Path("/sys/fs/cgroup")
# A control group's files, version 2 and 1: its limit, what it uses, and of that, in its
# statistics, the pages of files that can be dropped.
GROUP_FILES = (
    ("", "memory.max", "memory.current", "inactive_file"),
    ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)


def physical_memory() -> int | None:
    """Returns the bytes of memory that the machine has; None if the system does not tell."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return None


def available_memory() -> int | None:
    """Returns the bytes that this process can still take without swapping, None if unknown.

    On Linux this is the memory that is free or can be freed. It counts the machine and the control
    groups of the process. Elsewhere it is all memory.
    """
    rooms = [most - taken + left for most, taken, left in _groups() if taken is not None]
    if (free := _counts(PROC / "meminfo", 1024).get("MemAvailable")) is not None:
        rooms.append(free)
    return max(0, min(rooms)) if rooms else physical_memory()


def container_limit() -> int | None:
    """Returns the bytes that the process's control groups allow it; None: they set no limit."""
    least = min((most for most, _, _ in _groups()), default=None)
    physical = physical_memory()
    return None if least is None or (physical is not None and least >= physical) else least


def _groups() -> Iterator[tuple[int, int | None, int]]:
    """Yields the control groups of the process that have a limit, from its own up to the root.

    Each has the bytes that the group allows, uses, and could drop of these.
    """
    try:
        lines = (PROC / "self" / "cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        for controller, limit, used, cache in GROUP_FILES:
            if controller not in controllers.split(","):
                continue
            root = GROUPS / controller
            own = root / path.lstrip("/")
            for folder in (own, *own.parents):
                most = _number_in(folder / limit)
                if most is not None:
                    droppable = _counts(folder / "memory.stat").get(cache, 0)
                    yield most, _number_in(folder / used), droppable
                if folder == root:
                    break


def _number_in(file: Path) -> int | None:
    """Returns the number in a file; None for the word ``max`` or for a missing file."""
    try:
        return int(file.read_text())
    except (OSError, ValueError):
        return None


def _counts(file: Path, unit: int = 1) -> dict[str, int]:
    """Returns a file of names and numbers, such as ``MemFree: 12 kB``; empty if there is none."""
    try:
        words = [line.split() for line in file.read_text().splitlines()]
    except OSError:
        return {}
    return {each[0].rstrip(":"): unit * int(each[1]) for each in words if len(each) > 1}
