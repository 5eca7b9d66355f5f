"""Why most of a prompt is computed again: where it leaves a kept prompt, and the likely cause.

A line that changes near the top of a prompt costs all rows after it. The place is told if a part of
the kept prompt's further text is in the new prompt too.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from sparsekv_cli.models.tokenizer.ids import n_common

CHARACTERS = 20  # that are shown on each side
WINDOW = 48  # tokens on each side that are read for that
RUN = 8  # tokens; runs of so many tokens are looked for in the new prompt
LEAST_AGAIN = 64  # tokens; the least that are computed again and were known
COMPARED_TOKENS = 16384  # tokens behind the place that are compared
MOST_CONTROLS = 8  # control tokens ahead of the place that may begin a message

CLOCK, NUMBER = "a clock", "a number that changes"
SYSTEM, TOOLS, MESSAGE = "the system prompt", "the tools", "an earlier message"
TEMPLATE, TEXT = "the template", "the text"
CAUSES = (CLOCK, NUMBER, SYSTEM, TOOLS, MESSAGE, TEMPLATE, TEXT)

TIME = re.compile(
    r"\d{1,2}:\d\d(?::\d\d)?|\d{4}-\d\d?-\d\d?|\d{1,2}[./]\d{1,2}[./]\d{2,4}|\b1[5-9]\d{8}(?:\d{3})?\b"
    r"|\b(?:mon|tues?|wed(?:nes)?|thu(?:rs)?|fri|sat(?:ur)?|sun)(?:day)?\b"
    r"|\b(?:jan|feb|mar|apr|may|june?|july?|aug|sept?|oct|nov|dec)[a-z]*\.? \d{1,4}(?:, \d{4})?\b"
    r"|\b\d{1,2}\.? (?:jan|feb|mar|apr|may|june?|july?|aug|sept?|oct|nov|dec)[a-z]*\b",
    re.IGNORECASE,
)
ROLE = re.compile(r"\s*(system|developer|user|assistant|tool|model|ipython|human)\b", re.IGNORECASE)
OF_TOOLS = re.compile(r'<tools?>|"(?:function|parameters|input_schema|inputSchema)"')


class Difference(NamedTuple):
    """Where a prompt leaves a kept one.

    at: position of the first token that differs. n_again: the number of later tokens, at least,
    that both prompts have. kept, now: tokens of both prompts from there on, at most WINDOW.
    """

    at: int
    n_again: int
    kept: tuple[int, ...]
    now: tuple[int, ...]


class Names(Protocol):
    """The part of a tokenizer that this module needs."""

    def decode(self, ids: Sequence[int]) -> str: ...

    def is_control(self, token_id: int) -> bool: ...


class Explained(NamedTuple):
    """A difference in words.

    token: its position. n_again: as Difference has it. before: characters up to the place. kept,
    now: characters from there on of the kept prompt and of this one. cause: one of CAUSES.
    """

    token: int
    n_again: int
    before: str
    kept: str
    now: str
    cause: str

    def short(self) -> str:
        """Returns a line for a log, which has no text of prompts."""
        where = f"{self.n_again} known tokens are computed again behind token {self.token}"
        return f"{where}; the cause seems to be {self.cause}"

    def line(self) -> str:
        """Returns a line for the person whose prompts both are."""
        return f"{self.short()}: {self.before!r} had {self.kept!r} behind it, now {self.now!r}"

    def fields(self) -> dict[str, object]:
        """Returns the part for a client: without the kept prompt, which may be another client's."""
        return {name: value for name, value in self._asdict().items() if name != "kept"}


def difference(kept: Sequence[int], ids: Sequence[int]) -> Difference | None:
    """Returns where ``ids`` leave a kept prompt; None if few tokens are computed again for it."""
    at = n_common(kept, ids)
    if min(len(kept), len(ids)) - at < LEAST_AGAIN:
        return None
    rest, now = kept[at : at + COMPARED_TOKENS], ids[at : at + COMPARED_TOKENS]
    runs = {tuple(now[i : i + RUN]) for i in range(len(now) - RUN + 1)}
    n_again = RUN * sum(tuple(rest[i : i + RUN]) in runs for i in range(0, len(rest), RUN))
    if n_again < max(LEAST_AGAIN, len(rest) // 4):
        return None
    return Difference(at, n_again, tuple(rest[:WINDOW]), tuple(now[:WINDOW]))


def explain(found: Difference, ids: Sequence[int], names: Names) -> Explained:
    """Returns a difference of the prompt ``ids`` in words."""
    before = names.decode(ids[max(0, found.at - WINDOW) : found.at])
    kept, now = names.decode(found.kept), names.decode(found.now)
    n = n_common(kept, now)
    before, kept, now = before + now[:n], kept[n:], now[n:]
    cause = _value(before, kept, now) or _place(ids[: found.at], found, names)
    shown = before[-CHARACTERS:], kept[:CHARACTERS], now[:CHARACTERS]
    return Explained(found.at, found.n_again, *shown, cause)


def _value(before: str, kept: str, now: str) -> str | None:
    """Returns the kind of value that differs; None if it is a text."""
    lines = [before.rpartition("\n")[2] + text.partition("\n")[0] for text in (kept, now)]
    at = len(before.rpartition("\n")[2])
    if all(_covers(TIME, line, at) for line in lines):
        return CLOCK
    return NUMBER if all(re.search(r"\d", _word(line, at)) for line in lines) else None


def _covers(pattern: re.Pattern[str], line: str, at: int) -> bool:
    return any(match.start() <= at <= match.end() for match in pattern.finditer(line))


def _word(line: str, at: int) -> str:
    """Returns the word of a line that a place lies in."""
    head, tail = re.search(r"[\w-]*$", line[:at]), re.match(r"[\w-]*", line[at:])
    assert head is not None and tail is not None
    return head[0] + tail[0]


def _place(before: Sequence[int], found: Difference, names: Names) -> str:
    """Returns the part of a conversation that a difference lies in, by its control tokens."""
    controls = [i for i, token in enumerate(before) if names.is_control(token)]
    sides = found.kept, found.now
    is_role = controls[-1:] == [len(before) - 1] and all(ROLE.match(names.decode(x)) for x in sides)
    if is_role or any(names.is_control(side[0]) for side in sides):
        return TEMPLATE if controls else TEXT
    for last in reversed(controls[-MOST_CONTROLS:]):
        role = ROLE.match(names.decode(before[last + 1 :][:WINDOW]))
        if role is not None and role[1].lower() not in ("system", "developer"):
            return MESSAGE
        if role is not None:
            return TOOLS if OF_TOOLS.search(names.decode(before[last + 1 :])) else SYSTEM
    return TEXT
