"""Tool calls in what models write: the formats of Qwen, Llama 3, Mistral, gpt-oss, Gemma 4, LFM2.

A chat template writes the tools into the prompt, and says by its words in which format the model
was trained to call them. What fits no format is text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from sparsekv_cli.models.chat.calls import (
    Part,
    Text,
    ToolCall,
    gemma_calls,
    is_json,
    json_calls,
    python_calls,
    tagged_calls,
)
from sparsekv_cli.models.chat.harmony import HarmonyReader
from sparsekv_cli.models.chat.thinking import overlap
from sparsekv_cli.sampling.grammar import JSON_OPTIONS

ANY_OBJECT = {"type": "object"}  # arguments of a function that says nothing of them


@dataclass(frozen=True)
class ToolFormat:
    """name: of the reader. special: whether control tokens must be seen to read it."""

    name: str
    special: bool = False


HERMES, LLAMA3 = ToolFormat("hermes"), ToolFormat("llama3", special=True)
MISTRAL, HARMONY = ToolFormat("mistral", special=True), ToolFormat("harmony", special=True)
GEMMA4, LFM2 = ToolFormat("gemma4", special=True), ToolFormat("lfm2", special=True)
# Words of a template, by which a format is known.
SIGNS = (
    ("<|channel|>", HARMONY),
    ("[TOOL_CALLS]", MISTRAL),
    ("<tool_call>", HERMES),
    ("<|tool_call>", GEMMA4),
    ("List of tools: ", LFM2),
    ("<|python_tag|>", LLAMA3),
    ("<|start_header_id|>", LLAMA3),
)


def format_of(template: str | None) -> ToolFormat | None:
    """The format that a chat template is written for; None: unknown."""
    return next((kind for sign, kind in SIGNS if template is not None and sign in template), None)


class PlainReader:
    """Reads answers in which calls are not looked for: all is text."""

    def push(self, text: str) -> Iterator[Part]:
        """What can be told with this text."""
        if text:
            yield Text(text)

    def flush(self) -> Iterator[Part]:
        """What was held back, when nothing follows any more."""
        yield from ()


class MarkedReader:
    """Calls between two marks, among texts or alone. ends: control tokens that are no text."""

    def __init__(
        self,
        start: str,
        end: str,
        parse: Callable[[str], list[Part]],
        ends: tuple[str, ...] = (),
    ) -> None:
        self._start, self._end, self._parse, self._ends = start, end, parse, ends
        self._held, self._is_call, self._has_called = "", False, False

    def push(self, text: str) -> Iterator[Part]:
        self._held = _without(self._held + text, self._ends)
        while True:
            mark = self._end if self._is_call else self._start
            before, found, after = self._held.partition(mark)
            if not found:
                break
            self._held = after
            if self._is_call:
                yield from self._called(before)
            else:
                yield from self._said(before)
            self._is_call = not self._is_call
        if not self._is_call:
            n = len(self._held) - max(overlap(self._held, m) for m in (self._start, *self._ends))
            said, self._held = self._held[:n], self._held[n:]
            yield from self._said(said)

    def flush(self) -> Iterator[Part]:
        held, self._held = self._held, ""
        if self._is_call:  # models leave the last mark out
            yield from self._called(held)
        elif held.strip():
            yield from self._said(held)

    def _said(self, text: str) -> Iterator[Part]:
        if text and not (self._has_called and not text.strip()):
            yield Text(text)

    def _called(self, text: str) -> Iterator[Part]:
        calls = self._parse(text)
        self._has_called = self._has_called or bool(calls)
        yield from calls or [Text(f"{self._start}{text}{self._end}")]


def hermes_reader() -> MarkedReader:
    """``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``, or tags between the marks."""
    return MarkedReader(
        "<tool_call>", "</tool_call>", lambda text: json_calls(text) or tagged_calls(text)
    )


def gemma4_reader() -> MarkedReader:
    """``<|tool_call>call:NAME{KEY:VALUE}<tool_call|>``."""
    ends = ("<turn|>", "<|tool_response>", "<eos>")
    return MarkedReader("<|tool_call>", "<tool_call|>", gemma_calls, ends)


def lfm2_reader() -> MarkedReader:
    """``<|tool_call_start|>[NAME(KEY=VALUE)]<|tool_call_end|>``."""
    ends = ("<|im_end|>", "<|endoftext|>")
    return MarkedReader("<|tool_call_start|>", "<|tool_call_end|>", python_calls, ends)


class Llama3Reader:
    """A JSON object, or several with semicolons between, which is all of the answer."""

    TAG = "<|python_tag|>"
    ENDS = ("<|eot_id|>", "<|eom_id|>", "<|end_of_text|>")

    def __init__(self) -> None:
        self._held, self._is_text = "", False

    def push(self, text: str) -> Iterator[Part]:
        self._held = _without(self._held + text, self.ENDS)
        begun = self._held.lstrip()
        if begun and not begun.startswith(("{", self.TAG)) and not self.TAG.startswith(begun):
            self._is_text = True
        if self._is_text:
            n = len(self._held) - max(overlap(self._held, end) for end in self.ENDS)
            told, self._held = self._held[:n], self._held[n:]
            yield from [Text(told)] if told else []

    def flush(self) -> Iterator[Part]:
        held, self._held = self._held, ""
        if held and self._is_text:
            yield Text(held)
        elif held:
            body = held.strip().removeprefix(self.TAG)
            yield from json_calls(body) or [Text(held.removeprefix(self.TAG))]


class MistralReader:
    """``[TOOL_CALLS]`` and a list of objects, or ``[TOOL_CALLS]name[ARGS]{...}`` for each call."""

    MARK, END = "[TOOL_CALLS]", "</s>"
    NAMED = re.compile(r"\s*([\w.-]+)(?:\[CALL_ID\][\w-]*)?(?:\[ARGS\])?\s*(\{.*\})\s*", re.S)

    def __init__(self) -> None:
        self._held, self._is_call = "", False

    def push(self, text: str) -> Iterator[Part]:
        self._held = _without(self._held + text, (self.END,))
        if self._is_call:
            return
        before, found, after = self._held.partition(self.MARK)
        if found:
            self._is_call, self._held = True, after
            before = before.rstrip()
        else:
            n = len(self._held) - max(overlap(self._held, m) for m in (self.MARK, self.END))
            before, self._held = self._held[:n], self._held[n:]
        if before:
            yield Text(before)

    def flush(self) -> Iterator[Part]:
        held, self._held = self._held, ""
        if not self._is_call:
            yield from [Text(held)] if held else []
            return
        calls: list[Part] = []
        for part in held.split(self.MARK):
            named = self.NAMED.fullmatch(part)
            found = json_calls(part)
            if named is not None and is_json(named[2]):
                found = [ToolCall(named[1], named[2])]
            if not found:
                yield Text(self.MARK + held)
                return
            calls += found
        yield from calls


class ForcedReader:
    """An answer that is a call, or, of the function ``name``, its arguments."""

    def __init__(self, name: str) -> None:
        self._name, self._held = name, ""

    def push(self, text: str) -> Iterator[Part]:
        self._held += text
        yield from ()

    def flush(self) -> Iterator[Part]:
        held, self._held = self._held, ""
        if self._name and is_json(held):
            yield ToolCall(self._name, held)
        elif held:  # cut, unless it is a call
            yield from ([] if self._name else json_calls(held)) or [Text(held)]


FormatReader = MarkedReader | Llama3Reader | MistralReader | HarmonyReader


class SingleReader:
    """Reads as another reader does, and leaves out all calls but the first."""

    def __init__(self, reader: FormatReader) -> None:
        self._reader, self._has_called = reader, False

    def push(self, text: str) -> Iterator[Part]:
        yield from self._first(self._reader.push(text))

    def flush(self) -> Iterator[Part]:
        yield from self._first(self._reader.flush())

    def _first(self, parts: Iterable[Part]) -> Iterator[Part]:
        for part in parts:
            if isinstance(part, ToolCall):
                if self._has_called:
                    continue
                self._has_called = True
            yield part


Reader = ForcedReader | PlainReader | FormatReader | SingleReader
READERS: dict[str, Callable[[], FormatReader]] = {
    "hermes": hermes_reader,
    "gemma4": gemma4_reader,
    "lfm2": lfm2_reader,
    "llama3": Llama3Reader,
    "mistral": MistralReader,
    "harmony": HarmonyReader,
}


def reader_of(
    kind: ToolFormat | None, forced: ForcedCall | None = None, *, is_single: bool = False
) -> Reader:
    """What reads an answer for a format; None: no calls are looked for.

    is_single: all calls but the first are left out.
    """
    if forced is not None:
        return ForcedReader(forced.name)
    if kind is None:
        return PlainReader()
    reader = READERS[kind.name]()
    return SingleReader(reader) if is_single else reader


@dataclass(frozen=True)
class ForcedCall:
    """A call that the answer has to be. prompt: what is written behind the prompt, in the words of
    the format. lark: the grammar of the rest. name: of ForcedReader.
    """

    prompt: str
    lark: str
    name: str = ""


def forced_call(
    kind: ToolFormat | None, template: str | None, functions: Mapping[str, Mapping[str, Any]]
) -> ForcedCall:
    """A call of one of the functions: their names and the schemas of their arguments."""
    spaced = [{"x-guidance": JSON_OPTIONS, **schema} for schema in functions.values()]
    schemas = [f"a{i}: %json {json.dumps(schema)}" for i, schema in enumerate(spaced)]
    (name, *others), prompt = functions, ""
    if not others and kind == HARMONY:
        prompt = f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>"
    elif not others and kind == MISTRAL and "[ARGS]" in (template or ""):
        prompt = f"[TOOL_CALLS]{name}[ARGS]"
    if prompt:
        return ForcedCall(prompt, "\n".join(["start: a0", *schemas]), name)
    prompt, key, left, right = _FORMS.get(kind.name if kind else "", ("", "arguments", "{", "}"))
    calls = [
        json.dumps(f'{left}"name": {json.dumps(each, ensure_ascii=False)}, "{key}": ') + f" a{i}"
        for i, each in enumerate(functions)
    ]
    lines = [f"start: call {json.dumps(right)}", "call: " + " | ".join(calls), *schemas]
    return ForcedCall(prompt, "\n".join(lines))


_FORMS = {  # by format: what opens a call, the key of its arguments, what is around the object
    "hermes": ("<tool_call>\n", "arguments", "{", "}"),
    "llama3": ("", "parameters", "{", "}"),
    "mistral": ("[TOOL_CALLS]", "arguments", "[{", "}]"),
    "harmony": ("<|channel|>commentary <|constrain|>json<|message|>", "arguments", "{", "}"),
}


def _without(text: str, marks: tuple[str, ...]) -> str:
    for mark in marks:
        text = text.replace(mark, "")
    return text
