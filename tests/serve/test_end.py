"""A server that is told to end."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_it_says_so_and_leaves(number: int, code: int, tiny_model: Callable[..., Path]) -> None:
    arguments = ["serve", "-m", str(tiny_model(wtype="Q8_0")), "--port", "0", "-t", "1"]
    command = [sys.executable, "-m", "sparsekv_cli", *arguments]
    server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert server.stderr is not None
    while "http://127.0.0.1:" not in (line := server.stderr.readline()):
        assert line, "it ended"
    address = line.split(": ", 1)[1].strip()
    children = Path(f"/proc/{server.pid}/task/{server.pid}/children")
    if sys.platform == "linux":  # the process that reads grammars, before the first request
        (reader,) = (Path(f"/proc/{pid}") for pid in children.read_text().split())
        assert b"grammar_trial" in (reader / "cmdline").read_bytes()
    assert httpx.get(address + "health", timeout=240).status_code == 200  # it serves
    server.send_signal(number)
    _, err = server.communicate(timeout=240)
    assert server.returncode == code and err.splitlines()[-1] == "the server ends"
    assert sys.platform != "linux" or not reader.exists()
