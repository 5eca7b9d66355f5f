"""``sparsekv-cli chat``: a conversation; the KV cache of what was said is kept between turns."""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import click

from sparsekv_cli.commands.answer import (
    PrefillInterrupted,
    keep_common,
    ledger_line,
    stream_answer,
    timing_line,
)
from sparsekv_cli.commands.help import GroupedCommand
from sparsekv_cli.commands.options import Invocation, ModelOptions, model_options, open_session
from sparsekv_cli.commands.prefix_options import PrefixOptions, prefix_options, use_prefixes
from sparsekv_cli.commands.prompt import check_utf8, parse_special_option
from sparsekv_cli.commands.sampling_options import sampling_options, stop_option
from sparsekv_cli.commands.terminal import one_line, say, write_text
from sparsekv_cli.errors import LostModelError, SparseKVError
from sparsekv_cli.generation.answer import STOP_INTERRUPT, STOP_LENGTH, Answer
from sparsekv_cli.generation.conversation import CHATML_END, chat_template, encode_messages
from sparsekv_cli.generation.sampler import SamplingOptions, new_constraint, new_sampler

if TYPE_CHECKING:
    from sparsekv_cli.sampling.grammar import Constraint
    from sparsekv_cli.session import Sample, Session

# "/word" alone or before other words; a path such as /etc/hosts is something to say.
COMMAND = re.compile(r"/\w+(\s|$)")
HELP = """\
/clear  forget the conversation      /regen  answer the last message again
/exit   leave (also /quit, Ctrl-D)   Ctrl-C  stop the answer; at the prompt: leave"""


@click.command(cls=GroupedCommand, short_help="Talk to a model; the KV cache is kept across turns.")
@click.option("-p", "--prompt", metavar="TEXT", help="The first message.")
@click.option("-sys", "--system-prompt", "system", metavar="TEXT", help="System message.")
@click.option(
    "-n",
    "--n-predict",
    metavar="N",
    type=click.IntRange(min=-1),
    default=-1,
    help="Most tokens of one answer; -1: until it ends or the context is full. [default: -1]",
)
@stop_option
@parse_special_option
@click.option("--stats", is_flag=True, help="Speed and KV rows on stderr after every answer.")
@model_options()
@prefix_options
@sampling_options
@click.pass_context
def command(
    context: click.Context,
    options: ModelOptions,
    prefix: PrefixOptions,
    sampling: SamplingOptions,
    prompt: str | None,
    system: str | None,
    n_predict: int,
    stop: tuple[str, ...],
    parse_special: bool,
    stats: bool,
) -> None:
    """Talk to a model.

    /help lists the commands. When stdin is no terminal, every line of it is a message (or a
    command) and the answers go to stdout, a line break after each. A model without a chat template
    gets ChatML.
    """
    prompt, system = (
        None if text is None else check_utf8(text, f"the text given with {source}")
        for text, source in ((prompt, "-p"), (system, "-sys"))
    )
    session = open_session(options)
    use_prefixes(session, prefix)
    constraint = new_constraint(session, sampling.grammar)
    sampler = new_sampler(session, sampling, options.seed, constraint)
    conversation = Conversation(session, sampler, system)
    conversation.constraint = constraint
    conversation.n_predict = n_predict
    conversation.parse_special = parse_special
    conversation.stops = stop if conversation.template else (*stop, CHATML_END)
    if stats or context.ensure_object(Invocation).verbose:
        conversation.stats_of = options.method
    interactive = sys.stdin.isatty()
    if interactive:
        say(f"{options.method} attention, {session.n_ctx} tokens of context; /help for help")
    messages = read_terminal() if interactive else read_lines()
    if prompt is not None:
        respond(conversation, lambda: conversation.send(prompt))
    for message in messages:
        if message.strip() in ("/exit", "/quit"):
            break
        handle(conversation, message)


class Conversation:
    """The messages so far, and a session whose KV cache holds as much of them as it can."""

    def __init__(self, session: Session, sample: Sample, system: str | None) -> None:
        self.session = session
        self.sample = sample
        self.template = chat_template(session.gguf.metadata)
        self.n_predict = -1
        self.parse_special = False
        self.constraint: Constraint | None = None
        self.stats_of: str | None = None  # the method whose statistics follow an answer
        self.stops: Sequence[str] = ()
        self._opening = [] if system is None else [{"role": "system", "content": system}]
        self.messages = list(self._opening)

    def clear(self) -> None:
        """Forgets everything but the system message."""
        self.messages = list(self._opening)

    def send(self, text: str) -> Answer:
        """The answer to a new message. If there is none, the message is taken back."""
        return self._answer([*self.messages, {"role": "user", "content": text}])

    def regenerate(self) -> Answer:
        """Another answer to the last message, in place of the one it has."""
        if not self.messages or self.messages[-1]["role"] != "assistant":
            raise SparseKVError("there is no answer to generate again")
        return self._answer(self.messages[:-1])

    def _answer(self, messages: list[dict[str, str]]) -> Answer:
        session = self.session
        ids = encode_messages(
            session.tokenizer, self.template, messages, parse_special=self.parse_special
        )
        if len(ids) >= session.n_ctx:
            raise SparseKVError(
                f"the conversation takes {len(ids)} tokens and the context holds {session.n_ctx}: "
                "/clear forgets it, -c N makes a larger context"
            )
        session.timings.reset()
        new_ids = keep_common(session, ids)
        answer = stream_answer(
            session,
            new_ids,
            self.sample,
            self.n_predict,
            self.stops,
            write_text,
            self.constraint,
        )
        self.messages = [*messages, {"role": "assistant", "content": answer.text}]
        return answer

    def ended_by_full_context(self, answer: Answer) -> bool:
        """Whether the answer was cut because no more tokens fit."""
        return answer.stop_reason == STOP_LENGTH and len(answer.tokens) != self.n_predict


def handle(conversation: Conversation, message: str) -> None:
    """One line of the user: a command, or something to say to the model."""
    word = message.strip()
    if not word:
        return
    if word == "/clear":
        conversation.clear()
        say("the conversation is forgotten")
    elif word == "/regen":
        respond(conversation, conversation.regenerate)
    elif word == "/help":
        say(HELP)
    elif COMMAND.match(word):
        say(f"{word}: no such command; /help lists them")
    else:
        respond(conversation, lambda: conversation.send(message))


def respond(conversation: Conversation, generate: Callable[[], Answer]) -> None:
    """Streams one answer; what cannot be answered becomes a line, and the conversation goes on.

    Not without the model: LostModelError is passed on.
    """
    try:
        answer = generate()
    except LostModelError:
        raise
    except SparseKVError as error:
        say(f"error: {one_line(str(error))}")
        return
    except PrefillInterrupted:
        say("stopped before the answer began; the message is taken back")
        return
    if not answer.text.endswith("\n"):
        write_text("\n")
    if answer.stop_reason == STOP_INTERRUPT:
        say("stopped")
    elif conversation.ended_by_full_context(answer):
        say("the context is full: /clear forgets the conversation, -c N makes a larger context")
    if conversation.stats_of is not None:
        say(timing_line(conversation.session))
        say(ledger_line(conversation.session, conversation.stats_of))


def read_terminal() -> Iterator[str]:
    """Messages typed at a prompt, with line editing and history, until Ctrl-D."""
    with contextlib.suppress(ImportError):  # Windows has no such module
        import readline  # noqa: F401  (input() then edits lines and remembers them)
    while True:
        if not sys.stdout.isatty():
            click.echo("> ", err=True, nl=False)  # stdout carries the answers only
        try:
            typed = input("> " if sys.stdout.isatty() else "")
        except EOFError:
            click.echo(err=True)
            return
        try:
            message = check_utf8(typed, "what was typed")
        except SparseKVError as error:
            say(f"error: {one_line(str(error))}")
            continue
        yield message


def read_lines() -> Iterator[str]:
    """Messages piped to stdin, one a line. SparseKVError if they are not UTF-8."""
    for number, line in enumerate(getattr(sys.stdin, "buffer", sys.stdin), start=1):
        try:
            text = line.decode("utf-8") if isinstance(line, bytes) else line
        except UnicodeDecodeError:
            raise SparseKVError(f"line {number} of stdin is not UTF-8") from None
        yield text.rstrip("\r\n")
