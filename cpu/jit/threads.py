"""How kernels use threads: explicit prange loops only; and how many threads are worth it.

By default numba's parallel=True also makes parallel loops of array expressions and allocations.
Each of these starts the threads once more. Kernels ask for prange loops only. They run on the pool
of jit/pool.py.
"""

import os
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from typing import Any

from sparsekv_cli.cpu.jit import pool

pool.install()

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


def blas_threads(n: int) -> Any:
    """A context in which numpy's BLAS takes at most ``n`` threads; without one, every CPU."""
    if n >= (os.cpu_count() or 1):
        return nullcontext()
    return _blas().limit(limits=n, user_api="blas")


def physical_cores() -> int:
    """Physical cores that this process may run on: hyper-threads share a core's vector units."""
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None
    cores = set()
    try:
        for cpu in allowed or ():
            topology = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology")
            package = (topology / "physical_package_id").read_text().strip()
            cores.add((package, (topology / "core_id").read_text().strip()))
    except OSError:
        cores.clear()
    return len(cores) or len(allowed or ()) or os.cpu_count() or 1
