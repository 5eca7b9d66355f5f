"""The cores that this process may use, their load, and limits for processes with foreign data."""

import json
import os
import resource
import sys
from pathlib import Path

from sparsekv_cli.errors import SparseKVError
from sparsekv_cli.system.control_groups import cpu_quota


def usable_cpus() -> int:
    """Returns the number of CPUs that this process may run on."""
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else ()
    return len(allowed) or os.cpu_count() or 1


def usable_cores() -> int:
    """Returns how many threads should compute: one for each physical core.

    Two hyper-threads of a core share its vector units. A container's quota, rounded, is the most.
    More threads would use the quota up early in each period, and then all would wait.
    """
    quota = cpu_quota()
    n = _physical_cores() or usable_cpus()
    return n if quota is None else max(1, min(n, int(quota + 0.5)))


def _physical_cores() -> int:
    """Returns the number of physical cores that this process may use; 0 if unknown."""
    cores = set()
    try:
        for cpu in os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else ():
            topology = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology")
            package = (topology / "physical_package_id").read_text().strip()
            cores.add((package, (topology / "core_id").read_text().strip()))
    except OSError:
        return 0
    return len(cores)


def load_beyond_cores() -> tuple[float, int] | None:
    """Returns the load of the last minute and the number of CPUs; None if the load is lower."""
    load, n = os.getloadavg()[0], usable_cpus()
    return (load, n) if load > n else None


def limit_work(seconds: int, n_bytes: int) -> None:
    """Limits this process to ``seconds`` more of CPU time, and to ``n_bytes`` of address space."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    end = int(used.ru_utime + used.ru_stime) + 1 + seconds
    resource.setrlimit(resource.RLIMIT_CPU, (end, resource.getrlimit(resource.RLIMIT_CPU)[1]))
    if sys.platform == "linux":  # macOS maps much memory and refuses a lower limit
        resource.setrlimit(resource.RLIMIT_AS, (n_bytes, resource.getrlimit(resource.RLIMIT_AS)[1]))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def answer_of(said: bytes, what: str, seconds: int, n_bytes: int, hint: str) -> dict[str, str]:
    """Returns the JSON object that a process with ``limit_work`` printed.

    Raises SparseKVError if the object has an error, or if nothing was printed because the limits
    were reached. what, hint: words for the second error. seconds, n_bytes: the limits.
    """
    if not said:
        limits = f"{seconds} s or {n_bytes >> 30} GiB"
        raise SparseKVError(f"{what} takes more than {limits} to read: {hint}")
    answer: dict[str, str] = json.loads(said)
    if "error" in answer:
        raise SparseKVError(answer["error"])
    return answer
