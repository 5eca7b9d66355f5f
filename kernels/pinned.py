"""Page-locked memory of the host, which kernels read and write over the bus, to the byte.

torch rounds what it pins up to a power of two, and keeps it. This is memory of the operating system
that is registered with CUDA. It has the asked size in whole pages, and is unregistered with its
last tensor.
"""

import contextlib
import math
import mmap
from typing import Any

import torch

PORTABLE_AND_MAPPED = 1 | 2  # cudaHostRegister: for all contexts, and reached by kernels


class _LockedPages(mmap.mmap):
    """Zeros that are registered from ``lock`` on for as long as they are there."""

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
    """f16 zeros in memory of the host; page-locked, where ``device`` is a GPU.

    A GPU must be done with it when the last tensor of it goes.
    """
    n = math.prod(shape)
    if device.type != "cuda" or n == 0:
        return torch.zeros(shape, dtype=torch.float16)
    n_bytes = -(-2 * n // mmap.PAGESIZE) * mmap.PAGESIZE
    pages = _LockedPages(-1, n_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel that has no large pages takes small ones
        pages.madvise(mmap.MADV_HUGEPAGE)
    # A child that shared private pages would have them copied, and the GPU would go on with the old
    # ones: it gets none.
    pages.madvise(mmap.MADV_DONTFORK)
    flat = torch.frombuffer(pages, dtype=torch.float16, count=n)
    pages.lock(flat.data_ptr())
    return flat.view(shape)
