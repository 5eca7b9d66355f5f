"""Loading switches the garbage collector off, and always on again."""

from __future__ import annotations

import gc
import subprocess
import sys

import pytest

from sparsekv_cli.commands.garbage import collecting_no_garbage


def test_collector_is_off_within_and_on_after() -> None:
    try:
        with collecting_no_garbage():
            assert not gc.isenabled()
        assert gc.isenabled()
        with pytest.raises(RuntimeError), collecting_no_garbage():
            raise RuntimeError
        assert gc.isenabled()
    finally:
        gc.unfreeze()


def test_triton_does_not_complain_at_the_end() -> None:
    program = (
        "from sparsekv_cli.commands.garbage import collecting_no_garbage\n"
        "with collecting_no_garbage():\n    import triton\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
