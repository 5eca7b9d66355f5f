"""Page-locked memory of the host, which kernels read and write over the bus.

torch rounds a pinned size up to a power of two and keeps memory that is freed. Here the operating
system's memory is registered with CUDA. It has the requested size in whole pages. It is
unregistered when its last tensor is freed.
"""

import contextlib
import math
import mmap
from typing import Any

import torch

PORTABLE_AND_MAPPED = 1 | 2  # cudaHostRegister: for all contexts, and mapped for kernels


class _LockedPages(mmap.mmap):
    """Zeros. From ``lock`` on they are registered with CUDA, until they are freed."""

    _address = 0

    def lock(self, address: int) -> None:
        status = cuda_runtime().cudaHostRegister(address, len(self), PORTABLE_AND_MAPPED)
        if int(status) != 0:
            raise MemoryError(
                f"{len(self)} bytes of host memory cannot be locked: CUDA's error {int(status)}"
            )
        self._address = address

    def __del__(self) -> None:
        if self._address:
            cuda_runtime().cudaHostUnregister(self._address)


def cuda_runtime() -> Any:
    return torch.cuda.cudart()


def zeros_on_host(shape: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """Returns f16 zeros in memory of the host; page-locked if ``device`` is a GPU.

    The GPU must have finished with the memory before its last tensor is freed.
    """
    n = math.prod(shape)
    if device.type != "cuda" or n == 0:
        return torch.zeros(shape, dtype=torch.float16)
    n_bytes = -(-2 * n // mmap.PAGESIZE) * mmap.PAGESIZE
    pages = _LockedPages(-1, n_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # an operating system without large pages uses small ones
        pages.madvise(mmap.MADV_HUGEPAGE)
    # A forked child gets no copy of the pages: a write would move them, and the GPU would use the
    # old ones.
    pages.madvise(mmap.MADV_DONTFORK)
    flat = torch.frombuffer(pages, dtype=torch.float16, count=n)
    pages.lock(flat.data_ptr())
    return flat.view(shape)
