"""The options of SessionConfig on the command line."""

from collections.abc import Callable
from typing import Any

import click

from sparsekv_cli.commands.options.numbers import FiniteRange
from sparsekv_cli.settings.config import SessionConfig
from sparsekv_cli.settings.option import MAX_WHOLE, allowed_values, options_of


def session_option(name: str, default: Any = None) -> Callable[[Any], Any]:
    """Returns the click option of an option that SessionConfig declares.

    default: the default of a command that has its own.
    """
    declared = options_of(SessionConfig)[name]
    allowed, default = allowed_values(declared), declared.default if default is None else default
    least = allowed.at_least
    kind: Any = FiniteRange(min=least)
    if allowed.choices:
        kind = click.Choice(allowed.choices)
    elif isinstance(default, str):
        kind = str
    elif isinstance(default, int):
        kind = click.IntRange(None if least is None else int(least), MAX_WHOLE)
    shown = default if isinstance(default, str) else f"{default:g}"
    return click.option(
        *(declared.metadata["flags"] or ("--" + name.replace("_", "-"),)), name, type=kind,
        default=default, metavar=declared.metadata["metavar"],
        help=declared.metadata["help"] + (f" [default: {shown}]" if shown else ""),
    )  # fmt: skip
