"""Memory that several blocks share until one of them is written to.

The bytes lie in a file in memory without a name (Linux's memfd). A block maps parts of the file
privately: all blocks read the same memory. If a block writes to a page, it gets its own copy of
that page.
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
MAP_FIXED = 0x10  # missing in Python's mmap


@cache
def is_available() -> bool:
    """Returns whether this process can make files in memory."""
    if sys.platform != "linux" or not hasattr(os, "memfd_create"):
        return False
    try:
        MemoryFile(PAGE)
    except SparseKVError:
        return False
    return True


class Part(NamedTuple):
    """A part of a file that a block maps. All numbers are multiples of PAGE."""

    at: int  # first byte in the block
    start: int  # first byte in the file
    n: int


class MemoryFile:
    """A file of ``n_bytes`` in memory. It exists as long as this object or a block that maps it.

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
        """Writes a contiguous array to the file, from byte ``start`` on."""
        left = data.reshape(-1).view(np.uint8).data
        try:
            while left:
                n = os.pwrite(self._fd, left, start)
                left, start = left[n:], start + n
        except OSError as error:
            raise SparseKVError(f"no memory for rows that sequences share: {error}") from None

    def block(self, n_bytes: int, parts: Iterable[Part]) -> np.ndarray:
        """Returns memory, uint8 (n_bytes,), that maps ``parts`` of the file.

        All other bytes are zeros. The block begins at a page. Raises SparseKVError if the system
        refuses it.
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
