"""The memory that is available to this process, and the memory of libraries' machine code.

Most machine code of large libraries runs only while a model is opened.
"""

import ctypes
import mmap
import os
from collections.abc import Iterator
from pathlib import Path

from sparsekv_cli.system import control_groups

MAPS = Path("/proc/self/maps")  # Linux: the memory maps of this process
LARGE = 8 << 20  # bytes; such large libraries are LLVM, BLAS and torch, whose code nobody patches


def large_code() -> Iterator[tuple[int, int]]:
    """Yields address and bytes of the code of each large library; none if unknown."""
    if not MAPS.exists():
        return
    for line in MAPS.read_text(encoding="utf-8", errors="replace").splitlines():
        addresses, rights, _offset, _device, inode, *_path = line.split()
        start, stop = (int(number, 16) for number in addresses.split("-"))
        if rights == "r-xp" and inode != "0" and stop - start >= LARGE:
            yield start, stop - start


def release_code() -> None:
    """Frees the memory of large libraries' code. Code that runs again is read again.

    Opening a model runs up to 120 MB of code, mostly LLVM's. Prefill and decode run a small part of
    it. The pages stay in the system's cache of files as long as there is memory.
    """
    if not hasattr(mmap, "MADV_DONTNEED"):
        return
    libc = ctypes.CDLL(None)
    for start, size in large_code():
        libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(size), mmap.MADV_DONTNEED)


def physical_memory() -> int | None:
    """Returns the bytes of the machine's memory; None if the system does not tell."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return None


def available_memory() -> int | None:
    """Returns the bytes that this process can still use without swapping; None if unknown.

    On Linux this memory is free or can be freed, on the machine and in the process's control
    groups. Elsewhere it is the machine's memory.
    """
    groups = control_groups.memory_groups()
    rooms = [most - taken + left for most, taken, left in groups if taken is not None]
    meminfo = control_groups.counts(control_groups.PROC / "meminfo", 1024)
    if (free := meminfo.get("MemAvailable")) is not None:
        rooms.append(free)
    return max(0, min(rooms)) if rooms else physical_memory()


def container_limit() -> int | None:
    """Returns the bytes that control groups allow to this process; None: they set no limit."""
    least = min((group.most for group in control_groups.memory_groups()), default=None)
    physical = physical_memory()
    return None if least is None or (physical is not None and least >= physical) else least
