"""A command line in the test's own process."""

import pytest

from sparsekv_cli.cli import main


def call(capsys, *arguments):
    """Returns the exit status, stdout and stderr of a command."""
    with pytest.raises(SystemExit) as exit_:
        main([*map(str, arguments)])
    out, err = capsys.readouterr()
    return exit_.value.code, out, err
