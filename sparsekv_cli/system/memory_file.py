"""Memory that several blocks share until one of them is written to.

The bytes lie in a file without a name, in memory (Linux's memfd). A block maps parts of it as its
own: all blocks read the same memory. A page that is written to becomes a copy of that block alone.
"""

import ctypes
import mmap
import os
import sys
from collections.abc import Iterable
from functools import cache
from typing import NamedTuple

import numpy as np

from sparsekv_cli.errors import SparseKVError

PAGE = mmap.PAGESIZE
MAP_FIXED = 0x10  # which Python's mmap does not name


@cache
def is_available() -> bool:
    """Returns whether this system has files in memory, and lets this process make one."""
    if sys.platform != "linux" or not hasattr(os, "memfd_create"):
        return False
    try:
        MemoryFile(PAGE)
    except SparseKVError:
        return False
    return True


class Part(NamedTuple):
    """Where bytes of a file are in a block. All are multiples of PAGE."""

    at: int  # in the block
    start: int  # in the file
    n: int


class MemoryFile:
    """A file of ``n_bytes`` in memory, which is there as long as this object or a block needs it.

    Raises SparseKVError if the system refuses it.
    """

    def __init__(self, n_bytes: int) -> None:
        self._fd = -1
        try:
            self._fd = os.memfd_create("rows", os.MFD_CLOEXEC)
            os.truncate(self._fd, n_bytes)
        except OSError as error:
            raise SparseKVError(f"no memory for rows that sequences share: {error}") from None

    def __del__(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)

    def write(self, start: int, data: np.ndarray) -> None:
        """Writes a contiguous array from byte ``start`` on."""
        left = data.reshape(-1).view(np.uint8).data
        try:
            while left:
                n = os.pwrite(self._fd, left, start)
                left, start = left[n:], start + n
        except OSError as error:
            raise SparseKVError(f"no memory for rows that sequences share: {error}") from None

    def block(self, n_bytes: int, parts: Iterable[Part]) -> np.ndarray:
        """Returns a block uint8 (n_bytes,) that begins on a page; the rest of it is zeros.

        Raises SparseKVError if the system refuses it.
        """
        try:
            region = mmap.mmap(-1, max(1, n_bytes), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            raise SparseKVError(f"{n_bytes} bytes of rows: {error}") from None
        block = np.frombuffer(region, np.uint8, n_bytes)
        libc = ctypes.CDLL(None, use_errno=True)
        libc.mmap.restype = ctypes.c_void_p
        flags, rights = mmap.MAP_PRIVATE | MAP_FIXED, mmap.PROT_READ | mmap.PROT_WRITE
        for at, start, n in parts:
            place = ctypes.c_void_p(block.ctypes.data + at)
            given = (place, ctypes.c_size_t(n), rights, flags, self._fd, ctypes.c_long(start))
            if n and libc.mmap(*given) != place.value:
                reason = os.strerror(ctypes.get_errno())
                raise SparseKVError(f"{n} bytes of rows cannot be shared: {reason}")
        return block
