"""What a container may take of CPU time and memory, on trees of control groups that are made up."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from sparsekv_cli.commands.doctor import show
from sparsekv_cli.cpu.jit.install import use_threads
from sparsekv_cli.doctor import machine
from sparsekv_cli.system import control_groups, memory, work

V1 = "9:memory:/docker/x\n4:cpu,cpuacct:/docker/x\n"  # the host's path, which a container lacks
V2 = "0::/pod/job\n"


@pytest.fixture
def groups(tmp_path, monkeypatch):
    """Writes the process's groups and the files of the tree. 16 cores."""
    monkeypatch.setattr(control_groups, "PROC", tmp_path / "proc")
    monkeypatch.setattr(control_groups, "GROUPS", tmp_path / "groups")
    monkeypatch.setattr(work, "_physical_cores", lambda: 16)
    (tmp_path / "proc" / "self").mkdir(parents=True)

    def write(of_process: str, files: dict[str, str]) -> None:
        (tmp_path / "proc" / "self" / "cgroup").write_text(of_process)
        for name, text in files.items():
            path: Path = tmp_path / "groups" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text + "\n")

    return write


@pytest.mark.parametrize(
    ("of_process", "files", "quota", "threads"),
    [
        ("", {}, None, 16),
        (V2, {"pod/job/cpu.max": "max 100000"}, None, 16),
        (V2, {"pod/job/cpu.max": "200000 100000"}, 2.0, 2),
        (V2, {"pod/cpu.max": "150000 50000", "pod/job/cpu.max": "max 100000"}, 3.0, 3),
        (V2, {"pod/cpu.max": "100000 100000", "pod/job/cpu.max": "400000 100000"}, 1.0, 1),
        (V2, {"cpu.max": "250000 100000"}, 2.5, 3),  # in a container that does not see its path
        (V2, {"pod/job/cpu.max": "150000 100000"}, 1.5, 2),
        (V2, {"pod/job/cpu.max": "140000 100000"}, 1.4, 1),
        (V2, {"pod/job/cpu.max": "10000 100000"}, 0.1, 1),
        (V2, {"pod/job/cpu.max": "3200000 100000"}, 32.0, 16),
        (V2, {"pod/job/cpu.max": ""}, None, 16),
        (V2, {"pod/job/cpu.max": "200000"}, None, 16),
        (V2, {"pod/job/cpu.max": "200000 0"}, None, 16),
        (V2, {"pod/job/cpu.max": "many 100000"}, None, 16),
        ("0::/../../job\n", {"cpu.max": "200000 100000"}, 2.0, 2),
        (V1, {"cpu/cpu.cfs_quota_us": "200000", "cpu/cpu.cfs_period_us": "100000"}, 2.0, 2),
        (V1, {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, None, 16),
        (V1, {"cpu,cpuacct/cpu.cfs_quota_us": "50000", "cpu,cpuacct/cpu.cfs_period_us": "10000"},
         5.0, 5),
        (V1 + V2, {"cpu/docker/x/cpu.cfs_quota_us": "300000",
                   "cpu/docker/x/cpu.cfs_period_us": "100000",
                   "cpu/docker/cpu.cfs_quota_us": "100000",
                   "cpu/docker/cpu.cfs_period_us": "100000"}, 1.0, 1),
    ],
)  # fmt: skip
def test_the_smallest_quota_on_the_way_up_limits_the_threads(
    groups, of_process, files, quota, threads
):
    groups(of_process, files)
    assert control_groups.cpu_quota() == quota
    assert work.usable_cores() == threads
    found = machine.cpu([])
    assert (found["container_quota"], found["threads"]) == (quota, threads)


def test_the_doctor_says_the_quota(groups, capsys):
    groups(V2, {"pod/job/cpu.max": "150000 100000"})
    sections = dict.fromkeys(("packages", "cpu_features", "gpu", "folders", "models",
                              "environment", "python", "memory"))  # fmt: skip
    show({"version": "1", "cpu": machine.cpu([]), "problems": [], **sections})
    out = " ".join(capsys.readouterr().out.split())
    assert "container quota 1.5 CPUs, threads by default 2" in out


def test_a_group_is_limited_before_its_memory_ends(groups):
    """Beyond memory.high the system makes a group wait."""
    groups(V2, {"pod/job/memory.max": "8000000", "pod/job/memory.high": "6000000",
                "pod/job/memory.current": "5000000", "pod/memory.high": "max"})  # fmt: skip
    assert memory.container_limit() == 6000000
    assert memory.available_memory() == 1000000


def test_no_more_workers_start_than_a_model_needs(groups):
    """A worker without work spins, which uses up a quota."""
    code = """
import json, threading, numba, sys
from sparsekv_cli.system import work
work._physical_cores = lambda: 2
from sparsekv_cli.cpu.jit.install import use_threads
counts = lambda: sum(each.name.startswith("decode-") for each in threading.enumerate())
found = [counts()]
for n in (0, 1, 5, 3, 99):
    found += [use_threads(n), counts()]
print(json.dumps(found))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True,
                          env={"NUMBA_NUM_THREADS": "8", "PATH": ""})  # fmt: skip
    assert json.loads(done.stdout) == [0, 2, 1, 1, 1, 5, 4, 3, 4, 8, 7]


def test_the_user_may_ask_for_more_threads_than_the_quota(groups):
    import numba

    groups(V2, {"pod/job/cpu.max": "10000 100000"})
    before = numba.get_num_threads()
    try:
        assert use_threads(0) == 1
        assert use_threads(2) == min(2, numba.config.NUMBA_NUM_THREADS)
    finally:
        numba.set_num_threads(before)
