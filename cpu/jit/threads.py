"""Threads of kernels: explicit prange loops only, on the pool of jit/pool.py.

By default numba's parallel=True also makes parallel loops of array expressions and allocations.
Each such loop starts the threads once more.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from threading import Lock, RLock, Thread
from typing import Any

import numba

from sparsekv_cli.cpu.jit import pool
from sparsekv_cli.system.work import usable_cores

_WORKERS: list[Thread] = []
_STARTING = Lock()
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


def use_threads(n: int) -> int:
    """Lets the loops of this thread use ``n`` threads, or one for each core if ``n`` is 0.

    Returns their number, which is at most numba's.
    """
    n = min(n or usable_cores(), numba.config.NUMBA_NUM_THREADS)
    _start_workers(n)
    numba.set_num_threads(n)
    return n


def _start_workers(n_threads: int) -> None:
    """Starts the workers that loops of ``n_threads`` threads need besides the calling thread.

    A worker that no loop uses would only spin, and spinning counts against a container's quota.
    """
    if not pool.install():
        return
    with _STARTING:
        for worker in range(1 + len(_WORKERS), min(n_threads, numba.config.NUMBA_NUM_THREADS)):
            name = f"decode-{worker}"
            _WORKERS.append(Thread(target=pool.work, args=(worker,), name=name, daemon=True))
            _WORKERS[-1].start()


_start_workers(usable_cores())
