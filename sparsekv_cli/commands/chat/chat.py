"""``sparsekv-cli chat``: a conversation that keeps its KV cache between turns."""

import sys
from collections.abc import Iterable, Iterator

import click

from sparsekv_cli.commands.chat.commands import Chat, enter, respond, send
from sparsekv_cli.commands.chat.conversation import ChatSettings, Conversation, gather_settings
from sparsekv_cli.commands.options.help_page import GroupedCommand
from sparsekv_cli.commands.options.method_choice import choose_method
from sparsekv_cli.commands.options.model import (
    ModelOptions,
    gathered,
    model_options,
    open_model,
)
from sparsekv_cli.commands.options.numbers import WholeRange
from sparsekv_cli.commands.options.prefix import PrefixOptions, open_prompt_rows, prefix_options
from sparsekv_cli.commands.options.prompt import parse_special_option, think_option
from sparsekv_cli.commands.options.sampling import check_think_budget, sampling_options, stop_option
from sparsekv_cli.commands.options.verbose import Invocation
from sparsekv_cli.commands.shared.prompt import check_utf8
from sparsekv_cli.commands.shared.terminal import one_line, say
from sparsekv_cli.errors import SparseKVError
from sparsekv_cli.generation.conversation import thinking_switch


@click.command(cls=GroupedCommand)
@click.option("-p", "--prompt", metavar="TEXT", help="The first message.")
@click.option("-sys", "--system-prompt", "system", metavar="TEXT", help="System message.")
@click.option(
    "-n", "--n-predict", metavar="N", type=WholeRange(min=-1), default=-1,
    help="Most tokens of one answer; -1: until it ends or the context is full. [default: -1]",
)  # fmt: skip
@stop_option
@parse_special_option
@think_option
@click.option(
    "--drop-thinking", is_flag=True,
    help="Leave the thinking out of later prompts; the tokens after it are then read again.",
)  # fmt: skip
@click.option(
    "--context-shift", is_flag=True,
    help="When the context is full, drop the oldest turns and read the others again. Otherwise "
    "the answer ends, and a line says so.",
)  # fmt: skip
@click.option(
    "--keep", metavar="N", type=WholeRange(min=0), default=0,
    help="With --context-shift: keep turns that start within the first N tokens; 1: the first "
    "turn. The system message is always kept. [default: 0]",
)  # fmt: skip
@click.option("--stats", is_flag=True, help="Speed and KV rows on stderr after every answer.")
@model_options()
@prefix_options
@sampling_options
@gathered("settings", gather_settings, [])
@click.pass_context
def command(
    context: click.Context,
    options: ModelOptions,
    prefix: PrefixOptions,
    settings: ChatSettings,
    prompt: str | None,
    system: str | None,
    stats: bool,
) -> None:
    """Talk to a model.

    /help lists the commands. If stdin is no terminal, every line of it is a message (or a command).
    The answers go to stdout, a line break after each. A model without a chat template gets ChatML.
    """
    check_think_budget(context, settings.sampling, settings.think)
    if settings.keep and not settings.context_shift:
        raise click.UsageError("--keep needs --context-shift", context)
    prompt, system = (
        None if text is None else check_utf8(text, f"the text given with {source}")
        for text, source in ((prompt, "-p"), (system, "-sys"))
    )
    model = open_model(options)
    model, options = choose_method(model, options)
    conversation = Conversation(
        model, settings, system, lambda of, method: open_prompt_rows(of, prefix, method)
    )
    thinking_switch(conversation.template, settings.think)
    shows_stats = stats or context.ensure_object(Invocation).verbose
    chat = Chat(conversation, options, prefix, shows_stats)
    is_terminal = sys.stdin.isatty()
    if is_terminal:
        if conversation.template is None:
            say(
                "warning: the model has no chat template, so it may be a base model, which does "
                "not answer: use 'run --raw' to continue a text"
            )
        say(f"{options.method} attention, {model.n_ctx} tokens of context; /help for help")
    if prompt is not None:
        respond(chat, lambda: send(chat, prompt))
    for entry in typed(chat) if is_terminal else lines():
        if not enter(chat, entry):
            break


def typed(chat: Chat) -> Iterator[str]:
    """Yields the texts that the user types at a terminal, until Ctrl-D."""
    from sparsekv_cli.commands.chat.prompt import entries  # slow to import

    for entry in entries(chat):
        try:
            yield check_utf8(entry, "what was typed")
        except SparseKVError as error:
            say(f"error: {one_line(str(error))}")


def lines() -> Iterable[str]:
    """Yields the lines that are piped to stdin. Raises SparseKVError if one is not UTF-8."""
    for number, line in enumerate(getattr(sys.stdin, "buffer", sys.stdin), start=1):
        try:
            text = line.decode("utf-8") if isinstance(line, bytes) else line
        except UnicodeDecodeError:
            raise SparseKVError(f"line {number} of stdin is not UTF-8") from None
        yield (text.removeprefix("\ufeff") if number == 1 else text).rstrip("\r\n")
