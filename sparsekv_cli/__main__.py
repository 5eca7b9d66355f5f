"""The entry point of ``sparsekv-cli`` and of ``python -m sparsekv_cli``."""

import signal
from typing import NoReturn


def main() -> NoReturn:
    """Runs the command line. A signal ends the imports before it, and Python's own end, quietly."""
    _end_at_signals()
    from sparsekv_cli import cli

    try:
        cli.main()
    finally:
        _end_at_signals()


def _end_at_signals() -> None:
    """Lets signals end the process without a word. Ignored ones stay ignored."""
    for number in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)


if __name__ == "__main__":
    main()
