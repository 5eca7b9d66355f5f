"""Prepares numba for this package's kernels. No import of the package changes numba.

``use_threads`` calls ``install``. Every model calls ``use_threads`` before its first kernel.
"""

from collections.abc import Callable
from threading import Lock, Thread

import numba

from sparsekv_cli.cpu.jit import pool
from sparsekv_cli.cpu.jit.compiling import callees, kernel_cache
from sparsekv_cli.system.work import usable_cores

REPLACEMENTS = (*callees.REPLACEMENTS, *kernel_cache.REPLACEMENTS)
_WORKERS: list[Thread] = []
_LATER: list[Callable[[], object]] = []  # what modules compile as soon as numba is prepared
_LOCK = Lock()


def install() -> None:
    """Replaces numba's internals of REPLACEMENTS and its threads, once a process.

    docs/kernels.md says what each replacement does. A process of which a thread compiles meanwhile
    may compile that function as numba does.
    """
    with _LOCK:
        if not callees.is_installed():
            for owner, name, replacement in REPLACEMENTS:
                setattr(owner, name, replacement)
            _start_workers(usable_cores())
            while _LATER:
                _LATER.pop(0)()


def when_installed(call: Callable[[], object]) -> None:
    """Calls ``call`` at once, or at the end of ``install`` if that has not run yet."""
    with _LOCK:
        if not callees.is_installed():
            _LATER.append(call)
            return
    call()


def use_threads(n: int) -> int:
    """Lets the loops of this thread use ``n`` threads, or one for each core if ``n`` is 0.

    Returns their number, which is at most numba's. Installs the kernels' numba first.
    """
    install()
    n = min(n or usable_cores(), numba.config.NUMBA_NUM_THREADS)
    with _LOCK:
        _start_workers(n)
    numba.set_num_threads(n)
    return n


def _start_workers(n_threads: int) -> None:
    """Starts the workers that loops of ``n_threads`` threads need besides the calling thread.

    A worker that no loop uses would only spin, and spinning counts against a container's quota.
    """
    if not pool.install():
        return
    for worker in range(1 + len(_WORKERS), min(n_threads, numba.config.NUMBA_NUM_THREADS)):
        name = f"decode-{worker}"
        _WORKERS.append(Thread(target=pool.work, args=(worker,), name=name, daemon=True))
        _WORKERS[-1].start()
