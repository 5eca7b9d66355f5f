"""The input line of ``chat`` at a terminal, by prompt_toolkit."""

import contextlib
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from datetime import datetime
from pathlib import Path

from prompt_toolkit import PromptSession
from prompt_toolkit.application import get_app
from prompt_toolkit.completion import CompleteEvent, Completer, Completion, PathCompleter
from prompt_toolkit.document import Document
from prompt_toolkit.formatted_text import StyleAndTextTuples
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.output import create_output
from prompt_toolkit.styles import Style

from sparsekv_cli.cache.counters import speed
from sparsekv_cli.commands.chat.commands import COMMANDS, LEAVING, Chat
from sparsekv_cli.commands.chat.settings import SETTINGS
from sparsekv_cli.commands.shared.terminal import one_line, say
from sparsekv_cli.errors import SparseKVError
from sparsekv_cli.methods import METHODS, method_class
from sparsekv_cli.settings.config import dense_below
from sparsekv_cli.settings.option import allowed_values, options_of
from sparsekv_cli.system.files import APPENDED, AppendedFile, open_written, replace_file

QUOTES = '"""'
LEAST_PASTE = 2000  # characters; of a longer paste the line shows a few words
MOST_REMEMBERED = 1 << 14  # characters; longer entries are not stored in the history
MOST_HISTORY = 1 << 20  # bytes of the history's file; a larger one loses its older half
STYLE = Style.from_dict({"bottom-toolbar": "noreverse", "bottom-toolbar.text": "noreverse"})


def entries(chat: Chat) -> Iterator[str]:
    """Yields what the user enters, until Ctrl-D. Ctrl-C on an empty line: KeyboardInterrupt."""
    # Answers go to stdout. If stdout is no terminal, the line is edited on stderr.
    output = None if sys.stdout.isatty() else create_output(stdout=sys.stderr)
    pastes = Pastes()
    session: PromptSession[str] = PromptSession(
        "> ",
        multiline=True,
        prompt_continuation=". ",
        history=open_history(pastes),
        completer=ChatCompleter(),
        complete_while_typing=True,
        key_bindings=key_bindings(pastes),
        bottom_toolbar=lambda: toolbar(chat, get_app().output.get_size().columns),
        style=STYLE,
        reserve_space_for_menu=4,
        enable_open_in_editor=True,
        enable_suspend=True,
        output=output,
    )
    while True:
        pastes.clear()
        draft, chat.draft = chat.draft, ""
        try:
            text = session.prompt(default=pastes.take(draft))
        except EOFError:
            return
        yield pastes.put_in(message_of(text))


def toolbar(chat: Chat, width: int) -> StyleAndTextTuples:
    """Returns used tokens, method, speed and model, as many of them as ``width`` allows."""
    conversation = chat.conversation
    sequence, timings = conversation.sequence, conversation.sequence.timings
    n_used, dense = conversation.n_used, sequence.sparse_from
    parts = [f"{n_used} of {sequence.n_ctx} tokens", chat.method]
    if chat.method != "full" and n_used <= dense < sequence.n_ctx:
        parts[1] += f", {dense_below(dense)}"
    if timings.decode_tokens:
        parts.append(f"{speed(timings.decode_tokens, timings.decode_s):.1f} t/s")
    if timings.cached_tokens:
        parts.append(f"{timings.cached_tokens} from the prefix cache")
    parts.append(one_line(conversation.model.gguf.path.stem))
    if chat.read:
        parts.append(f"files read: {len(chat.read)}")
    parts.append("/help")
    while len(parts) > 1 and len(" | ".join(parts)) > width:
        parts.pop()
    return [("class:bottom-toolbar.text", " | ".join(parts)[:width])]


def is_complete(text: str) -> bool:
    """Returns whether Enter sends ``text``: it has no open quotes and no backslash at its end."""
    if text.lstrip().startswith(QUOTES):
        rest = text.strip()[len(QUOTES) :]
        return rest.endswith(QUOTES)
    return not text.endswith("\\")


def message_of(text: str) -> str:
    """Returns the entered text without the quotes or backslashes that allow several lines."""
    stripped = text.strip()
    if stripped.startswith(QUOTES):
        inner = stripped[len(QUOTES) : -len(QUOTES)]
        return inner.removeprefix("\n").removesuffix("\n")
    return text.replace("\\\n", "\n")


class Pastes(dict[str, str]):
    """The few words that stand for a long paste in the line -> the pasted text."""

    def take(self, text: str) -> str:
        """Returns what the line shows for a pasted text: the text; of a long one, a few words."""
        text = text.replace("\r\n", "\n").replace("\r", "\n")
        if len(text) < LEAST_PASTE:
            return text
        n_lines = text.count("\n") + 1
        mark = f"[paste {len(self) + 1}: {len(text)} characters, {n_lines} lines]"
        self[mark] = text
        return mark

    def put_in(self, text: str) -> str:
        """Returns ``text`` with the pasted texts in place of the words that stand for them."""
        for mark, pasted in self.items():
            text = text.replace(mark, pasted)
        return text


def key_bindings(pastes: Pastes) -> KeyBindings:
    """Returns bindings of Enter, Alt-Enter, Ctrl-C and pasting. prompt_toolkit has the others."""
    bindings = KeyBindings()

    @bindings.add("<bracketed-paste>")
    def _(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text(pastes.take(event.data))

    @bindings.add("enter")
    def _(event: KeyPressEvent) -> None:
        buffer = event.current_buffer
        if is_complete(buffer.text):
            buffer.validate_and_handle()
        else:
            buffer.cursor_position = len(buffer.text)
            buffer.insert_text("\n")

    @bindings.add("escape", "enter")
    def _(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    @bindings.add("c-c")
    def _(event: KeyPressEvent) -> None:
        if event.current_buffer.text:
            event.current_buffer.reset()
        else:
            event.app.exit(exception=KeyboardInterrupt())

    return bindings


class ChatCompleter(Completer):
    """Completes commands, and their arguments: names, values and paths."""

    def __init__(self) -> None:
        self._paths = PathCompleter(expanduser=True)

    def get_completions(
        self, document: Document, complete_event: CompleteEvent
    ) -> Iterable[Completion]:
        text = document.text_before_cursor
        if not text.startswith("/") or "\n" in text:
            return
        command, space, rest = text.partition(" ")
        if not space:
            names = [f"/{name}" for name in (*COMMANDS, *LEAVING[1:])]
            yield from _matching(names, command, lambda name: _help_of(name[1:]))
        elif command in ("/read", "/save", "/load"):
            yield from self._paths.get_completions(Document(rest.lstrip()), complete_event)
        elif command == "/set":
            name, space, value = rest.partition(" ")
            if not space:
                yield from _matching(SETTINGS, name, lambda name: SETTINGS[name].help)
            elif name in SETTINGS:
                yield from _matching(SETTINGS[name].values, value.lstrip())
        elif command == "/method":
            yield from self._complete_method(rest)

    def _complete_method(self, rest: str) -> Iterable[Completion]:
        name, *pairs = rest.split(" ")
        if not pairs:
            yield from _matching(METHODS, name, lambda name: method_class(name).description)
        elif name in METHODS:
            options = options_of(method_class(name))
            key, equals, value = pairs[-1].partition("=")
            if not equals:
                keys = [f"{key}=" for key in options]
                yield from _matching(keys, key, lambda key: options[key[:-1]].metadata["help"])
            elif key in options:
                yield from _matching([*map(str, allowed_values(options[key]).choices)], value)


def _help_of(name: str) -> str:
    return COMMANDS[name].help if name in COMMANDS else ""


def _matching(
    words: Iterable[str], start: str, help: Callable[[str], str] = lambda word: ""
) -> Iterator[Completion]:
    """Yields completions for those of ``words`` that begin with ``start``."""
    for word in words:
        if word.startswith(start):
            yield Completion(word, -len(start), display_meta=help(word))


class _SharedHistory(FileHistory):
    """A history on disk that leaves out long entries."""

    def __init__(self, path: Path, pastes: Pastes) -> None:
        super().__init__(str(path))
        self._pastes = pastes

    def append_string(self, string: str) -> None:
        string = self._pastes.put_in(string)
        if len(string) <= MOST_REMEMBERED:
            super().append_string(string)

    def store_string(self, string: str) -> None:
        entry = "".join(f"+{line}\n" for line in string.split("\n"))
        entry = f"\n# {datetime.now()}\n{entry}".encode(errors="replace").decode()
        path = os.fsdecode(self.filename)
        with contextlib.suppress(SparseKVError), AppendedFile(path, 0o600) as file:
            file.write(entry)


def history_file() -> Path | None:
    """Returns the path of the history; None without a home folder."""
    state = os.environ.get("XDG_STATE_HOME", "")
    try:
        home = Path(state) if os.path.isabs(state) else Path.home() / ".local" / "state"
    except RuntimeError:
        return None
    return home / "sparsekv-cli" / "chat_history"


def open_history(pastes: Pastes) -> History:
    """Returns the history on disk, with entries of all processes.

    If its file cannot be written, the history is in memory only.
    """
    path = history_file()
    if path is None:
        return InMemoryHistory()
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        open_written(path, APPENDED).close()
        if path.stat().st_size > MOST_HISTORY:
            _cut(path)
        _drop_half(path)
    except OSError as error:
        say(f"warning: the history is not kept: {path}: {error.strerror}")
        return InMemoryHistory()
    return _SharedHistory(path, pastes)


def _drop_half(path: Path) -> None:
    """Removes an incomplete entry at the end of the file."""
    data = path.read_bytes()
    if data and not data.endswith(b"\n"):
        os.truncate(path, data.rfind(b"\n# ") if b"\n# " in data else 0)


def _cut(path: Path) -> None:
    """Removes about the older half of the history. The rest begins with a whole entry."""
    data = path.read_bytes()[-MOST_HISTORY // 2 :]
    start = data.find(b"\n\n# ") + 1  # an entry is an empty line, its time after #, and its text
    replace_file(path, data[start:])
