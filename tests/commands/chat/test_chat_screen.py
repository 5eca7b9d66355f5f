"""The terminal while an answer is written: words wrap, and nothing that is typed is echoed."""

import os
import pty
import random
import re
import termios
from typing import Any

import pytest

from sparsekv_cli.commands.chat.screen import WordWrap, no_echo, word_wrap


def screen(written: str) -> list[str]:
    """The lines that a terminal shows; it knows the two sequences of WordWrap."""
    lines = [""]
    for piece in re.findall(r"\x1b\[\d*[DK]|[^\x1b]", written):
        if piece == "\n":
            lines.append("")
        elif piece.endswith("D") and len(piece) > 1:
            lines[-1] = lines[-1][: -int(piece[2:-1])]
        elif piece != "\x1b[K":
            lines[-1] += piece
    return lines


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("one two three", ["one two", "three"]),
        ("one two th", ["one two", "th"]),
        ("one twotwo x", ["one", "twotwo x"]),
        ("abcdefghijklm", ["abcdefghi", "jklm"]),
        ("a abcdefghijklm", ["a ", "abcdefghi", "jklm"]),
        ("123456789 x", ["123456789", "x"]),
        ("a\n\nb", ["a", "", "b"]),
        ("\u6c34" * 5, ["\u6c34" * 4, "\u6c34"]),
        ("", [""]),
    ],
)
@pytest.mark.parametrize("size", [1, 3, 100])
def test_words_wrap(text, lines, size):
    wrap = WordWrap(10)
    written = "".join(wrap(text[i : i + size]) for i in range(0, len(text), size))
    assert [line.rstrip() for line in screen(written)] == [line.rstrip() for line in lines]


def test_any_text_keeps_its_words():
    draw = random.Random(0)
    text = "".join(draw.choice("abcde  \n") for _ in range(5000))
    lines = screen(WordWrap(12)(text))
    assert max(map(len, lines)) == 11
    assert "".join("".join(lines).split()) == "".join(text.split())
    words = {word for word in text.split() if len(word) < 12}
    assert words <= set(" ".join(lines).split())


def test_no_terminal_is_not_wrapped():
    assert word_wrap() is None


def test_nothing_is_echoed(monkeypatch):
    terminal, end = pty.openpty()
    with os.fdopen(end, "rb+", buffering=0) as stream:
        monkeypatch.setattr("sys.stdin", stream)

        def echoes() -> Any:
            return termios.tcgetattr(end)[3] & termios.ECHO

        assert echoes()
        with pytest.raises(KeyboardInterrupt), no_echo():
            assert not echoes()
            raise KeyboardInterrupt
        assert echoes()
    os.close(terminal)
