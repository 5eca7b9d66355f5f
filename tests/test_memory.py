import ctypes
from pathlib import Path

import numpy as np
import pytest

from sparsekv_cli.memory import MAPS, large_code, release_code


def resident(start: int) -> int:
    """Bytes in memory of the mapping at that address."""
    lines = iter(Path("/proc/self/smaps").read_text(encoding="utf-8").splitlines())
    next(line for line in lines if line.startswith(f"{start:x}-"))
    return 1024 * int(next(line for line in lines if line.startswith("Rss:")).split()[1])


@pytest.mark.skipif(not MAPS.exists(), reason="needs Linux' /proc/self/maps")
def test_release_code() -> None:
    a, b = np.random.default_rng(0).standard_normal((2, 64, 64))
    product = a @ b
    starts = []
    for start, size in large_code():
        (ctypes.c_char * size).from_address(start)[::4096]  # an earlier test may have released it
        starts.append(start)
    before = sum(map(resident, starts))
    release_code()
    after = sum(map(resident, starts))
    assert before > 20 << 20  # that of BLAS and LLVM at least
    assert after < before / 2
    np.testing.assert_array_equal(a @ b, product)
