"""What a process says whose model or memory is gone."""

import subprocess
import sys

import pytest

PROGRAM = """
import os, signal
from sparsekv_cli.models import faults
with faults.explain_abort(), faults.explain_cut("a.gguf", "start "):
    {}
"""


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("os.abort()", "error: a library of this program has given up"),
        ("signal.raise_signal(signal.SIGBUS)", "start error: a.gguf: a part of the file cannot"),
    ],
)
def test_a_fault_is_a_line(fault, words):
    program = [sys.executable, "-c", PROGRAM.format(fault)]
    done = subprocess.run(program, capture_output=True, encoding="utf-8", timeout=240)
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr.startswith(words) and done.stderr.count("\n") == 1
