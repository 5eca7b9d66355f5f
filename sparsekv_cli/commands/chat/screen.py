"""The terminal while an answer is written: words are wrapped, and typed keys are hidden."""

import contextlib
import os
import sys
import termios
from collections.abc import Iterator

LEAST_COLUMNS = 10  # on a narrower terminal nothing is wrapped
TAB = 8


class WordWrap:
    """Wraps text that arrives in pieces: a word that reaches the edge moves to the next line.

    The last column stays empty, so that the cursor is always at the end of the text.
    """

    def __init__(self, n_columns: int) -> None:
        self._edge = n_columns - 1
        self._column = 0
        self._word = ""  # the part of the current word that is on the screen
        self._word_columns = 0

    def __call__(self, text: str) -> str:
        """Returns what to write for the next piece ``text``."""
        from prompt_toolkit.utils import get_cwidth

        return "".join(self._put(each, get_cwidth(each)) for each in text)

    def _put(self, character: str, width: int) -> str:
        if character.isspace():
            self._word, self._word_columns = "", 0
            if character in "\r\n":
                self._column = 0
            elif character == "\t":
                self._column += TAB - self._column % TAB
            elif self._column >= self._edge:
                return ""  # the line breaks here
            else:
                self._column += 1
            return character
        if width > 1:  # texts with wide characters may break anywhere
            self._word, self._word_columns = "", 0
        moved = ""
        if self._column + width > self._edge:
            back = self._word_columns if self._word_columns < self._column else 0
            moved = f"\x1b[{back}D\x1b[K\n{self._word}" if back else "\n"
            self._column = back
            if not back:
                self._word, self._word_columns = "", 0
        self._column += width
        self._word += character
        self._word_columns += width
        return moved + character


def word_wrap() -> WordWrap | None:
    """Returns the wrap for the terminal on stdout; None if stdout is no terminal that can erase."""
    if not sys.stdout.isatty() or os.environ.get("TERM", "dumb") == "dumb":
        return None
    try:
        n_columns = os.get_terminal_size(sys.stdout.fileno()).columns
    except (OSError, ValueError):
        return None
    return WordWrap(n_columns) if n_columns >= LEAST_COLUMNS else None


@contextlib.contextmanager
def no_echo() -> Iterator[None]:
    """Hides keys that the user types during the block, ``^C`` too."""
    if not sys.stdin.isatty():
        yield
        return
    try:
        terminal = sys.stdin.fileno()
        before = termios.tcgetattr(terminal)
    except (OSError, ValueError, termios.error):  # the terminal has no settings
        yield
        return
    silent = [*before]
    silent[3] &= ~termios.ECHO
    termios.tcsetattr(terminal, termios.TCSANOW, silent)
    try:
        yield
    finally:
        termios.tcsetattr(terminal, termios.TCSANOW, before)
