"""Ctrl-C at a chosen line of the program: which lines a call runs, and a stop at one of them."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

from source_tree import FOLDERS, root


class Place(NamedTuple):
    """A line of the program, when it runs for the nth time."""

    file: str
    line: int
    nth: int

    def __str__(self) -> str:
        return f"{Path(self.file).relative_to(root())}:{self.line} ({self.nth})"


class _Lines:
    """A trace function that counts the lines of some files, and raises at a place."""

    def __init__(self, files: frozenset[str], stop: Place | None) -> None:
        self.counts: Counter[tuple[str, int]] = Counter()
        self._files, self._stop = files, stop

    def __call__(self, frame: FrameType, event: str, _: Any) -> Any:
        if frame.f_code.co_filename not in self._files:
            return None
        if event == "line":
            at = frame.f_code.co_filename, frame.f_lineno
            self.counts[at] += 1
            if self._stop is not None and (*at, self.counts[at]) == self._stop:
                raise KeyboardInterrupt
        return self


def files_of(*folders: str) -> frozenset[str]:
    """The program's Python files in folders or files, such as cache or engine.py."""
    found: set[str] = set()
    for name in folders:
        first, _, rest = name.partition("/")
        top = root() / FOLDERS.get(f"sparsekv_cli.{first}", f"sparsekv_cli/{first}") / rest
        found |= {str(top)} if top.is_file() else {str(path) for path in top.rglob("*.py")}
    return frozenset(found)


def _traced(call: Callable[[], Any], lines: _Lines) -> None:
    before = sys.gettrace()
    sys.settrace(lines)
    try:
        call()
    finally:
        sys.settrace(before)


def places_of(call: Callable[[], Any], files: Iterable[str]) -> list[Place]:
    """The lines that a call runs: each at its first time and, if it comes again, at its last."""
    lines = _Lines(frozenset(files), None)
    _traced(call, lines)
    found = [Place(*at, nth) for at, n in lines.counts.items() for nth in sorted({1, n})]
    assert found
    return found


def stopped_at(place: Place, call: Callable[[], Any], files: Iterable[str]) -> bool:
    """Runs a call that is stopped at a place. Returns whether it came there."""
    try:
        _traced(call, _Lines(frozenset(files), place))
    except KeyboardInterrupt:
        return True
    return False
