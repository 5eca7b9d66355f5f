"""Reads calls between marks in the text of an answer, and calls whose marks are missing."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from sparsekv_cli.models.chat.calls import MAYBE, Part, ReadCalls, Text, json_calls
from sparsekv_cli.models.chat.thinking import overlap
from sparsekv_cli.models.tokenizer.marks import Marks, plain

MAX_PASSED = 256  # marks within arguments of an answer; later marks end a call in any place
Functions = Mapping[str, Any]  # the schemas of the functions' arguments, by name


class MarkedReader:
    """Calls between two markers, among texts or alone. A marker within an argument belongs to it.

    parse: reads the text between the marks. begins: how that text begins. ends: tokens that end an
    answer.
    """

    def __init__(
        self,
        marks: Marks,
        start: str,
        end: str,
        parse: Callable[[str], ReadCalls],
        begins: str,
        ends: tuple[str, ...] = (),
    ) -> None:
        self._start, self._end, self._parse = marks[start], marks[end], parse
        self._ends = Ends(marks, ends)
        self._begins = re.compile(begins)
        self._held, self._is_call = "", False
        self._has_called, self._blank = False, ""  # white space after a call
        self._seen = 0  # the held text up to here has no mark that ends the call
        self._n_passed = 0  # marks of this answer that were no marks

    def push(self, text: str) -> Iterator[Part]:
        self._held += text
        while True:
            if self._is_call:
                at = self._end_of_call()
                if at is None:
                    return
                yield from self._called(at)
            else:
                before, found, after = self._held.partition(self._start)
                if not found:
                    break
                self._held, self._is_call, self._seen = after, True, 0
                yield from self._said(before)
        n = len(self._held) - max(overlap(self._held, self._start), self._ends.n_at_end(self._held))
        said, self._held = self._held[:n], self._held[n:]
        yield from self._said(said)

    def flush(self) -> Iterator[Part]:
        self._held = self._ends.without(self._held)
        while self._is_call:
            at = self._held.find(self._end)
            is_read = at < 0 or self._n_passed < MAX_PASSED
            found = self._parse(self._held) if is_read else ReadCalls([])
            self._n_passed += 1
            if at < 0 or (found.calls and not found.doubt):  # models may leave the last mark out
                is_whole = found.calls and found.doubt < MAYBE
                yield from found.calls if is_whole else [Text(self._start + self._held)]
                self._held, self._is_call = "", False
            else:
                yield from self._called(at)
                yield from self.push("")
        held, self._held = self._held, ""
        if held.strip():
            yield from self._said(held)

    def _end_of_call(self) -> int | None:
        """Returns the place of the mark that ends the call. None: more text must arrive first."""
        first = self._held.find(self._end)
        while (at := self._held.find(self._end, self._seen)) >= 0:
            body, after = self._held[:at], self._held[at + len(self._end) :].lstrip()
            if self._begins.match(body) is None or self._n_passed >= MAX_PASSED:
                return first
            calls, doubt = self._parse(body)
            if not doubt:
                return at if calls else first
            if calls and after.startswith(self._start):
                return at
            if calls and self._start.startswith(after):
                return None
            self._seen, self._n_passed = at + 1, self._n_passed + 1
        return None

    def _said(self, text: str) -> Iterator[Part]:
        if self._has_called:
            self._blank, text = self._blank + text, ""
            if self._blank.strip():
                self._has_called, text = False, self._blank
        if text:
            yield Text(text)

    def _called(self, at: int) -> Iterator[Part]:
        """Yields the call, or the text, that ends with the marker at that place."""
        body, self._held = self._held[:at], self._held[at + len(self._end) :]
        self._is_call = False
        calls = self._parse(body).calls
        self._has_called, self._blank = self._has_called or bool(calls), ""
        yield from calls or [Text(f"{self._start}{body}{self._end}")]


class BareReader:
    """Reads as another reader does, and also reads an answer that is a call without marks.

    Such an answer is a JSON object that begins with a function's name, maybe in a block of code.
    Small models leave the marks out.
    """

    FENCE, HEAD = "```json", 400  # HEAD: characters that show whether it is such an answer

    def __init__(self, reader: MarkedReader, functions: Functions) -> None:
        self._reader, self._functions = reader, functions
        self._starts = [f'{{"name":{json.dumps(name)}' for name in functions]
        self._held, self._may_be = "", bool(functions)

    def push(self, text: str) -> Iterator[Part]:
        if self._may_be:
            self._held += text
            begun = "".join(self._held[: self.HEAD].split())
            if self.FENCE.startswith(begun):
                return
            begun = begun.removeprefix(self.FENCE).removeprefix("```")
            if any(begun.startswith(start) or start.startswith(begun) for start in self._starts):
                return
            text, self._held, self._may_be = self._held, "", False
        yield from self._reader.push(text)

    def flush(self) -> Iterator[Part]:
        held, self._held = self._held, ""
        body = held.strip().removeprefix(self.FENCE).removeprefix("```").removesuffix("```")
        calls = json_calls(plain(body)) if held else []
        if calls and all(getattr(call, "name", "") in self._functions for call in calls):
            yield from calls
            return
        yield from self._reader.push(held)
        yield from self._reader.flush()


class Ends:
    """The tokens that end an answer. They are spelled only if the vocabulary is not known."""

    def __init__(self, marks: Marks, spellings: tuple[str, ...]) -> None:
        self._spellings = spellings if marks.ids is None else ()

    def without(self, text: str) -> str:
        """Returns a whole answer without them."""
        while ended := next((end for end in self._spellings if text.endswith(end)), ""):
            text = text.removesuffix(ended)
        return text

    def n_at_end(self, text: str) -> int:
        """Returns the length of the end of a text that may belong to them."""
        n_part = max((overlap(text, end) for end in self._spellings), default=0)
        return len(text) - len(self.without(text[: len(text) - n_part]))
