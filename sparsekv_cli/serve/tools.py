"""Tool calls in what models write: the formats of Qwen, Llama 3, Mistral and gpt-oss.

A chat template writes the tools into the prompt, and says by its words in which format the model
was trained to call them. What fits no format is text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from sparsekv_cli.models.chat.thinking import overlap
from sparsekv_cli.sampling.grammar import JSON_OPTIONS


class Text(NamedTuple):
    """A part of the answer."""

    text: str


class Thought(NamedTuple):
    """A part of what was thought ahead of it."""

    text: str


class ToolCall(NamedTuple):
    """A call of a function. arguments: a JSON text."""

    name: str
    arguments: str


Part = Text | Thought | ToolCall
ANY_OBJECT = {"type": "object"}  # arguments of a function that says nothing of them


@dataclass(frozen=True)
class ToolFormat:
    """name: of the reader. special: whether control tokens must be seen to read it."""

    name: str
    special: bool = False


HERMES, LLAMA3 = ToolFormat("hermes"), ToolFormat("llama3", special=True)
MISTRAL, HARMONY = ToolFormat("mistral", special=True), ToolFormat("harmony", special=True)
# Words of a template, by which a format is known.
SIGNS = (
    ("<|channel|>", HARMONY),
    ("[TOOL_CALLS]", MISTRAL),
    ("<tool_call>", HERMES),
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


class HermesReader:
    """``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``, between texts or alone.

    Or the call as newer Qwens write it: ``<function=NAME><parameter=KEY>value</parameter>...``
    """

    START, END = "<tool_call>", "</tool_call>"

    def __init__(self) -> None:
        self._held, self._is_call, self._has_called = "", False, False

    def push(self, text: str) -> Iterator[Part]:
        self._held += text
        while True:
            mark = self.END if self._is_call else self.START
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
            n = len(self._held) - overlap(self._held, self.START)
            said, self._held = self._held[:n], self._held[n:]
            yield from self._said(said)

    def flush(self) -> Iterator[Part]:
        held, self._held = self._held, ""
        if self._is_call:  # models leave the last marker out
            yield from self._called(held)
        elif held.strip():
            yield from self._said(held)

    def _said(self, text: str) -> Iterator[Part]:
        if text and not (self._has_called and not text.strip()):
            yield Text(text)

    def _called(self, text: str) -> Iterator[Part]:
        calls = calls_in(text) or _functions_in(text)
        self._has_called = self._has_called or bool(calls)
        yield from calls or [Text(f"{self.START}{text}{self.END}")]


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
            yield from calls_in(body) or [Text(held.removeprefix(self.TAG))]


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
            found = calls_in(part)
            if named is not None and _is_json(named[2]):
                found = [ToolCall(named[1], named[2])]
            if not found:
                yield Text(self.MARK + held)
                return
            calls += found
        yield from calls


class HarmonyReader:
    """gpt-oss: messages on channels; ``analysis`` is thought, a recipient is a function.

    ``<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{...}<|call|>``
    """

    MARKS = re.compile(r"<\|(channel|message|start|end|return|call|constrain)\|>")
    RECIPIENT = re.compile(r"to=(?:functions\.)?([\w.-]+)")
    LONGEST = len("<|constrain|>")

    def __init__(self) -> None:
        self._held, self._header, self._body = "", "", ""
        self._is_header = True

    def push(self, text: str) -> Iterator[Part]:
        self._held += text
        while (mark := self.MARKS.search(self._held)) is not None:
            yield from self._take(self._held[: mark.start()])
            self._held = self._held[mark.end() :]
            if mark[1] == "message":
                self._is_header = False
            elif mark[1] in ("end", "return", "call", "start"):
                yield from self._end()
            else:
                self._header += " "
        begun = self._held.rfind("<", max(0, len(self._held) - self.LONGEST))
        n = begun if begun >= 0 else len(self._held)
        told, self._held = self._held[:n], self._held[n:]
        yield from self._take(told)

    def flush(self) -> Iterator[Part]:
        held, self._held = self._held, ""
        yield from self._take(held)
        yield from self._end()

    def _take(self, text: str) -> Iterator[Part]:
        if self._is_header:
            self._header += text
        elif self.RECIPIENT.search(self._header):
            self._body += text
        elif text:
            yield Thought(text) if "analysis" in self._header else Text(text)

    def _end(self) -> Iterator[Part]:
        """A message ends."""
        recipient = self.RECIPIENT.search(self._header)
        if recipient is not None and self._body:
            body = self._body.strip()
            yield ToolCall(recipient[1], body) if _is_json(body) else Text(body)
        self._header, self._body, self._is_header = "", "", True


class ForcedReader:
    """An answer that is a call, or, of the function ``name``, its arguments."""

    def __init__(self, name: str) -> None:
        self._name, self._held = name, ""

    def push(self, text: str) -> Iterator[Part]:
        self._held += text
        yield from ()

    def flush(self) -> Iterator[Part]:
        held, self._held = self._held, ""
        if self._name and _is_json(held):
            yield ToolCall(self._name, held)
        elif held:  # cut, unless it is a call
            yield from ([] if self._name else calls_in(held)) or [Text(held)]


FormatReader = HermesReader | Llama3Reader | MistralReader | HarmonyReader
Reader = ForcedReader | PlainReader | FormatReader
READERS: dict[str, type[FormatReader]] = {
    "hermes": HermesReader,
    "llama3": Llama3Reader,
    "mistral": MistralReader,
    "harmony": HarmonyReader,
}


def reader_of(kind: ToolFormat | None, forced: ForcedCall | None = None) -> Reader:
    """What reads an answer for a format; None: no calls are looked for."""
    if forced is not None:
        return ForcedReader(forced.name)
    return PlainReader() if kind is None else READERS[kind.name]()


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


def _functions_in(text: str) -> list[Part]:
    """The calls in ``<function=NAME><parameter=KEY>value</parameter></function>``; none if other
    text is there. A value is JSON if it can be, and a text otherwise."""
    calls: list[Part] = []
    for name, body in FUNCTION.findall(text):
        values = {key: json.loads(v) if _is_json(v) else v for key, v in PARAMETER.findall(body)}
        if PARAMETER.sub("", body).strip():
            return []
        calls.append(ToolCall(name, json.dumps(values, ensure_ascii=False)))
    return [] if FUNCTION.sub("", text).strip() else calls


FUNCTION = re.compile(r"<function=([^>\s]+)>(.*?)</function>", re.S)
PARAMETER = re.compile(r"<parameter=([^>\s]+)>\n?(.*?)\n?</parameter>", re.S)


def calls_in(text: str) -> list[Part]:
    """The calls in JSON texts, one behind the other; none if anything else is there."""
    decoder, calls, rest = json.JSONDecoder(), [], text.strip()
    while rest:
        try:
            value, end = decoder.raw_decode(rest)
        except (ValueError, RecursionError):
            return []
        for call in value if isinstance(value, list) else [value]:
            found = _call_of(call)
            if found is None:
                return []
            calls.append(found)
        rest = rest[end:].lstrip().removeprefix(";").lstrip()
    return calls


def _call_of(value: Any) -> Part | None:
    """A call that an object describes; None if it describes none."""
    if not isinstance(value, dict):
        return None
    value = value.get("function", value) if isinstance(value.get("function"), dict) else value
    name = value.get("name")
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str) and _is_json(arguments):
        arguments = json.loads(arguments)
    if not isinstance(name, str) or not name or not isinstance(arguments, dict):
        return None
    return ToolCall(name, json.dumps(arguments, ensure_ascii=False))


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def _without(text: str, marks: tuple[str, ...]) -> str:
    for mark in marks:
        text = text.replace(mark, "")
    return text
