"""The machine's load, and limits for a process that reads data of other people."""

import os
import resource
import sys


def load_beyond_cores() -> tuple[float, int] | None:
    """Returns the load of the last minute and the cores, if the load is more than these."""
    cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else ()
    load, n_cores = os.getloadavg()[0], len(cores) or os.cpu_count() or 1
    return (load, n_cores) if load > n_cores else None


def limit_work(seconds: int, n_bytes: int) -> None:
    """Limits this process to ``seconds`` more of computing, and to ``n_bytes`` of memory."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    end = int(used.ru_utime + used.ru_stime) + 1 + seconds
    resource.setrlimit(resource.RLIMIT_CPU, (end, resource.getrlimit(resource.RLIMIT_CPU)[1]))
    if sys.platform == "linux":  # macOS refuses a limit below what is mapped, which is much there
        resource.setrlimit(resource.RLIMIT_AS, (n_bytes, resource.getrlimit(resource.RLIMIT_AS)[1]))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
