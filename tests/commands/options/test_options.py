"""Values that mean nothing, options of the session, and garbage while a model is loaded."""

import gc
import subprocess
import sys

import click
import pytest
from click.testing import CliRunner

from sparsekv_cli.cli import cli
from sparsekv_cli.commands.shared.garbage import collecting_no_garbage
from sparsekv_cli.settings.config import SessionConfig
from sparsekv_cli.settings.option import options_of


def test_collector_is_off_within_and_on_after():
    try:
        with collecting_no_garbage():
            assert not gc.isenabled()
        assert gc.isenabled()
        with pytest.raises(RuntimeError), collecting_no_garbage():
            raise RuntimeError
        assert gc.isenabled()
    finally:
        gc.unfreeze()


def test_triton_does_not_complain_at_the_end():
    program = (
        "from sparsekv_cli.commands.shared.garbage import collecting_no_garbage\n"
        "with collecting_no_garbage():\n    import triton\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    "arguments",
    [
        ("run", "--temp", "-1"), ("chat", "--top-n-sigma", "-2"), ("run", "--max-loss", "nan"),
        ("bench", "--vram-limit", "inf"), ("serve", "--kv-memory", "inf"),
        ("serve", "--timeout", "nan"), ("run", "--cache-limit", "inf"), ("run", "--max-loss", "9"),
    ],
)  # fmt: skip
def test_a_value_without_a_meaning_is_refused(arguments):
    result = CliRunner().invoke(cli, [*arguments, "-m", "none.gguf"])
    assert result.exit_code == 2 and arguments[-1] in result.output


def test_run_has_every_option_of_a_session():
    """Each with its default, and the number that is below its bound is refused."""
    command = cli.get_command(click.Context(cli), "run")
    assert command is not None
    declared = {each.name: each for each in command.params}
    for name, option in options_of(SessionConfig).items():
        if name in ("chunk", "calibration", "sparse_from"):  # not there, or None: not given
            continue
        many = getattr(declared[name], "multiple", False)
        assert declared[name].default == (() if many else option.default), name
        allowed = option.metadata["allowed"]
        if not allowed.choices and not isinstance(option.default, str):
            spelling, below = declared[name].opts[-1], str(allowed.at_least - 1)
            result = CliRunner().invoke(cli, ["run", spelling, below, "-m", "none.gguf"])
            assert result.exit_code == 2 and spelling in result.output, name
