"""The machine code in this process' memory, most of which runs only while a session is opened."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterator
from pathlib import Path

MAPS = Path("/proc/self/maps")  # Linux: what is mapped, and where
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

    Opening a session runs up to 120 MB of code, mostly LLVM's, of which prefill and decode run a
    small part. The pages stay in the system's cache of the file as long as there is memory.
    """
    if not hasattr(mmap, "MADV_DONTNEED"):
        return
    libc = ctypes.CDLL(None)
    for start, size in large_code():
        libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(size), mmap.MADV_DONTNEED)
