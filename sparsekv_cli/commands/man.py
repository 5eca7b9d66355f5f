"""``sparsekv-cli man``: the manual page of all commands, made of their help."""

from __future__ import annotations

import inspect

import click

from sparsekv_cli import __version__
from sparsekv_cli.commands.options.help_page import grouped_options
from sparsekv_cli.commands.options.model import verbose_option


@click.command(short_help="Print the manual page.")
@verbose_option
def command() -> None:
    """Print the manual page of all commands, in roff.

    \b
    sparsekv-cli man | man -l -
    sparsekv-cli man > ~/.local/share/man/man1/sparsekv-cli.1
    """
    context = click.get_current_context().find_root()
    click.echo("\n".join(page(context)))


def page(context: click.Context) -> list[str]:
    """The page's lines. context: of the group."""
    group = context.command
    lines = [f'.TH SPARSEKV\\-CLI 1 "" "sparsekv\\-cli {escaped(__version__)}"', ".SH NAME"]
    lines += [f"sparsekv\\-cli \\- {escaped(paragraphs(group)[0])}", ".SH SYNOPSIS"]
    lines += [".B sparsekv\\-cli", "COMMAND [OPTIONS]"]
    assert isinstance(group, click.Group)
    for name in group.list_commands(context):
        found = group.get_command(context, name)
        if found is not None:
            own = click.Context(found, parent=context, info_name=name)
            lines += [f'.SH "{escaped(own.command_path)}"', *_described(found, own)]
            for inner in found.list_commands(own) if isinstance(found, click.Group) else ():
                part = found.get_command(own, inner)  # type: ignore[attr-defined]
                if part is not None:
                    its = click.Context(part, parent=own, info_name=inner)
                    lines += [f'.SS "{escaped(its.command_path)}"', *_described(part, its)]
    return lines


def paragraphs(command: click.Command) -> list[str]:
    """A command's help, a paragraph an item; those that are not to be folded keep their lines."""
    parts = inspect.cleandoc(command.help or "").split("\n\n")
    return [part if part.startswith("\b") else " ".join(part.split()) for part in parts]


def _described(command: click.Command, context: click.Context) -> list[str]:
    usage = " ".join(command.collect_usage_pieces(context))
    lines = [f".B {escaped(context.command_path)}", escaped(usage)]
    for part in paragraphs(command):
        kept = [escaped(line) for line in part.splitlines()[1:]] if part.startswith("\b") else []
        lines += [".PP", *([".nf", *kept, ".fi"] if kept else [escaped(part)])]
    for title, records in grouped_options(command, context):
        lines += [".PP", f".B {escaped(title)}"]
        for names, text in records:
            lines += [".TP", f".B {escaped(names)}", escaped(text)]
    return lines


def escaped(text: str) -> str:
    """``text`` as roff shows it as it is."""
    text = text.replace("\\", "\\e").replace("-", "\\-")
    return f"\\&{text}" if text.startswith((".", "'")) else text
