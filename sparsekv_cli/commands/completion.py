"""``sparsekv-cli completion``: the shell's completion of commands, options, models and methods."""

import os

import click
from click.shell_completion import get_completion_class, shell_complete

from sparsekv_cli.commands.options.verbose import verbose_option
from sparsekv_cli.commands.shared.terminal import write_text

# the shell sets this variable to ask for completions (click's protocol)
VARIABLE = "_SPARSEKV_CLI_COMPLETE"
SHELLS = ("bash", "zsh", "fish")


@click.command()
@click.argument("shell", type=click.Choice(SHELLS))
@verbose_option
def command(shell: str) -> None:
    """Print the completion script of a shell, for its start-up file.

    \b
    bash  eval "$(sparsekv-cli completion bash)"       in ~/.bashrc
    zsh   eval "$(sparsekv-cli completion zsh)"        in ~/.zshrc
    fish  sparsekv-cli completion fish | source        in ~/.config/fish/config.fish
    """
    root = click.get_current_context().find_root()
    make = get_completion_class(shell)
    if make is None:
        raise click.UsageError(f"no completion for {shell}")
    write_text(make(root.command, {}, "sparsekv-cli", VARIABLE).source() + "\n")


def answer_shell(group: click.Command, program: str) -> int | None:
    """Answers a shell that asks for completions. Returns the exit code; None if it does not ask."""
    instruction = os.environ.get(VARIABLE)
    return (
        None if instruction is None else shell_complete(group, {}, program, VARIABLE, instruction)
    )
