"""numba's kernel cache made safe for processes that compile at the same time.

numba keeps a function's signatures in an index that it reads, adds a file's number to and writes
back. Two processes that do so at once may give two signatures the same number: one of them is then
lost, or is loaded where the other is asked for, in all later runs.
"""

from __future__ import annotations

import os
from typing import Any

from numba.core.caching import IndexDataCacheFile

try:
    import fcntl
except ImportError:  # not on Windows
    fcntl = None  # type: ignore[assignment]

_save = IndexDataCacheFile.save


def _save_alone(self: IndexDataCacheFile, key: Any, data: Any) -> None:
    with open(os.path.join(self._cache_path, "lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # until it is closed, or the process ends
        _save(self, key, data)


def install() -> None:
    """Lets one process or thread at a time write to a folder of the cache; reading needs no lock:
    files are replaced as a whole, and a kernel that is in the index only counts as missing.
    """
    if fcntl is not None:
        IndexDataCacheFile.save = _save_alone
