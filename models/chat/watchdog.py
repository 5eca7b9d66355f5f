"""Ends a process whose template hangs inside a C call, where no deadline is checked."""

import contextlib
import signal
import threading
import time
from collections.abc import Iterator

from sparsekv_cli.cpu import last_words

MAX_SECONDS = 7.0  # limits.MAX_SECONDS, and five more for a busy machine
LAST_WORDS = f"error: chat template: stopped: one of its operations takes {MAX_SECONDS:g} s"


@contextlib.contextmanager
def watched(seconds: float = MAX_SECONDS) -> Iterator[None]:
    """Ends the process with one line and exit code 1 if the block takes longer than ``seconds``.

    A process has one timer, so this works in the main thread only. In other threads the block runs
    without a timer. A timer that was set before continues after the block.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    start = time.monotonic()
    left, interval = signal.setitimer(signal.ITIMER_REAL, 0)
    try:
        with last_words.install(signal.SIGALRM, LAST_WORDS.encode()):
            signal.setitimer(signal.ITIMER_REAL, seconds)
            try:
                yield
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
    finally:
        if left:
            left = max(left - (time.monotonic() - start), 1e-6)
            signal.setitimer(signal.ITIMER_REAL, left, interval)
