import ctypes
from pathlib import Path

import numpy as np
import pytest

from sparsekv_cli.serve.rows import default_limit
from sparsekv_cli.system import control_groups, memory
from sparsekv_cli.system.memory import MAPS, large_code, release_code


def resident(start: int) -> int:
    """Bytes in memory of the mapping at that address."""
    lines = iter(Path("/proc/self/smaps").read_text(encoding="utf-8").splitlines())
    next(line for line in lines if line.startswith(f"{start:x}-"))
    return 1024 * int(next(line for line in lines if line.startswith("Rss:")).split()[1])


@pytest.mark.skipif(not MAPS.exists(), reason="needs Linux' /proc/self/maps")
def test_release_code():
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


def test_available_memory(tmp_path, monkeypatch):
    """What the machine has free, unless a control group on the way up leaves less."""
    proc, groups = tmp_path / "proc", tmp_path / "groups"
    monkeypatch.setattr(control_groups, "PROC", proc)
    monkeypatch.setattr(control_groups, "GROUPS", groups)
    assert memory.available_memory() == memory.physical_memory()
    (proc / "self").mkdir(parents=True)
    (proc / "meminfo").write_text("MemTotal: 9000 kB\nMemAvailable: 7000 kB\nHugePages_Total: 0\n")
    assert memory.available_memory() == 7000 << 10
    (proc / "self" / "cgroup").write_text("1:name=systemd:/x\n4:cpu,memory:/in/job\n0::/in/job\n")
    (groups / "in" / "job").mkdir(parents=True)
    (groups / "in" / "job" / "memory.max").write_text("max\n")
    (groups / "in" / "job" / "memory.current").write_text("5000\n")
    assert memory.available_memory() == 7000 << 10
    assert memory.container_limit() is None
    (groups / "in" / "memory.max").write_text(f"{1 << 63}\n")  # more than there is: no limit
    assert memory.container_limit() is None
    (groups / "in" / "memory.max").write_text("6000000\n")
    (groups / "in" / "memory.current").write_text("5000000\n")
    (groups / "in" / "memory.stat").write_text("anon 7\ninactive_file 300000\n")
    assert memory.available_memory() == 1300000
    assert default_limit() == 650000  # of serve: half
    assert memory.container_limit() == 6000000
    (groups / "memory").mkdir()
    (groups / "memory" / "memory.limit_in_bytes").write_text("2000\n")
    (groups / "memory" / "memory.usage_in_bytes").write_text("3000\n")
    assert memory.available_memory() == 0
