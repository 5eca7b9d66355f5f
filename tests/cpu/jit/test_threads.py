"""The threads of numpy's BLAS."""

import os

import pytest
from threadpoolctl import threadpool_info, threadpool_limits

from sparsekv_cli.cpu.jit.threads import blas_threads


def n_threads() -> set[int]:
    return {each["num_threads"] for each in threadpool_info() if each["user_api"] == "blas"}


@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="one CPU")
def test_blas_takes_no_more_threads_than_it_may():
    with threadpool_limits(2, "blas"):
        with blas_threads(1):
            assert n_threads() == {1}
        with blas_threads(1000):
            assert n_threads() == {2}
        assert n_threads() == {2}
