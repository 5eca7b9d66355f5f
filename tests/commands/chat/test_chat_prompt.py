"""The line that is edited at a terminal: several lines, pastes, completion, history, keys."""

import os
import stat
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prompt_toolkit.application import create_app_session
from prompt_toolkit.completion import CompleteEvent
from prompt_toolkit.document import Document
from prompt_toolkit.input import create_pipe_input
from prompt_toolkit.output import DummyOutput

from sparsekv_cli.cache.counters import Timings
from sparsekv_cli.commands.chat.prompt import (
    MOST_HISTORY,
    MOST_REMEMBERED,
    ChatCompleter,
    Pastes,
    entries,
    history_file,
    is_complete,
    message_of,
    open_history,
    toolbar,
)

PASTE, END = "\x1b[200~", "\x1b[201~"


@pytest.fixture
def chat() -> Any:
    """What the prompt asks of a chat."""
    sequence = SimpleNamespace(n_ctx=8192, sparse_from=0, timings=Timings())
    model = SimpleNamespace(gguf=SimpleNamespace(path=Path("m/tiny.gguf")))
    conversation = SimpleNamespace(n_used=1234, sequence=sequence, model=model)
    return SimpleNamespace(conversation=conversation, method="lfps", read=[], draft="")


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    return tmp_path


@pytest.fixture
def type_in(chat: Any) -> Iterator[Callable[[str], list[str]]]:
    """What the entries are when keys are pressed, until Ctrl-D."""

    def read(keys: str) -> list[str]:
        with create_pipe_input() as pipe, create_app_session(input=pipe, output=DummyOutput()):
            sending = threading.Thread(target=pipe.send_text, args=[keys + "\x04"], daemon=True)
            sending.start()  # a pipe holds less than a paste
            return list(entries(chat))

    yield read


@pytest.mark.parametrize(
    ("text", "complete", "message"),
    [
        ("Hi", True, "Hi"),
        ("one\\", False, ""),
        ("one\\\ntwo", True, "one\ntwo"),
        ('"""', False, ""),
        ('"""\none\\\n', False, ""),
        ('"""\none\\\n\n two\n"""', True, "one\\\n\n two"),
        ('"""one"""', True, "one"),
        ('""""""', True, ""),
    ],
)
def test_several_lines(text, complete, message):
    assert is_complete(text) == complete
    assert not complete or message_of(text) == message


def test_what_is_typed(type_in):
    assert type_in('Hi\rone\\\rtwo\r"""a\r\rb"""\r') == ["Hi", "one\ntwo", "a\n\nb"]
    assert type_in("one\x1b\rtwo\r") == ["one\ntwo"]


def test_a_paste(type_in, state):
    """It is one message whatever lines it has, and too long to be remembered on disk."""
    text = "".join(f"line {i} of a long document\n" for i in range(4000))
    assert len(text) > 100_000 and len(text) > MOST_REMEMBERED
    short = "a\r\nb"
    keys = f"{PASTE}{text}{END}Why?\r{PASTE}{short}{END}\r"
    assert type_in(keys) == [text + "Why?", "a\nb"]
    assert list(open_history(Pastes()).load_history_strings()) == ["a\nb"]


def test_ctrl_c_clears_the_line_and_leaves_an_empty_one(type_in):
    assert type_in("no\x03yes\r") == ["yes"]
    with pytest.raises(KeyboardInterrupt):
        type_in("\x03")


def test_a_draft_is_edited(type_in, chat):
    chat.draft = "taken back"
    assert type_in("!\rnew\r") == ["taken back!", "new"]


def test_the_history_outlives_the_process(type_in):
    type_in("first\rsecond\\\rline\r")
    file = history_file()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert list(open_history(Pastes()).load_history_strings()) == ["second\\\nline", "first"]


def test_a_long_history_loses_its_older_half():
    history = open_history(Pastes())
    for i in range(120):
        history.store_string(f"{i} " + "x" * 10_000)  # type: ignore[attr-defined]
    kept = list(open_history(Pastes()).load_history_strings())
    assert history_file().stat().st_size <= MOST_HISTORY // 2
    assert stat.S_IMODE(history_file().stat().st_mode) == 0o600
    assert [text.split()[0] for text in kept] == [str(i) for i in range(119, 119 - len(kept), -1)]
    assert 30 < len(kept) < 60


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_history_that_cannot_be_kept(state, capsys):
    state.chmod(0o500)
    assert list(open_history(Pastes()).load_history_strings()) == []
    assert "history is not kept" in capsys.readouterr().err


def test_a_folder_in_place_of_the_history(capsys):
    history_file().mkdir(parents=True)
    open_history(Pastes()).append_string("x")
    assert "history is not kept" in capsys.readouterr().err


def completions(text: str) -> list[str]:
    found = ChatCompleter().get_completions(Document(text), CompleteEvent())
    return [text[: len(text) + each.start_position] + each.text for each in found]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("/s", ["/system", "/set", "/save", "/stats"]),
        ("/method q", ["/method quest"]),
        ("/method quest pa", ["/method quest page="]),
        ("/method quest cache_type_k=q8", ["/method quest cache_type_k=q8_0"]),
        ("/method quest page=16 bu", ["/method quest page=16 budget="]),
        ("/set thi", ["/set think", "/set think_budget"]),
        ("/set think o", ["/set think on", "/set think off"]),
        ("/nothing x", []),
        ("Hi /s", []),
    ],
)
def test_completion(text, expected):
    assert completions(text) == expected


def test_completion_of_paths(tmp_path, monkeypatch):
    (tmp_path / "my notes.txt").touch()
    monkeypatch.chdir(tmp_path)
    for command in ("/read", "/save", "/load"):
        assert completions(f"{command} my") == [f"{command} my notes.txt"]
        assert completions(f"{command} {tmp_path}/m") == [f"{command} {tmp_path}/my notes.txt"]


@pytest.mark.parametrize(
    ("width", "text"),
    [
        (80, "1234 of 8192 tokens | lfps | tiny | files read: 1 | /help"),
        (30, "1234 of 8192 tokens | lfps"),
        (10, "1234 of 81"),
    ],
)
def test_the_toolbar_fits(chat, width, text):
    chat.read = ["x"]
    ((_, shown),) = toolbar(chat, width)
    assert shown == text


def test_the_toolbar_tells_the_last_answer(chat):
    sequence = chat.conversation.sequence
    sequence.sparse_from = 4096
    sequence.timings = Timings(decode_tokens=8, decode_s=0.5, cached_tokens=100)
    ((_, shown),) = toolbar(chat, 200)
    told = "lfps, dense below 4,096 tokens | 16.0 t/s | 100 from the prefix cache | tiny"
    assert shown == f"1234 of 8192 tokens | {told} | /help"
    chat.conversation.n_used = 5000
    assert "dense" not in toolbar(chat, 200)[0][1]
