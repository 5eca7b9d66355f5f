"""How many physical cores there are: hyper-threads share a core's vector units."""

from __future__ import annotations

import os
from pathlib import Path


def physical_cores() -> int:
    """Physical cores that this process may run on."""
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
