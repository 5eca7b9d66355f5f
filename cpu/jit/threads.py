"""How kernels use threads: explicit prange loops only; and how many threads are worth it.

By default numba's parallel=True also makes parallel loops of array expressions and allocations,
each of which starts the threads once more. Kernels ask for prange loops only. They run on the pool
of jit/pool.py.
"""

from __future__ import annotations

import os
from pathlib import Path

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
