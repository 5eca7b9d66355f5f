"""The threads of numpy's BLAS."""

import os
import subprocess
import sys

import pytest

CODE = """
import numpy
from threading import Event, Thread
from threadpoolctl import threadpool_info
from sparsekv_cli.cpu.jit.threads import blas_threads
counts = lambda: {each["num_threads"] for each in threadpool_info() if each["user_api"] == "blas"}
before, begun, may_end = counts(), Event(), Event()
def work():
    with blas_threads(1):
        begun.set()
        may_end.wait(5)
other = Thread(target=work)
with blas_threads(1000):
    assert counts() == before
with blas_threads(1):
    assert counts() == {1}
    other.start()
    begun.wait(5)
may_end.set()
other.join()
assert counts() == before, (counts(), before)
"""


@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="one CPU")
def test_blas_takes_no_more_threads_than_it_may_also_with_two_threads_at_once():
    subprocess.run([sys.executable, "-c", CODE], check=True, timeout=240)
