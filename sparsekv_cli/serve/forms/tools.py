"""Tool calls that models write, in the formats of Qwen, Llama 3, Mistral, gpt-oss, Gemma 4, LFM2.

A chat template writes the tools into the prompt. Its words show the format of the model's calls.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from sparsekv_cli.models.chat.calls import (
    DECODER,
    MAYBE,
    Part,
    ReadCalls,
    Text,
    ToolCall,
    call_of,
    gemma_calls,
    in_string,
    json_calls,
    python_calls,
)
from sparsekv_cli.models.chat.fitting.probes import place_of_tools
from sparsekv_cli.models.chat.harmony import HarmonyReader
from sparsekv_cli.models.chat.tags import tagged_calls
from sparsekv_cli.models.chat.thinking import overlap
from sparsekv_cli.models.tokenizer.marks import CHANNEL_MARKS, SPELLED, Marks, plain
from sparsekv_cli.sampling.grammar import JSON_OPTIONS
from sparsekv_cli.sampling.schema import closed
from sparsekv_cli.serve.forms.marked import BareReader, Ends, Functions, MarkedReader

ANY_OBJECT = {"type": "object"}  # arguments of a function that does not describe them
ANY_FUNCTIONS: Functions = {}
ARGUMENTS = {**JSON_OPTIONS, "coerce_one_of": True}  # llguidance's options for arguments
LFM2_MARKS = ("<|tool_call_start|>", "<|tool_call_end|>")
PLAIN_FORM = ("", "arguments", "{", "}")


class PlainReader:
    """Reads answers in which no calls are looked for: everything is text."""

    def push(self, text: str) -> Iterator[Part]:
        """Yields the parts that have become certain with this text."""
        yield from [Text(text)] if text else []

    def flush(self) -> Iterator[Part]:
        """Yields the text that was held back. No text follows."""
        yield from ()


def hermes_reader(functions: Functions, marks: Marks) -> BareReader:
    """``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``, or tags between the marks."""

    def parse(text: str) -> ReadCalls:
        text = plain(text)
        if text.lstrip().startswith("<"):
            return tagged_calls(text, functions)
        calls = json_calls(text)
        return ReadCalls(calls, MAYBE if not calls and in_string(text) else 0)

    marked = MarkedReader(marks, "<tool_call>", "</tool_call>", parse, r"\s*(?:[{\[]|<function=)")
    return BareReader(marked, functions)


def gemma4_reader(_functions: Functions, marks: Marks) -> MarkedReader:
    """``<|tool_call>call:NAME{KEY:VALUE}<tool_call|>``."""
    ends = ("<turn|>", "<|tool_response>", "<eos>")
    parse = partial(gemma_calls, quote=marks['<|"|>'])
    return MarkedReader(marks, "<|tool_call>", "<tool_call|>", parse, r"\s*call:", ends)


def lfm2_reader(_functions: Functions, marks: Marks) -> MarkedReader:
    """``<|tool_call_start|>[NAME(KEY=VALUE)]<|tool_call_end|>``."""
    start, end, ends = *LFM2_MARKS, ("<|im_end|>", "<|endoftext|>")
    return MarkedReader(marks, start, end, python_calls, r"\s*\[?\s*\w", ends)


class Llama3Reader:
    """Reads an answer that is one JSON object, or several with semicolons between them."""

    ENDS = ("<|eot_id|>", "<|eom_id|>", "<|end_of_text|>")

    def __init__(self, marks: Marks) -> None:
        self._tag, self._ends = marks["<|python_tag|>"], Ends(marks, self.ENDS)
        self._held, self._is_text = "", False

    def push(self, text: str) -> Iterator[Part]:
        self._held += text
        begun = self._held.lstrip()
        if begun and not begun.startswith(("{", self._tag)) and not self._tag.startswith(begun):
            self._is_text = True
        if self._is_text:
            n = len(self._held) - self._ends.n_at_end(self._held)
            ready, self._held = self._held[:n], self._held[n:]
            yield from [Text(ready)] if ready else []

    def flush(self) -> Iterator[Part]:
        held, self._held = self._ends.without(self._held), ""
        if held and self._is_text:
            yield Text(held)
        elif held:
            body = plain(held.strip().removeprefix(self._tag))
            yield from json_calls(body) or [Text(held.removeprefix(self._tag))]


class MistralReader:
    """``[TOOL_CALLS]`` and a list of objects, or ``[TOOL_CALLS]name[ARGS]{...}`` for each call."""

    NAMED = r"\s*([\w.-]+)(?:%s[\w-]*)?(?:%s)?\s*(?=\{)"

    def __init__(self, marks: Marks) -> None:
        self._mark, self._ends = marks["[TOOL_CALLS]"], Ends(marks, ("</s>",))
        words = (re.escape(marks[each]) for each in ("[CALL_ID]", "[ARGS]"))
        self._named = re.compile(self.NAMED % tuple(words))
        self._held, self._is_call = "", False

    def push(self, text: str) -> Iterator[Part]:
        self._held += text
        if self._is_call:
            return
        before, found, after = self._held.partition(self._mark)
        if found:
            self._is_call, self._held = True, after
            before = before.rstrip()
        else:
            n_end = max(overlap(self._held, self._mark), self._ends.n_at_end(self._held))
            n = len(self._held) - n_end
            before, self._held = self._held[:n], self._held[n:]
        yield from [Text(before)] if before else []

    def flush(self) -> Iterator[Part]:
        held, self._held = self._ends.without(self._held), ""
        if not self._is_call:
            yield from [Text(held)] if held else []
            return
        yield from self._calls(held) or [Text(self._mark + held)]

    def _calls(self, text: str) -> list[Part]:
        """Returns the calls after the first mark, or none if there is anything else."""
        calls: list[Part] = []
        while text.strip():
            named = self._named.match(text)
            text = text[0 if named is None else named.end() :].lstrip()
            try:
                value, end = DECODER.raw_decode(text)
            except (ValueError, RecursionError):
                return []
            if named is None:
                found = json_calls(plain(text[:end]))
            else:
                call = call_of(named[1], value)
                found = [] if call is None else [call]
            text = text[end:].lstrip()
            if not found or (text and not text.startswith(self._mark)):
                return []
            calls += found
            text = text.removeprefix(self._mark)
        return calls


class ForcedReader:
    """Reads an answer that is a call, or the arguments of the function ``name``."""

    def __init__(self, name: str) -> None:
        self._name, self._held = name, ""

    def push(self, text: str) -> Iterator[Part]:
        self._held += text
        yield from ()

    def flush(self) -> Iterator[Part]:
        held, self._held = self._held, ""
        call = call_of(self._name, held) if self._name else None
        if call is not None:
            yield call
        elif held:  # the call was cut
            yield from ([] if self._name else json_calls(held)) or [Text(held)]


FormatReader = BareReader | MarkedReader | Llama3Reader | MistralReader | HarmonyReader


class CallReader:
    """Reads as the reader of a format does. In its parts all marks are spelled.

    is_single: all calls after the first one are left out.
    """

    def __init__(self, reader: FormatReader, *, is_single: bool) -> None:
        self._reader, self._is_single, self._has_called = reader, is_single, False

    def push(self, text: str) -> Iterator[Part]:
        yield from self._told(self._reader.push(text))

    def flush(self) -> Iterator[Part]:
        yield from self._told(self._reader.flush())

    def _told(self, parts: Iterable[Part]) -> Iterator[Part]:
        for part in parts:
            if not isinstance(part, ToolCall):
                yield part._replace(text=plain(part.text))
            elif not (self._is_single and self._has_called):
                self._has_called = True
                yield part


Reader = ForcedReader | PlainReader | CallReader


@dataclass(frozen=True)
class ToolFormat:
    """A format of calls."""

    signs: tuple[str, ...]  # words of a chat template that show the format
    reader: Callable[[Functions, Marks], FormatReader]  # makes the format's reader
    marks: tuple[str, ...]  # the tokens that the reader needs, if they are in the vocabulary
    # for a forced call: its opening, the key of its arguments, the text around the object
    form: tuple[str, str, str, str] = PLAIN_FORM


HARMONY = ToolFormat(
    ("<|channel|>",),
    lambda functions, marks: HarmonyReader(marks),
    (*CHANNEL_MARKS, "<|return|>", "<|call|>"),
    form=("<|channel|>commentary <|constrain|>json<|message|>", "arguments", "{", "}"),
)
MISTRAL = ToolFormat(
    ("[TOOL_CALLS]",),
    lambda functions, marks: MistralReader(marks),
    ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"),
    form=("[TOOL_CALLS]", "arguments", "[{", "}]"),
)
HERMES = ToolFormat(
    ("<tool_call>",),
    hermes_reader,
    ("<tool_call>", "</tool_call>"),
    form=("<tool_call>\n", "arguments", "{", "}"),
)
GEMMA4 = ToolFormat(("<|tool_call>",), gemma4_reader, ("<|tool_call>", "<tool_call|>", '<|"|>'))
LFM2 = ToolFormat(("List of tools: ",), lfm2_reader, LFM2_MARKS)
LLAMA3 = ToolFormat(
    ("<|python_tag|>", "<|start_header_id|>"),
    lambda functions, marks: Llama3Reader(marks),
    ("<|python_tag|>",),
    form=("", "parameters", "{", "}"),
)
FORMATS = (HARMONY, MISTRAL, HERMES, GEMMA4, LFM2, LLAMA3)


def format_of(template: str | None) -> ToolFormat | None:
    """Returns the format that a chat template asks for, or None if it is unknown.

    A template that writes no tools gets them as a text, which asks for Hermes' format.
    """
    if not place_of_tools(template):
        return HERMES
    words = template or ""
    return next((kind for kind in FORMATS if any(sign in words for sign in kind.signs)), None)


def reader_of(
    kind: ToolFormat | None,
    forced: ForcedCall | None = None,
    functions: Functions = ANY_FUNCTIONS,
    *,
    marks: Marks = SPELLED,
    is_begun: bool = False,
    is_single: bool = False,
) -> Reader:
    """Returns a reader of answers in a format. None: it looks for no calls.

    functions: the schemas of the functions' arguments, by name. marks: the tokens among the
    format's marks, which are characters in the answer's text; SPELLED: no vocabulary is known.
    is_begun: the prompt holds the beginning of the answer. is_single: all calls after the first one
    are left out.
    """
    if forced is not None:
        return ForcedReader(forced.name)
    if kind is None:
        return PlainReader()
    reader = kind.reader(functions, marks)
    if is_begun and kind == HARMONY:
        reader = HarmonyReader(marks, is_begun=True)
    return CallReader(reader, is_single=is_single)


def functions_of(tools: Sequence[Mapping[str, Any]]) -> Functions:
    """Returns the schemas of tools' arguments by name. The tools are as templates take them."""
    own = (tool["function"] for tool in tools)
    return {each["name"]: each.get("parameters") or ANY_OBJECT for each in own}


@dataclass(frozen=True)
class ForcedCall:
    """A call that the answer must be."""

    prompt: str  # the text that is added to the prompt, in the format's words
    lark: str  # the grammar of the rest of the call
    name: str = ""  # the name for ForcedReader


def forced_call(
    kind: ToolFormat | None, template: str | None, functions: Mapping[str, Mapping[str, Any]]
) -> ForcedCall:
    """Returns a call of one of the functions, from their names and the schemas of arguments."""
    spaced = [{"x-guidance": ARGUMENTS, **ANY_OBJECT, **own} for own in functions.values()]
    schemas = [f"a{i}: %json {json.dumps(closed(schema))}" for i, schema in enumerate(spaced)]
    (name, *others), prompt = functions, ""
    if not others and kind == HARMONY:
        prompt = f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>"
    elif not others and kind == MISTRAL and "[ARGS]" in (template or ""):
        prompt = f"[TOOL_CALLS]{name}[ARGS]"
    if prompt:
        return ForcedCall(prompt, "\n".join(["start: a0", *schemas]), name)
    prompt, key, left, right = PLAIN_FORM if kind is None else kind.form
    calls = [
        json.dumps(f'{left}"name": {json.dumps(each, ensure_ascii=False)}, "{key}": ') + f" a{i}"
        for i, each in enumerate(functions)
    ]
    lines = [f"start: call {json.dumps(right)}", "call: " + " | ".join(calls), *schemas]
    return ForcedCall(prompt, "\n".join(lines))
