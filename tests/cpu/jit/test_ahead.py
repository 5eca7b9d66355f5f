"""Kernels compiled ahead: which ones some calls need, and what becomes of the processes."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from sparsekv_cli.cpu.jit import llvm
from sparsekv_cli.cpu.jit.compiling import ahead
from sparsekv_cli.cpu.weights import dot, integer

PROGRAM = """
import sys
import numpy as np
from sparsekv_cli.cpu.jit.compiling import ahead
from sparsekv_cli.cpu.jit.install import install
from sparsekv_cli.cpu.layer import choice
from sparsekv_cli.cpu.weights import dot, integer
install()
calls = [
    lambda: dot.dequantize(8, np.zeros((4, 34), np.uint8), 32),
    lambda: integer.quantize_rows(*[0] * 7),
    lambda: 1 / 0,
    lambda: choice.few_rows_kernel(8, 1),
]
"""
COMPILE = """
reports = []
assert ahead.compile_ahead(calls, lambda *report: reports.append(report))
names = {name for name, _, _ in reports}
print(len([name for name in names if name != "done"]), reports[-1][:1] + reports[-1][1:] == (
    "done", len(names) - 1, len(names) - 1))
calls[0]()
calls[1]()
print(sum(sum(f.stats.cache_misses.values()) for f in (
    dot.rows_dequantize, dot._dequantize_parallel, integer.quantize_rows)))
"""


def run(cache: Path, program: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM + program],
        env={**os.environ, "XDG_CACHE_HOME": str(cache)}, capture_output=True, text=True,
        timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_calls_are_not_made_but_what_they_need_is_on_disk(tmp_path):
    assert run(tmp_path, COMPILE) == ["4", "True", "0"]


def test_kernels_are_noted_without_running_them(monkeypatch):
    """A signature that nobody else uses: arrays of complex numbers would not compile."""
    seen = []

    def call() -> None:
        seen.append(dot.dequantize_address.__wrapped__(8, dot.TO_BF16))  # for its cache
        seen.append(integer.quantize_rows(*[1j] * 7))

    kernels = ahead.kernels_of([call])
    assert [kernel.name for kernel in kernels] == ["rows_dequantize", "quantize_rows"]
    assert seen == [0, None]


def test_a_kernel_that_returns_a_value_is_known_by_its_text():
    assert ahead._returns_value(llvm.sum_squares.py_func)
    assert not ahead._returns_value(integer.quantize_rows.py_func)


SLOW = """
import time
from numba.core import typed_passes
lower = typed_passes.NativeLowering.run_pass
def slowly(self, state):
    time.sleep(60)
    return lower(self, state)
typed_passes.NativeLowering.run_pass = slowly
print("ready", flush=True)
ahead.compile_ahead(calls[:1], lambda *report: print("compiling", flush=True))
"""


def children_of(process: int) -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rsplit(")", 1)[1].split()
        except OSError:
            continue
        if int(fields[1]) == process and fields[0] != "Z":
            found.append(int(path.parent.name))
    return found


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks at processes in /proc")
def test_an_interrupt_ends_all_processes(tmp_path):
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM + SLOW],
        env={**os.environ, "XDG_CACHE_HOME": str(tmp_path)}, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n" and process.stdout.readline() == "compiling\n"
    copies = children_of(process.pid)
    assert len(copies) >= 1
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=30)
    time.sleep(0.1)
    assert not any(Path(f"/proc/{copy}").exists() for copy in copies)
