"""Two that compile at once: threads in the place of processes, which the lock keeps apart too."""

import contextlib
import threading

import pytest
from numba.core.caching import IndexDataCacheFile

from sparsekv_cli.cpu import emit  # noqa: F401, which every kernel imports

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
