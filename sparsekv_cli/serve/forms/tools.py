"""Tool calls that models write, in the formats of Qwen, Llama 3, Mistral, gpt-oss, Gemma 4, LFM2.

A chat template writes the tools into the prompt. Its words show the format of the model's calls.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sparsekv_cli.models.chat.calls import (
    Notation,
    Part,
    Text,
    ToolCall,
    call_of,
    past,
    read_call,
)
from sparsekv_cli.models.chat.fitting.probes import place_of_tools
from sparsekv_cli.models.chat.harmony import HarmonyReader
from sparsekv_cli.models.chat.tags import declared_arguments
from sparsekv_cli.models.tokenizer.marks import CHANNEL_MARKS, SPELLED, Marks, plain
from sparsekv_cli.sampling.grammar import JSON_OPTIONS
from sparsekv_cli.sampling.schema import closed
from sparsekv_cli.serve.forms.marked import Functions, MarkedReader, known_name

ANY_OBJECT = {"type": "object"}  # arguments of a function that does not describe them
ANY_FUNCTIONS: Functions = {}
ARGUMENTS = {**JSON_OPTIONS, "coerce_one_of": True}  # llguidance's options for arguments
HERMES_MARKS = ("<tool_call>", "</tool_call>")
MISTRAL_MARKS = ("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]")
GEMMA_MARKS = ("<|tool_call>", "<tool_call|>", '<|"|>')
GRANITE_MARKS = ("<|tool_call|>", "<|/tool_call|>")
DEEPSEEK_MARKS = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>",
                  "<｜tool▁call▁end｜>", "<｜tool▁sep｜>")  # fmt: skip
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


def hermes_reader(functions: Functions, marks: Marks) -> MarkedReader:
    """``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``, or tags between the marks."""
    return MarkedReader(marks, functions, HERMES_MARKS[:1], HERMES_MARKS[1:])


def gemma4_reader(functions: Functions, marks: Marks) -> MarkedReader:
    """``<|tool_call>call:NAME{KEY:VALUE}<tool_call|>``."""
    start, end, quote = GEMMA_MARKS
    last = ("<turn|>", "<|tool_response>", "<eos>")
    return MarkedReader(marks, functions, (start,), (end,), last=last, quote=quote)


def lfm2_reader(functions: Functions, marks: Marks) -> MarkedReader:
    """``<|tool_call_start|>[NAME(KEY=VALUE)]<|tool_call_end|>``."""
    last = ("<|im_end|>", "<|endoftext|>")
    return MarkedReader(marks, functions, LFM2_MARKS[:1], LFM2_MARKS[1:], last=last)


def llama3_reader(functions: Functions, marks: Marks) -> MarkedReader:
    """An object, or several with semicolons between them; maybe after ``<|python_tag|>``."""
    last = ("<|eot_id|>", "<|eom_id|>", "<|end_of_text|>")
    return MarkedReader(marks, functions, ("<|python_tag|>",), last=last, begins=True)


def mistral_reader(functions: Functions, marks: Marks) -> MarkedReader:
    """``[TOOL_CALLS]`` and a list of objects, or ``[TOOL_CALLS]name[ARGS]{...}`` for each call."""
    start, *words = MISTRAL_MARKS
    call_id, arguments = (re.escape(marks[each]) for each in words)
    pattern = rf"(?:{call_id}[\w-]*)?(?:{arguments})?"
    return MarkedReader(
        marks, functions, (start,), last=("</s>",), words=pattern, within=(words[1], words[0])
    )


def granite_reader(functions: Functions, marks: Marks) -> MarkedReader:
    """``<|tool_call|>`` and a list of objects; Phi-4-mini ends it with ``<|/tool_call|>``."""
    last = ("<|end_of_text|>", "<|end|>", "<|endoftext|>")
    starts, ends = zip(GRANITE_MARKS, HERMES_MARKS, strict=True)
    return MarkedReader(marks, functions, starts, ends, last=last)


def deepseek_reader(functions: Functions, marks: Marks) -> MarkedReader:
    """``<｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME`` and an object in a block of code."""
    begins, ends, begin, end, separator = DEEPSEEK_MARKS
    words = rf"(?:{re.escape(marks[separator])})?"
    last = ("<｜end▁of▁sentence｜>",)
    return MarkedReader(
        marks, functions, (begins, begin), (ends, end), last=last, words=words, within=(separator,)
    )


class ForcedReader:
    """Reads an answer that is a call, or the arguments of the function ``name``."""

    def __init__(self, name: str) -> None:
        self._name, self._held = name, ""

    def push(self, text: str) -> Iterator[Part]:
        self._held += text
        yield from ()

    def flush(self) -> Iterator[Part]:
        held, self._held = self._held, ""
        calls: list[Part] = []
        with contextlib.suppress(ValueError):  # the call was cut
            if self._name and held.strip():
                calls = list(filter(None, [call_of(self._name, held)]))
            elif held.strip():
                calls = [*read_call(held, past(held, 0), Notation())[0]]
        yield from calls or ([Text(held)] if held else [])


FormatReader = MarkedReader | HarmonyReader


class CallReader:
    """Reads as the reader of a format does. In its parts all marks are spelled.

    A call has the name of a known function and values of the declared types, if it can. is_single:
    all calls after the first one are left out.
    """

    def __init__(self, reader: FormatReader, functions: Functions, *, is_single: bool) -> None:
        self._reader, self._functions = reader, functions
        self._is_single, self._has_called = is_single, False

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
                name = known_name(part.name, self._functions) or part.name
                arguments = declared_arguments(part.arguments, self._functions.get(name))
                yield ToolCall(name, arguments)


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
    mistral_reader,
    MISTRAL_MARKS,
    form=("[TOOL_CALLS]", "arguments", "[{", "}]"),
)
HERMES = ToolFormat(
    ("<tool_call>",), hermes_reader, HERMES_MARKS, form=("<tool_call>\n", "arguments", "{", "}")
)
GEMMA4 = ToolFormat(("<|tool_call>",), gemma4_reader, GEMMA_MARKS)
LFM2 = ToolFormat(("List of tools: ",), lfm2_reader, LFM2_MARKS)
GRANITE = ToolFormat(
    ("<|tool_call|>", "<|/tool|>"),
    granite_reader,
    (*GRANITE_MARKS, *HERMES_MARKS),
    form=("<|tool_call|>", "arguments", "[{", "}]"),
)
DEEPSEEK = ToolFormat(("<｜tool▁call▁begin｜>",), deepseek_reader, DEEPSEEK_MARKS)
LLAMA3 = ToolFormat(
    ("<|python_tag|>", "<|start_header_id|>"),
    llama3_reader,
    ("<|python_tag|>",),
    form=("", "parameters", "{", "}"),
)
FORMATS = (HARMONY, MISTRAL, HERMES, GEMMA4, LFM2, GRANITE, DEEPSEEK, LLAMA3)


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
    return CallReader(reader, functions, is_single=is_single)


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
