"""Python's garbage collector while a model is loaded."""

import atexit
import contextlib
import gc
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def collecting_no_garbage() -> Iterator[None]:
    """Switches garbage collection off while a model is loaded, which saves 0.3 s of a start."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
        atexit.unregister(_unfreeze)
        atexit.register(_unfreeze)


def _unfreeze() -> None:
    """Unfreezes objects when the process ends. Otherwise Triton's bindings complain on stderr."""
    if "triton" in sys.modules:
        gc.unfreeze()
