"""What reaches a terminal: control characters are seen, not obeyed, and words stay whole."""

import ast
import io
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from sparsekv_cli.commands.chat.screen import WordWrap
from sparsekv_cli.commands.shared import terminal
from sparsekv_cli.commands.shared.tables import print_table
from sparsekv_cli.commands.shared.terminal import ShownAnswer, one_line, say, write_json, write_text
from sparsekv_cli.errors import SparseKVError

ROOT = Path(__file__).parents[3]
ATTACKS = {
    "\x1b]2;title\x07": r"\x1b]2;title\x07",
    "\x1b[3J": r"\x1b[3J",
    "\x9b3J\x9d": r"\x9b3J\x9d",
    "a\rb\x08\x7f\x0c\x00": r"a\rb\x08\x7f\x0c\x00",
    "\u202egnp.exe\u2066": r"\u202egnp.exe\u2066",
}
PLAIN = "a\tb\nwörter 漢字 👩\u200d💻 \u200f"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(params=[Terminal, io.StringIO])
def streams(request, monkeypatch) -> Callable[[], tuple[io.StringIO, io.StringIO]]:
    """Replaces the streams. Called in the test, because pytest replaces them before it."""
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)

    def replace() -> tuple[io.StringIO, io.StringIO]:
        out, err = request.param(), request.param()
        monkeypatch.setattr("sys.stdout", out)
        monkeypatch.setattr("sys.stderr", err)
        return out, err

    return replace


def as_shown(text: str, stream: io.StringIO) -> str:
    return ATTACKS.get(text, text) if stream.isatty() else text


@pytest.mark.parametrize("text", [*ATTACKS, PLAIN])
@pytest.mark.parametrize("step", [1, 2, 100])
@pytest.mark.parametrize("wraps", [False, True])
def test_an_answer_does_not_command_the_terminal(text, step, wraps, streams):
    out, err = streams()
    if wraps and not out.isatty():
        return  # chat wraps on a terminal only
    shown = ShownAnswer(err, ("<think>", "</think>"), WordWrap(200) if wraps else None)
    pieces = [text[i : i + step] for i in range(0, len(text), step)]
    for piece in pieces:
        shown.think(piece)
    for piece in pieces:
        shown.write(piece)
    shown.end_line()
    expected = as_shown(text, out)
    assert out.getvalue() == expected + "\n" * out.isatty()
    thinking = err.getvalue()
    for style in (terminal.DIM, terminal.PLAIN):
        assert (style in thinking) == err.isatty()
        thinking = thinking.replace(style, "")
    assert expected in thinking


@pytest.mark.parametrize("text", ATTACKS)
def test_remarks_and_tables_do_not_command_the_terminal(text, streams):
    out, err = streams()
    write_text(text)
    assert out.getvalue() == as_shown(text, out)
    say(text)
    assert err.getvalue() == as_shown(text, err) + "\n"
    print_table(text, (), [(text, text)])
    write_json({"name": text})
    shown = out.getvalue().removeprefix(as_shown(text, out))
    shown = re.sub(r"\x1b\[\d*m", "", shown)  # the table's own colours
    for control in filter(lambda c: not c.isprintable(), text):
        assert control not in shown and control not in one_line(text)


def test_passwords_are_not_said(streams, monkeypatch):
    _, err = streams()
    monkeypatch.setenv("HF_TOKEN", "hf_abcdef")
    for url in ("https://me:p%40ss@host/x", "http://me:pa/ss@host/x", "https://pass@host"):
        say(f"cannot reach {url}: no (hf_abcdef)")
        assert str(SparseKVError(url)) == url[: url.index("//") + 2] + "***" + url[url.index("@") :]
    said = err.getvalue()
    assert "ss" not in said and "abcdef" not in said and said.count("***@host") == 3
    for url in ("https://host/a/b@c", "https://host:80/x?y=a@b", "git@host:me/x"):
        assert url in str(SparseKVError(url)) or ":80" in url


def test_a_remark_breaks_between_words(streams, monkeypatch):
    _, err = streams()
    monkeypatch.setattr(os, "get_terminal_size", lambda number: os.terminal_size((40, 24)))
    monkeypatch.setattr(err, "fileno", lambda: 2)
    line = (
        "warning: the machine is busy and " + "long" * 12 + " speeds are lower than on a quiet one"
    )
    say(f"{line}\n  short")
    lines = err.getvalue().splitlines()
    if not err.isatty():
        assert lines == [line, "  short"]
        return
    assert lines.pop() == "  short" and " ".join(lines).split() == line.split()
    assert all(len(each) <= 40 or "longlong" in each for each in lines)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("prefill 1 tokens, 60.6 t/s | decode 1 tokens, 2.0 t/s", "prefill 1 token, 60.6 t/s | "
         "decode 1 token, 2.0 t/s"),
        ("1 messages are saved, 11 tokens", "1 message is saved, 11 tokens"),
        ("0.1 tokens, 21 rows, v1 tokens", "0.1 tokens, 21 rows, v1 tokens"),
        ("1 tokens in the cache and 1 new ones", "1 token in the cache and 1 new one"),
    ],
)  # fmt: skip
def test_one_is_no_plural(text, shown, streams):
    _, err = streams()
    say(text)
    assert err.getvalue() == shown + "\n"


def test_the_answer_ends_a_line_where_a_remark_follows_in_the_same_file(tmp_path):
    program = (
        "import sys; from sparsekv_cli.commands.shared.terminal import ShownAnswer, say\n"
        "shown = ShownAnswer(sys.stderr); shown.write('word'); shown.end_line(); say('decode')"
    )
    command = [sys.executable, "-c", program]
    both = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=240)
    assert both.stdout == b"word\ndecode\n"
    apart = subprocess.run(command, capture_output=True, timeout=240)
    assert (apart.stdout, apart.stderr) == (b"word", b"decode\n")


def test_one_module_writes_to_the_streams():
    """Whatever else writes there passes text that nobody has looked at."""
    writers = {"echo", "secho", "print", "print_exc", "write"}
    folder = ROOT / "sparsekv_cli"
    for path in [folder / "cli.py", *(folder / "commands").rglob("*.py")]:
        if path == Path(terminal.__file__).resolve() or path.name == "terminal.py":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            called = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
            owner, _, name = called.rpartition(".")
            is_ours = (owner or name) in ("print", "click", "traceback", "sys.stdout", "sys.stderr")
            assert not (name in writers and is_ours), f"{path}: {called}"
