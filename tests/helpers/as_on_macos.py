"""The program without what Linux alone has: ``python as_on_macos.py COMMAND ...``.

Names that macOS lacks are taken away, files of /proc and /sys are not found, and a process with
threads may not be copied. It is no test of macOS itself.
"""

from __future__ import annotations

import importlib
import os
import sys
import threading
from typing import Any

# Python's names of what only Linux has.
LINUX_ONLY = {
    "os": (
        "sched_getaffinity", "sched_setaffinity", "memfd_create", "posix_fadvise", "eventfd",
        "copy_file_range", "pidfd_open", "getrandom", "splice", "fallocate", "posix_fallocate",
        "getxattr", "setxattr", "listxattr", "setns", "unshare", "O_TMPFILE", "O_DIRECT",
        "O_NOATIME", "O_PATH", "MFD_CLOEXEC",
    ),
    "mmap": (
        "MADV_HUGEPAGE", "MADV_NOHUGEPAGE", "MADV_DONTFORK", "MADV_DOFORK", "MADV_REMOVE",
        "MADV_POPULATE_READ", "MADV_POPULATE_WRITE", "MAP_POPULATE", "MAP_DENYWRITE",
        "MAP_EXECUTABLE", "MAP_STACK",
    ),
    "select": ("epoll",),
    "signal": ("SIGPWR", "SIGSTKFLT", "SIGRTMIN", "SIGRTMAX", "sigtimedwait", "sigwaitinfo"),
    "socket": ("SOCK_CLOEXEC", "SOCK_NONBLOCK", "TCP_QUICKACK", "TCP_USER_TIMEOUT", "SO_PEERCRED"),
    "resource": ("prlimit", "RLIMIT_NICE", "RLIMIT_OFILE", "RLIMIT_RTPRIO"),
}  # fmt: skip
LINUX_SYMBOLS = ("malloc_trim", "getauxval", "prctl", "memfd_create", "sched_getaffinity",
                 "posix_fadvise", "fallocate", "mallopt", "syscall")  # fmt: skip


def refuse(event: str, args: tuple[Any, ...]) -> None:
    """An audit hook: what would fail on macOS fails, and what would be wrong there ends the run."""
    if event == "open" and isinstance(args[0], str) and args[0].startswith(("/proc", "/sys/")):
        raise FileNotFoundError(2, "No such file or directory", args[0])
    if event == "ctypes.dlsym" and args[1] in LINUX_SYMBOLS:
        raise AttributeError(args[1])
    if event == "resource.setrlimit" and args[0] == RLIMIT_AS:
        raise ValueError("current limit exceeds maximum limit")
    if event == "os.fork" and threading.active_count() > 1:
        os.write(2, b"a process with threads is copied\n")
        os._exit(99)


def stat(path: Any, *args: Any, _stat: Any = os.stat, **options: Any) -> os.stat_result:
    """os.stat, which no audit hook hears."""
    refuse("open", (os.fspath(path) if not isinstance(path, int) else path,))
    return _stat(path, *args, **options)


def main() -> None:
    from sparsekv_cli import cli

    sys.platform = "darwin"
    cli.main()


if __name__ == "__main__":
    import asyncio
    import resource
    import subprocess
    import tempfile

    import numba.np.ufunc.parallel
    import numpy

    assert asyncio and subprocess and tempfile and numba and numpy  # they saw Linux
    RLIMIT_AS = resource.RLIMIT_AS
    for module, names in LINUX_ONLY.items():
        for name in names:
            vars(importlib.import_module(module)).pop(name, None)
    os.stat = stat
    sys.addaudithook(refuse)
    main()
