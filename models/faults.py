"""Explains faults in native code that end the process, in one line each.

A read of a page that a mapped file no longer has raises SIGBUS. A library that gets no memory
aborts. Python gets an exception for neither.
"""

import signal
from contextlib import AbstractContextManager

from sparsekv_cli.cpu.last_words import install


def explain_cut(model: str, start: str = "") -> AbstractContextManager[None]:
    """Ends the process with a line and code 1 if the file cannot be read while the block runs.

    model: the file's name in the line. start: written before the line, for a terminal.
    """
    line = (
        f"{start}error: {model}: a part of the file cannot be read: it became shorter while in "
        "use, or its disk failed; stop what writes to it and start again"
    )
    return install(signal.SIGBUS, line.encode())


def explain_abort(start: str = "") -> AbstractContextManager[None]:
    """Ends the process with a line and code 1 if a library aborts while the block runs."""
    line = (
        f"{start}error: a library of this program has given up (its words are above), most often "
        "for want of memory: use a smaller context (-c) or a smaller model"
    )
    return install(signal.SIGABRT, line.encode())
