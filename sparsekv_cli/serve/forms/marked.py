"""Reads calls in the text of an answer: between marks, in blocks of code, or bare."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from sparsekv_cli.models.chat.calls import (
    ARGUMENTS,
    FENCE,
    NAMES,
    Notation,
    Part,
    Text,
    ToolCall,
    past,
    read_call,
)
from sparsekv_cli.models.chat.loose import CutError
from sparsekv_cli.models.chat.tags import read_tagged
from sparsekv_cli.models.chat.thinking import overlap
from sparsekv_cli.models.tokenizer.marks import Marks

Functions = Mapping[str, Any]  # the schemas of the functions' arguments, by name
WRAPPERS = ("tools", "tool", "function_call", "tool_calls", "response", "json", "xml")
# What may begin a call without a mark: a line with an object or a block of code, or a tag.
BARE = (
    rf"(?<=\n)[ \t]*(?:<(?:{'|'.join(WRAPPERS)})>(?=\s|[{{\[])|```|[{{\[])"
    r"|(?<![`\"'\w])(?:<function(?=[=\s])|call:|functools(?=\[))"
)
LITERALS = ("<function=", "call:", "functools[")
LINE_BEGINS = re.compile(r"(?<=\n)[ \t]*(?:`{0,2}|<\w{0,20}>?)\Z")
NAME_BEGINS = re.compile(r"(?<=\n)[ \t]*(?:`{0,2}|<\w{0,20}>?|[\w.-]{1,64}(?:\[[A-Z]{0,4})?)\Z")
WRAPPER = re.compile(rf"\s*<(?:{'|'.join(WRAPPERS)})>\s*")
CLOSERS = re.compile(rf"[\s}}\])]*(?:```)?\s*(?:</(?:function|{'|'.join(WRAPPERS)})>\s*)?(?:```)?")
BETWEEN = re.compile(r"[\s,;]*")
OPEN_END = re.compile(r"(?:(?<!`)`{1,2}|</?[\w=]*)\Z")
MAY_END = re.compile("[})>`\ud800-\udfff]")  # characters of which one ends a call
HEAD = 64  # characters of a call that are read at once; they may show that it is none
N_READS, GROWTH = 32, 1.25  # later the text must grow by so much before it is read again
CONTEXT = 40  # characters of the text before a call
DESCRIBED = re.compile(r"arguments|parameters|<function|call:", re.I)


class MarkedReader:
    """Reads calls between marks, and calls of known functions whose marks are missing.

    A mark within an argument belongs to it. A text that cannot mean a call stays text.
    """

    def __init__(
        self,
        marks: Marks,
        functions: Functions,
        starts: tuple[str, ...],
        ends: tuple[str, ...] = (),
        *,
        last: tuple[str, ...] = (),
        quote: str = "",
        words: str = "",
        within: tuple[str, ...] = (),
        begins: bool = False,
    ) -> None:
        """starts, ends: the marks around calls. last: tokens that end an answer. quote, words: see
        Notation. within: marks within a call; a function's name before the first one is a call.
        begins: an object at the beginning of an answer is a call of any function.
        """
        self._starts, self._ends = tuple(marks[x] for x in starts), tuple(marks[x] for x in ends)
        self._spelled = tuple(x for x in starts if marks[x] != x)  # these spellings are no marks
        self._notation = Notation(self._starts, self._ends, marks[quote], words, functions)
        self._last = Ends(marks, last)
        self._within = tuple(marks[x] for x in within)
        after_name = self._within[0] if within else ""
        bare = [BARE]
        if after_name:
            bare.append(rf"(?<=\n)[ \t]*[\w.-]+(?={re.escape(after_name)})")
        self._lead = re.compile("|".join([*map(re.escape, self._starts), *bare]))
        self._heads = heads_of(functions, after_name)
        self._line_begins = NAME_BEGINS if within else LINE_BEGINS
        self._held, self._context = "", "\n"  # the text that is not told, and the text before it
        self._is_start, self._begins = True, begins
        self._open: tuple[int, int] | None = None  # a call that is not whole yet, as a lead
        self._forget()
        self._has_called, self._blank = False, ""  # white space after a call

    def push(self, text: str) -> Iterator[Part]:
        self._held += text
        yield from self._read(is_whole=False)

    def flush(self) -> Iterator[Part]:
        self._held = self._last.without(self._held)
        yield from self._read(is_whole=True)

    def _read(self, *, is_whole: bool) -> Iterator[Part]:
        while (lead := self._open or self._next_lead()) is not None:
            start, length = lead
            yield from self._said(start)
            self._open = (0, length) if len(self._held) > length + HEAD else None
            found = self._section(self._held[:length], is_whole=is_whole)
            if found is None:
                return
            self._open = None
            calls, end = found
            self._forget()
            if calls:
                yield from calls
                self._held, self._context = self._held[end:], "\n"
                self._has_called, self._blank = True, ""
            else:
                self._begins = False
                yield from self._said(length)
        is_open = self._begins and not self._held.strip()
        n_open = 0 if is_whole else len(self._held) if is_open else self._n_open()
        yield from self._said(len(self._held) - n_open)

    def _forget(self) -> None:
        """Begins to read another call."""
        self._n_reads, self._n_read = 0, 0  # how often it was read, and how much of it
        self._n_seen, self._may_end = 0, False  # how much was searched for what may end it

    def _next_lead(self) -> tuple[int, int] | None:
        """Returns the place and the length of what may begin a call. An answer may itself."""
        begun = self._held.lstrip()
        if self._begins and begun.startswith(("{", "[")):
            return len(self._held) - len(begun), 0
        self._begins = self._begins and not begun
        line = self._context[-1] if self._context.rpartition("\n")[2].strip() else "\n"
        line = ">" if line in self._starts else line
        found = self._lead.search(line + self._held)
        return None if found is None else (found.start() - 1, len(found[0]))

    def _n_open(self) -> int:
        """Returns how many characters at the end of the text may begin a mark or a call."""
        begun = self._line_begins.search(self._context + self._held)
        n_line = 0 if begun is None else len(begun[0])
        ends = self._ends if self._has_called else ()
        n_word = max(overlap(self._held, each) for each in (*self._starts, *LITERALS, *ends))
        return min(len(self._held), max(n_line, n_word, self._last.n_at_end(self._held)))

    def _section(self, lead: str, *, is_whole: bool) -> tuple[list[ToolCall], int] | None:
        """Returns the calls at the beginning of the held text, and their end; no calls: it is text.

        None: more text decides.
        """
        text, notation = self._held, self._notation
        if not is_whole and not self._is_due(len(lead)):
            return None
        if not is_whole:
            inner = (*self._starts, *self._ends, *self._within, notation.quote)
            text = text[: len(text) - max(overlap(text, each) for each in inner)]
            text = text[:-HEAD] + OPEN_END.sub("", text[-HEAD:])
        is_marked = not lead or lead in self._starts
        at = len(lead) if is_marked or lead == "functools" else 0
        if wrapper := WRAPPER.match(text, at):
            at = wrapper.end()
        if not is_marked and (self._is_quoted() or not self._may_be_call(text, at)):
            return [], 0
        self._n_reads += len(text) > at + HEAD
        self._n_read, self._may_end = len(text), False
        is_sure = len(lead) == 1 and all(len(mark) == 1 for mark in self._ends)
        try:
            calls, end, closing = self._series(text, at, is_whole=is_whole, is_sure=is_sure)
        except CutError:
            return ([], 0) if is_whole else None
        if not calls or not (lead in self._starts or self._are_known(calls, text[:end])):
            return [], 0
        if not closing and not is_whole:
            return None
        is_object = not is_marked and lead.strip().startswith(("{", "[", "`", "<"))
        is_object = is_object and not lead.startswith("<function")
        if is_object and not self._is_start and closing == "text":
            return [], 0  # an example in a text
        return calls, end

    def _is_due(self, at: int) -> bool:
        """Returns whether the held text may have become a whole call since it was read last."""
        n = len(self._held)
        new, self._n_seen = self._held[self._n_seen :], n
        self._may_end = self._may_end or MAY_END.search(new) is not None
        has_grown = self._n_reads < N_READS or n > GROWTH * self._n_read
        return n <= at + HEAD or (self._may_end and has_grown)

    def _series(
        self, text: str, at: int, *, is_whole: bool, is_sure: bool
    ) -> tuple[list[ToolCall], int, str]:
        """Returns calls that follow each other, their end, and what ends them.

        This is ``mark``, ``text`` or nothing. Raises CutError if more text decides.
        """
        calls: list[ToolCall] = []
        end, is_ended = at, False
        if mark := mark_at(text, past(text, at), self._starts):  # of a list, and of its first call
            at = past(text, at) + len(mark)
        while True:
            try:
                found, end = self._item(text, at, is_whole=is_whole, is_sure=is_sure)
            except CutError:
                if is_whole:
                    return calls, end, "text"
                raise
            except ValueError:
                return calls, end, "text"
            calls += found
            closers = CLOSERS.match(text, end)
            end += 0 if closers is None else len(closers[0].rstrip())
            after = past(text, end)
            while mark := mark_at(text, after, self._ends):
                end = after = after + len(mark)
                is_ended = True
            if is_ended:
                return calls, end, "mark"
            at, is_next = _between(text, after), False
            if mark := mark_at(text, at, self._starts):
                at, is_next = _between(text, at + len(mark)), True
            if at == len(text):
                return calls, end, ""
            if not is_next and text[at] not in "{[<":
                return calls, end, "text"

    def _item(
        self, text: str, at: int, *, is_whole: bool, is_sure: bool
    ) -> tuple[list[ToolCall], int]:
        at = past(text, at)
        if fence := FENCE.match(text, at):
            at = fence.end()
        if text[at : at + len("<function")].lower() == "<function":
            return read_tagged(text, at, self._notation, is_whole=is_whole, is_sure=is_sure)
        return read_call(text, at, self._notation)

    def _are_known(self, calls: list[ToolCall], text: str) -> bool:
        """Returns whether calls without a mark are meant as calls."""
        functions = self._notation.functions
        if self._begins and DESCRIBED.search(text):
            return True
        if not functions:
            return DESCRIBED.search(text) is not None
        return all(known_name(call.name, functions) is not None for call in calls)

    def _is_quoted(self) -> bool:
        """Returns whether the spelling of a mark that is a token stands before the held text."""
        return bool(self._spelled) and self._context.rstrip().endswith(self._spelled)

    def _may_be_call(self, text: str, at: int) -> bool:
        if fence := FENCE.match(text, at):
            at = fence.end()
        begun = "".join(text[at : at + 4 * HEAD].split()).replace("'", '"').lower()
        return any(begun.startswith(head) or head.startswith(begun) for head in self._heads)

    def _said(self, n: int) -> Iterator[Part]:
        text, self._held = self._held[:n], self._held[n:]
        self._context = (self._context + text)[-CONTEXT:]
        self._is_start = self._is_start and not text.strip()
        if self._has_called:
            self._blank, text = self._blank + text, ""
            while mark := mark_at(self._blank.lstrip(), 0, self._ends):  # is there twice
                self._blank = self._blank.lstrip().removeprefix(mark)
            if self._blank.strip():
                self._has_called, text = False, self._blank
        if text:
            yield Text(text)


def heads_of(functions: Functions, after_name: str) -> tuple[str, ...]:
    """Returns how calls without marks begin, without white space and in lower case."""
    keys = [f'{{"{key}":' for key in ("function", "tool_calls", "tool_call", *ARGUMENTS)]
    keys += ['{"type":"function"', '{"id":']
    keys += [f'{{"{key}":"{name}"' for key in NAMES for name in functions]
    keys += [] if functions else [f'{{"{key}":"' for key in NAMES]
    heads = [before + key for key in keys for before in ("", "[", "{")]
    heads += [f"<function{form}{name}" for name in functions for form in ("=", '="', 'name="')]
    heads += [f"call:{name}{{" for name in functions] + [f"[{name}(" for name in functions]
    heads += [f"{name}{after_name}" for name in functions if after_name]
    heads += [] if functions else ["<function", "call:"]
    return tuple(head.lower() for head in heads)


def known_name(name: str, functions: Functions) -> str | None:
    """Returns the function that a model means with a name; None if there is none."""
    if name in functions:
        return name
    alike = [each for each in functions if _simple(each) == _simple(name)]
    last = name.rpartition(".")[2].rpartition(":")[2]
    return alike[0] if len(alike) == 1 else last if last in functions else None


def _simple(name: str) -> str:
    return re.sub(r"[\s._/:-]", "_", name.strip()).lower()


def mark_at(text: str, at: int, marks: tuple[str, ...]) -> str:
    """Returns the mark that begins at a place of a text; empty if there is none."""
    return next((mark for mark in marks if text.startswith(mark, at)), "")


def _between(text: str, at: int) -> int:
    found = BETWEEN.match(text, at)
    return at if found is None else found.end()


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
