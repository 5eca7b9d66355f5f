"""Programs of others that go on with a conversation only in a terminal."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import signal
import struct
import subprocess
import termios
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from sparsekv_cli.errors import SparseKVError

ROWS, COLUMNS = 40, 120
READY_S, KEY_S, QUIET_S = 15, 2, 5  # until it reads keys; between keys; after its last request
ESCAPE, ENTER = b"\x1b", b"\r"  # ESCAPE closes what is shown at the beginning


def turns_in_terminal(
    words: Sequence[str],
    questions: Sequence[str],
    count: Callable[[], int],
    late_s: float,
    *,
    folder: Path,
    environment: Mapping[str, str],
) -> Iterator[None]:
    """Types each question, and waits for the answer.

    count: the number of answered requests. late_s: seconds that a turn may take. Raises
    SparseKVError if a turn has no request.
    """
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    process = subprocess.Popen(
        words, cwd=folder, env={**environment, "TERM": "xterm-256color"}, stdin=theirs,
        stdout=theirs, stderr=theirs, start_new_session=True,
    )  # fmt: skip
    os.close(theirs)
    threading.Thread(target=_drain, args=(ours,), daemon=True).start()
    try:
        time.sleep(READY_S)
        os.write(ours, ESCAPE)
        for text in questions:
            before, end = count(), time.monotonic() + late_s
            for keys in (text.encode(), ENTER):
                time.sleep(KEY_S)
                os.write(ours, keys)
            while count() == before:
                if process.poll() is not None or time.monotonic() > end:
                    raise SparseKVError(f"'{words[0]}' does not ask the server")
                time.sleep(KEY_S)
            while (now := count()) != before:
                before = now
                time.sleep(QUIET_S)
            yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        process.wait()
        os.close(ours)
        _end_all(environment["HOME"])


def _end_all(home: str) -> None:
    """Ends what a program has left behind: the processes with its home folder."""
    for file in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if f"HOME={home}".encode() in file.read_bytes().split(b"\0"):
                os.kill(int(file.parent.name), signal.SIGTERM)


def _drain(terminal: int) -> None:
    """Reads what a program shows, or it would wait."""
    with contextlib.suppress(OSError):
        while os.read(terminal, 1 << 16):
            pass
