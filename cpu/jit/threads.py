"""Threads of kernels: explicit prange loops only, on the pool of jit/pool.py.

By default numba's parallel=True also makes parallel loops of array expressions and allocations.
Each such loop starts the threads once more.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from threading import RLock
from typing import Any

_LIMIT = RLock()  # of the thread that has set one

PRANGE_ONLY = {
    "prange": True,
    "comprehension": False,
    "fusion": False,
    "inplace_binop": False,
    "numpy": False,
    "reduction": False,
    "setitem": False,
    "stencil": False,
}


@cache
def _blas() -> Any:
    """Returns the BLAS that numpy has loaded."""
    from threadpoolctl import ThreadpoolController

    return ThreadpoolController()


@contextmanager
def blas_threads(n: int) -> Iterator[None]:
    """Lets numpy's BLAS use at most ``n`` threads in the block. Outside it uses all.

    The limit is the process's. While a thread has set one, other threads leave it as it is.
    """
    if n >= (os.cpu_count() or 1) or not _LIMIT.acquire(blocking=False):
        yield
        return
    try:
        with _blas().limit(limits=n, user_api="blas"):
            yield
    finally:
        _LIMIT.release()
