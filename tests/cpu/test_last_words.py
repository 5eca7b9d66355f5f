"""The line that a process says when a signal ends it, and what is left as it was."""

import os
import signal
import subprocess
import sys

import pytest

from sparsekv_cli.cpu.last_words import install

HEADER = """
import mmap, os, signal, tempfile, threading
from sparsekv_cli.cpu.last_words import install
"""


def run(code: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", HEADER + code]
    return subprocess.run(command, capture_output=True, encoding="utf-8", timeout=240)


def test_an_alarm_is_heard_while_a_thread_s_c_call_holds_the_gil():
    done = run(
        "with install(signal.SIGALRM, b'error: too long'):\n"
        "    signal.setitimer(signal.ITIMER_REAL, 0.3)\n"
        "    threading.Thread(target=lambda: 3 ** 10 ** 8).start()  # minutes\n"
        "    threading.enumerate()[-1].join()\n"
    )
    assert (done.returncode, done.stderr) == (1, "error: too long\n")


def test_a_mapped_file_that_shrinks():
    done = run(
        "with tempfile.TemporaryFile() as file:\n"
        "    file.truncate(1 << 16)\n"
        "    mapped = mmap.mmap(file.fileno(), 1 << 16)\n"
        "    with install(signal.SIGBUS, 'error: größer, bitte'.encode()):\n"
        "        file.truncate(0)\n"
        "        mapped[1 << 15]\n"
    )
    assert (done.returncode, done.stderr) == (1, "error: größer, bitte\n")


def test_python_handles_the_signal_again_afterwards():
    heard: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, _: heard.append(number))
    try:
        with install(signal.SIGUSR1, b"error: first"), install(signal.SIGUSR1, b"error: second"):
            pass
        os.kill(os.getpid(), signal.SIGUSR1)
        assert heard == [signal.SIGUSR1]
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_the_inner_words_are_said_then_the_outer():
    nested = (
        "with install(signal.SIGUSR1, b'outer'):\n"
        "    with install(signal.SIGUSR1, b'inner'):\n"
        "        {}\n"
        "    os.kill(os.getpid(), signal.SIGUSR1)\n"
    )
    assert run(nested.format("pass")).stderr == "outer\n"
    assert run(nested.format("os.kill(os.getpid(), signal.SIGUSR1)")).stderr == "inner\n"


def test_a_signal_that_does_not_exist():
    with pytest.raises(ValueError, match="signal_number 1000"), install(1000, b""):
        pass
