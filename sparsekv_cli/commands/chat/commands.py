"""The input of a user of ``chat``: a message, or one of the commands in the table below."""

import re
import shutil
import textwrap
from collections.abc import Callable
from dataclasses import dataclass, field

import click

from sparsekv_cli.commands.chat.conversation import Conversation
from sparsekv_cli.commands.chat.files import load_messages, read_text, save_messages
from sparsekv_cli.commands.chat.screen import no_echo
from sparsekv_cli.commands.chat.settings import change_setting, show_settings
from sparsekv_cli.commands.options.model import ModelOptions, build_method
from sparsekv_cli.commands.options.prefix import PrefixOptions
from sparsekv_cli.commands.shared import progress
from sparsekv_cli.commands.shared.answer import (
    PrefillInterrupted,
    depth_note,
    ledger_line,
    moved_note,
    speculation_line,
    timing_line,
)
from sparsekv_cli.commands.shared.terminal import one_line, say, write_text
from sparsekv_cli.errors import LostModelError, SparseKVError
from sparsekv_cli.generation.answer import STOP_INTERRUPT, Answer
from sparsekv_cli.settings.option import did_you_mean, options_of

# "/word", alone or before other words. A path such as /etc/hosts is a message.
COMMAND = re.compile(r"/(\w+|\?)(?:\s+(.*))?", re.DOTALL)
NARROW = 70  # on narrower terminals a command's help has a line of its own
LEAVING = ("exit", "quit", "bye")
KEYS = (
    "Enter sends; a backslash at the end of a line, or Alt-Enter, starts another line, and a "
    'message between """ and """ may have many. Tab completes, Ctrl-R searches the history, '
    "Ctrl-X Ctrl-E opens $EDITOR. Ctrl-C stops an answer or clears the line; on an empty line it "
    "leaves, as Ctrl-D does."
)


@dataclass
class Chat:
    """A conversation, and the settings of the program around it."""

    conversation: Conversation
    options: ModelOptions
    prefix: PrefixOptions
    shows_stats: bool = False  # whether statistics follow every answer
    method: str = ""
    # texts that /read has read, to be put before the next message
    read: list[str] = field(default_factory=list)
    draft: str = ""  # text that the next input line begins with

    def __post_init__(self) -> None:
        self.method = self.options.method


@dataclass(frozen=True)
class ChatCommand:
    """One command, such as ``/save``."""

    takes: str  # name of its argument, in brackets if it may be missing; "": it has none
    help: str
    run: Callable[[Chat, str], None]


def enter(chat: Chat, text: str) -> bool:
    """Runs what the user has entered. Returns whether the chat goes on.

    An error becomes a line, and the chat goes on. LostModelError is passed on, because the chat
    cannot go on without the model.
    """
    found = COMMAND.fullmatch(text.strip())
    if found is None:
        if text.strip():
            respond(chat, lambda: send(chat, text))
        return True
    name, argument = found[1].replace("?", "help"), (found[2] or "").strip()
    if name in LEAVING:
        return False
    try:
        if name not in COMMANDS:
            close = did_you_mean(name, [*COMMANDS, *LEAVING]).replace("mean ", "mean /")
            raise SparseKVError(f"/{name}: no such command{close}; /help lists them")
        command = COMMANDS[name]
        if argument and not command.takes:
            raise SparseKVError(f"/{name} takes no argument, found {argument!r}")
        if not argument and command.takes and not command.takes.startswith("["):
            raise SparseKVError(f"/{name} {command.takes}: {command.takes.split()[0]} is missing")
        command.run(chat, argument)
    except LostModelError:
        raise
    except SparseKVError as error:
        say(f"error: {one_line(str(error))}")
    except click.UsageError as error:
        say(f"error: {one_line(error.format_message())}")
    except KeyboardInterrupt:
        say("stopped")
    return True


def send(chat: Chat, text: str) -> Answer:
    """Returns the answer to ``text``. Texts that /read has read come before it in the message."""
    answer = chat.conversation.send("\n\n".join([*chat.read, text]))
    chat.read = []
    return answer


def respond(chat: Chat, generate: Callable[[], Answer]) -> None:
    """Writes one answer while it is generated. An error becomes a line, as in ``enter``."""
    conversation = chat.conversation
    try:
        with no_echo():
            answer = generate()
    except LostModelError:
        raise
    except SparseKVError as error:
        say(f"error: {one_line(str(error))}")
        return
    except PrefillInterrupted:
        say("stopped before the answer started; the message is taken back")
        return
    if not answer.text.endswith("\n") and (answer.text or not answer.thinking):
        write_text("\n")
    if answer.stop_reason == STOP_INTERRUPT:
        say("stopped")
    elif (line := conversation.full_context_line(answer)) is not None:
        say(line)
    if chat.shows_stats:
        _stats(chat, "")


# --- commands -------------------------------------------------------------------------------------


def _help(chat: Chat, _argument: str) -> None:
    width = max(30, min(100, shutil.get_terminal_size().columns - 1))
    usages = {name: f"/{name} {each.takes}".rstrip() for name, each in COMMANDS.items()}
    column = 4 if width < NARROW else 2 + max(map(len, usages.values()))
    lines = []
    for name, usage in usages.items():
        help = textwrap.wrap(COMMANDS[name].help, width - column)
        if width < NARROW:
            lines.append(usage)
        else:
            lines.append(f"{usage:<{column}}{help.pop(0)}")
        lines += [" " * column + line for line in help]
    say("\n".join([*lines, "", *textwrap.wrap(KEYS, width)]))


def _clear(chat: Chat, _argument: str) -> None:
    chat.conversation.clear()
    chat.read = []
    say("the conversation is forgotten")


def _regenerate(chat: Chat, _argument: str) -> None:
    respond(chat, chat.conversation.regenerate)


def _undo(chat: Chat, _argument: str) -> None:
    if chat.read:
        chat.read.pop()
        say("the text that was read last is taken back")
        return
    chat.draft = chat.conversation.undo()
    say(f"taken back: {_short(chat.draft)}")


def _short(text: str) -> str:
    line = one_line(text)
    return line if len(line) <= 60 else f"{line[:57]}..."


def _system(chat: Chat, argument: str) -> None:
    conversation = chat.conversation
    if not argument:
        say(conversation.system or "there is no system message")
        return
    conversation.set_system(None if argument == '""' else argument)
    done = "gone" if argument == '""' else "set"
    again = "; the conversation is read again" if conversation.n_used else ""
    say(f"the system message is {done}{again}")


def _set(chat: Chat, argument: str) -> None:
    say(
        change_setting(chat.conversation, argument)
        if argument
        else show_settings(chat.conversation)
    )


def _read(chat: Chat, argument: str) -> None:
    text = read_text(argument)
    chat.read.append(text)
    say(f"{argument}: {len(text)} characters, which come before your next message")


def _save(chat: Chat, argument: str) -> None:
    messages = chat.conversation.messages
    if not messages:
        raise SparseKVError("there is nothing to save")
    save_messages(argument, messages)
    say(f"{argument}: {len(messages)} messages are saved")


def _load(chat: Chat, argument: str) -> None:
    messages = load_messages(argument)
    chat.conversation.replace(messages)
    last = "; /regen answers the last one" if messages[-1]["role"] == "user" else ""
    n_used, n_ctx = chat.conversation.n_used, chat.conversation.sequence.n_ctx
    say(f"{argument}: {len(messages)} messages, {n_used} of {n_ctx} tokens{last}")


def _stats(chat: Chat, _argument: str) -> None:
    sequence = chat.conversation.sequence
    n_used = chat.conversation.n_used
    note = moved_note(sequence) + (depth_note(sequence, n_used) if n_used else "")
    say(timing_line(sequence.timings) + note)
    say(ledger_line(sequence, chat.method))
    if line := speculation_line(sequence.timings):
        say(line)


def _method(chat: Chat, argument: str) -> None:
    conversation, options = chat.conversation, chat.options
    model, sequence = conversation.model, conversation.sequence
    name, *pairs = argument.split()
    given, depth = {}, None
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals:
            raise SparseKVError(f"/method {name} {pair}: expected KEY=VALUE")
        given[key] = value
    if name == options.method:
        given, depth = {**options.method_options, **given}, model.sparse_from
    known = options_of(type(build_method(name, {})))
    named = {key: text for key, text in options.named.items() if key in known and key not in given}
    method = build_method(name, given, named)
    with progress.CompileProgress() as compiling, progress.CalibrationProgress() as calibrating:
        attention = model.attention_of(method, depth, compiling, calibrating)
        prompt_rows = conversation.open_rows(model, method)
        try:
            sequence.change_method(attention)
        finally:
            if sequence.attention is attention:  # also if a stop came while tokens are read again
                chat.method, conversation.rows = name, prompt_rows
    what = f"{name} attention"
    if conversation.n_used:
        rows = "its rows are kept" if sequence.tokens else "it is read again with your next message"
        what += f"; the conversation goes on: {rows}"
    say(what)


COMMANDS: dict[str, ChatCommand] = {
    "help": ChatCommand("", "list the commands and keys (also /?)", _help),
    "clear": ChatCommand("", "forget the conversation, but not the system message", _clear),
    "regen": ChatCommand("", "answer the last message again", _regenerate),
    "undo": ChatCommand("", "take your last message back, or the text that was read last", _undo),
    "system": ChatCommand("[TEXT]", 'set the system message, "" for none; alone: show it', _system),
    "set": ChatCommand(
        "[NAME [VALUE]]", "change a sampler, n_predict, stop, think, ctx ...; alone: show all", _set
    ),
    "read": ChatCommand("FILE", "put a text, PDF or Word file before your next message", _read),
    "save": ChatCommand("FILE", "write the conversation to a JSON file", _save),
    "load": ChatCommand("FILE", "continue a saved conversation", _load),
    "stats": ChatCommand("", "speed and KV rows of the last answer", _stats),
    "method": ChatCommand("NAME [KEY=VALUE ...]", "continue with another KV-cache method", _method),
    "exit": ChatCommand("", "leave (also /quit and /bye)", lambda chat, argument: None),
}
