"""Values that mean nothing; and the garbage collector is off while a model is loaded."""

from __future__ import annotations

import gc
import subprocess
import sys

import pytest
from click.testing import CliRunner

from sparsekv_cli.cli import cli
from sparsekv_cli.commands.shared.garbage import collecting_no_garbage


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
        "from sparsekv_cli.commands.shared.garbage import collecting_no_garbage\n"
        "with collecting_no_garbage():\n    import triton\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    "arguments",
    [
        ("run", "--temp", "-1"),
        ("chat", "--top-n-sigma", "-2"),
        ("run", "--max-loss", "nan"),
        ("bench", "--vram-limit", "inf"),
        ("serve", "--kv-memory", "inf"),
        ("serve", "--timeout", "nan"),
        ("run", "--cache-limit", "inf"),
    ],
)
def test_a_value_without_a_meaning_is_refused(arguments: tuple[str, ...]) -> None:
    result = CliRunner().invoke(cli, [*arguments, "-m", "none.gguf"])
    assert result.exit_code == 2 and arguments[-1] in result.output
