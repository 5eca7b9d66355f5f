"""``sparsekv-cli eval``: perplexity and KLD as llama-perplexity measures them, RULER's tasks."""

import click

from sparsekv_cli.commands.eval.chunks import kld, perplexity
from sparsekv_cli.commands.eval.ruler import ruler
from sparsekv_cli.commands.options.verbose import verbose_option


@click.group()
@verbose_option
def command() -> None:
    """Measure what methods lose, on a text or on RULER's tasks."""


command.add_command(perplexity)
command.add_command(kld)
command.add_command(ruler)
