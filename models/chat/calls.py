"""The parts of an answer, and readers of the function calls that models write.

A model writes a call as JSON (Hermes, Llama 3, Mistral), in Gemma 4's notation, as Python (LFM2) or
in tags (tags.py). The readers also accept calls with the small faults that models make.
"""

import json
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from sparsekv_cli.models.chat.loose import MAX_DEPTH, CutError, read_value
from sparsekv_cli.models.tokenizer.marks import SPELLINGS, STAND_IN


class Text(NamedTuple):
    """A part of the answer."""

    text: str


class Thought(NamedTuple):
    """A part of the thinking before the answer."""

    text: str


class ToolCall(NamedTuple):
    """A call of a function."""

    name: str
    arguments: str  # a JSON text


Part = Text | Thought | ToolCall


class Notation(NamedTuple):
    """The marks and words of one format of calls.

    starts, ends: marks around a call. quote: a mark around strings. words: a pattern of the text
    between a function's name and its arguments. functions: name -> schema of the arguments.
    """

    starts: tuple[str, ...] = ()
    ends: tuple[str, ...] = ()
    quote: str = ""
    words: str = ""
    functions: Mapping[str, Any] = {}


NAMES = ("name", "function", "tool", "tool_name", "function_name")
ARGUMENTS = ("arguments", "parameters", "args", "params", "input")
WRAPPERS = ("function", "tool_call", "function_call")
LABELS = {"type", "id", "index", "description"}  # other keys that an object of a call may have
FENCE = re.compile(r"```[\w-]*\s*")
NAME = r"[\w.:/-]+"
GEMMA_NAME = re.compile(rf"(?:call\s*)?:\s*({NAME})\s*(?=\{{)")
PYTHON_NAME = re.compile(rf"\s*({NAME})\s*\(\s*")
PYTHON_KEY = re.compile(r"(\w+)\s*=(?!=)\s*")
# the text may be the beginning of a name
BEGUN = re.compile(r"[\[\s]*(?:<[\w=]*|[\w.:/\[\]\ud800-\udfff-]*)\s*")
BLANK = re.compile(r"\s*")


def call_of(name: str, arguments: Any) -> ToolCall | None:
    """Returns a call, or None if the arguments are no JSON object or are nested too deeply.

    arguments: an object, or its JSON text. An empty text and null count as an empty object.
    """
    try:
        value = arguments
        if isinstance(value, str):
            value = _whole_value(value)
        if isinstance(value, list) and len(value) < 2:
            value = value[0] if value else {}
        value = {} if value is None else value
        if not isinstance(value, dict) or _is_deep(value):
            return None
        written = json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (ValueError, TypeError):
        return None
    return ToolCall(name, STAND_IN.sub(_spelled, written))


def _spelled(found: re.Match[str]) -> str:
    """Returns the spelling of a mark for a JSON text; U+FFFD for half of a character."""
    return json.dumps(SPELLINGS.get(found[0], "\ufffd"), ensure_ascii=False)[1:-1]


def _whole_value(text: str) -> Any:
    """Returns the value that is the whole of a text. Raises ValueError for any other text."""
    text = text.strip()
    if fence := FENCE.match(text):
        text = text[fence.end() :].removesuffix("```").strip()
    if not text:
        return {}
    value, end = read_value(text, 0)
    if text[end:].strip(" \t\r\n}];,"):
        raise ValueError("a text follows")
    return value


def _is_deep(value: Any) -> bool:
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [
            inner
            for each in level
            if isinstance(each, dict | list | tuple)
            for inner in (each.values() if isinstance(each, dict) else each)
        ]
        if not level:
            return False
    return True


def read_call(text: str, at: int, notation: Notation) -> tuple[list[ToolCall], int]:
    """Returns the calls that begin at text[at], at least one, and the place after them.

    Raises CutError if the text ends within a call, and ValueError if no call begins there.
    """
    if fence := FENCE.match(text, at):
        at = fence.end()
    rest = text[at : at + 2]
    if gemma := GEMMA_NAME.match(text, at):
        return _named(text, gemma, notation)
    if rest.startswith("{") or (rest.startswith("[") and text[at + 1 :].lstrip()[:1] in ("{", "]")):
        return _json_calls(text, at, notation)
    words = rf"\s*(?:{notation.words})\s*"
    before = rf"(?:function\s*(?={notation.words}))?" if notation.words else ""
    pattern = rf"{before}{words}({NAME}){words}(?:```\w*\s*)?(?=\{{)"
    named = re.compile(pattern).match(text, at)
    if named is not None:
        return _named(text, named, notation)
    if rest.startswith("[") or PYTHON_NAME.match(text, at):
        return _python_calls(text, at, notation)
    begun = rf"{BEGUN.pattern}|[\w.:/-]*{words}[\w.:/-]*{words}(?:`{{0,3}}\w*\s*)?"
    raise CutError if re.compile(begun).fullmatch(text, at) else ValueError("no call")


def _named(text: str, found: re.Match[str], notation: Notation) -> tuple[list[ToolCall], int]:
    """Reads the arguments after a name. found: the match up to the arguments, with the name."""
    value, end = read_value(text, found.end(), notation.ends, notation.quote)
    call = call_of(found[1], value)
    if call is None:
        raise ValueError("no arguments")
    return [call], end


def _json_calls(text: str, at: int, notation: Notation) -> tuple[list[ToolCall], int]:
    """Reads an object that describes a call, or a list of such objects."""
    try:
        value, end = read_value(text, at, notation.ends, notation.quote)
    except CutError:
        raise
    except ValueError:
        if not text.startswith("{{", at):
            raise
        value, end = read_value(text, at + 1, notation.ends, notation.quote)
    calls = _described(value, notation)
    if not calls:
        raise ValueError("no call")
    return calls, end


def _described(value: Any, notation: Notation) -> list[ToolCall]:
    """Returns the calls that a value describes. Raises ValueError for any other value."""
    if isinstance(value, list):
        return [call for each in value for call in _described(each, notation)]
    if not isinstance(value, dict):
        raise ValueError("no object")
    fields = {key.strip().lower(): each for key, each in value.items()}
    if isinstance(fields.get("tool_calls"), list):
        return _described(fields["tool_calls"], notation)
    for key in WRAPPERS:
        if isinstance(fields.get(key), dict):
            return _described(fields[key], notation)
    key = next((key for key in NAMES if isinstance(fields.get(key), str)), "")
    name = fields.pop(key).strip() if key else ""
    given = next((key for key in ARGUMENTS if key in fields), "")
    others = {key: each for key, each in value.items() if key.strip().lower() in fields}
    if not name:
        raise ValueError("no name")
    if given:
        call = call_of(name, fields[given]) or _of_text(name, fields[given], notation)
    elif fields.keys() <= LABELS:
        call = call_of(name, {})
    else:  # the arguments are keys next to the name
        schema = notation.functions.get(name)
        declared = schema.get("properties") if isinstance(schema, Mapping) else None
        is_flat = isinstance(declared, Mapping) and others.keys() <= declared.keys()
        call = call_of(name, others) if is_flat else None
    if call is None:
        raise ValueError("no arguments")
    return [call]


def _of_text(name: str, given: Any, notation: Notation) -> ToolCall | None:
    """Returns a call whose argument is a text without a key.

    Returns None unless the function has exactly one argument, which is a text.
    """
    schema = notation.functions.get(name)
    declared = schema.get("properties") if isinstance(schema, Mapping) else None
    if not isinstance(given, str) or not isinstance(declared, Mapping) or len(declared) != 1:
        return None
    key, value = next(iter(declared.items()))
    is_text = isinstance(value, Mapping) and value.get("type") == "string"
    return call_of(name, {key: given}) if is_text else None


def _python_calls(text: str, at: int, notation: Notation) -> tuple[list[ToolCall], int]:
    """Reads ``NAME(KEY=VALUE, ...)``, or a list of them."""
    is_list, calls = text.startswith("[", at), []
    at += is_list
    while True:
        name = PYTHON_NAME.match(text, at)
        if name is None:
            raise CutError if BEGUN.fullmatch(text, at) else ValueError("no call")
        arguments, at = {}, name.end()
        while not text.startswith(")", at):
            key = PYTHON_KEY.match(text, at)
            if key is None:
                raise CutError if BEGUN.fullmatch(text, at) else ValueError("no named argument")
            arguments[key[1]], at = read_value(text, key.end(), notation.ends, notation.quote)
            at = past(text, at)
            if text.startswith(",", at):
                at = past(text, at + 1)
            elif not text.startswith(")", at):
                raise CutError if at == len(text) else ValueError("no comma")
        call = call_of(name[1], arguments)
        if call is None:
            raise ValueError("no arguments")
        calls.append(call)
        if not is_list:
            return calls, at + 1
        at = past(text, at + 1)
        if text.startswith(",", at):
            at = past(text, at + 1)
        if text.startswith("]", at):
            return calls, at + 1
        if text.startswith(notation.ends, at):
            return calls, at
        if at == len(text):
            raise CutError


def past(text: str, at: int) -> int:
    """Returns the place after the white space that begins at text[at]."""
    found = BLANK.match(text, at)
    return at if found is None else found.end()
