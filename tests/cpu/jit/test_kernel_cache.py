"""Where the kernels are kept, and two that compile at once: threads in the place of processes,
which the lock keeps apart too.
"""

import contextlib
import os
import subprocess
import sys
import threading

import pytest
from numba.core.caching import IndexDataCacheFile

from sparsekv_cli.cpu.jit import llvm  # noqa: F401, which every kernel imports

pytest.importorskip("fcntl")


def test_signatures_saved_at_once_are_all_kept_apart(tmp_path, monkeypatch):
    both_have_read = threading.Barrier(2)
    read = IndexDataCacheFile._load_index

    def read_before_the_other_writes(self):
        index = read(self)
        with contextlib.suppress(threading.BrokenBarrierError):  # the other waits for the lock
            both_have_read.wait(0.3)
        return index

    def file():
        return IndexDataCacheFile(str(tmp_path), "kernel", "stamp")

    with monkeypatch.context() as patch:
        patch.setattr(IndexDataCacheFile, "_load_index", read_before_the_other_writes)
        threads = [
            threading.Thread(target=file().save, args=(signature, f"kernel of {signature}"))
            for signature in ("f32", "f64")
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    for signature in ("f32", "f64"):
        assert file().load(signature) == f"kernel of {signature}"


def test_a_program_that_imported_numba_first_has_the_same_cache(tmp_path):
    """numba's own, beside the sources, would not notice the edit of a kernel that others call."""
    environment = {name: value for name, value in os.environ.items() if name != "NUMBA_CACHE_DIR"}
    environment["XDG_CACHE_HOME"] = str(tmp_path)
    lines = ["import numba", "import sparsekv_cli.cpu", "print(numba.config.CACHE_DIR)"]
    folders = [
        subprocess.run(
            [sys.executable, "-c", "; ".join(order)],
            env=environment, capture_output=True, text=True, check=True,
        ).stdout.strip()
        for order in (lines, [lines[1], lines[0], lines[2]])
    ]  # fmt: skip
    assert folders[0] == folders[1] and folders[0].startswith(str(tmp_path))
