"""The options that give commands a prompt."""

from collections.abc import Callable
from typing import Any

import click

from sparsekv_cli.commands.options import completers


def _once(_context: click.Context, parameter: click.Parameter, values: tuple[str, ...]) -> Any:
    """Callback of an option that may be given once: a second text would replace the first."""
    if len(values) > 1:
        raise click.BadParameter(f"is given {len(values)} times: give it once")
    return values[0] if values else None


prompt_option = click.option(
    "-p", "--prompt", metavar="TEXT", multiple=True, callback=_once,
    help="The prompt; a piped text comes before it.",
)  # fmt: skip

parse_special_option = click.option(
    "--parse-special", is_flag=True,
    help="Also parse control tokens such as <|im_end|> in messages. By default only those of the "
    "chat template are parsed, so that no message can begin a turn.",
)  # fmt: skip

think_option = click.option(
    "--think", type=click.Choice(("on", "off")),
    callback=lambda _context, _parameter, value: None if value is None else value == "on",
    help="Whether the model thinks before its answer, if its chat template has that choice. "
    "[default: the template's]",
)  # fmt: skip


def files_option(help_text: str, **more: Any) -> Callable[[Any], Any]:
    """Returns the option ``-f``, which names text files."""
    return click.option(
        "-f", "--file", metavar="FILE", multiple=True, shell_complete=completers.files,
        help=help_text, **more,
    )  # fmt: skip


def file_option(help_text: str) -> Callable[[Any], Any]:
    """Returns the option ``-f`` of one text file."""
    return files_option(help_text, callback=_once)
