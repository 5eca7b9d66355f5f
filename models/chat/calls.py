"""The parts of an answer, and readers of the function calls that models write.

A model writes a call as JSON (Hermes, Llama 3, Mistral), in Gemma 4's notation, as Python (LFM2) or
in tags (tags.py). A reader finds no calls in a text of another form.
"""

import ast
import json
import math
import re
from functools import partial
from typing import Any, NamedTuple

from sparsekv_cli.models.tokenizer.marks import plain


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


class ReadCalls(NamedTuple):
    """The calls that were read in a text."""

    calls: list[Part]  # empty: the text is no call
    # 0: the text is complete; 1: its last tags are missing; MAYBE: it ends within a value
    doubt: int = 0


MAYBE = 2
MAX_DEPTH = 100  # of arguments: objects and lists within each other
SURROGATE = re.compile("[\ud800-\udfff]")  # half a character, which UTF-8 cannot encode
STRING = re.compile(r'"(?:[^"\\]|\\.)*"', re.S)
ANY_STRING = re.compile(r""""(?:[^"\\\n]|\\.)*"|'(?:[^'\\\n]|\\.)*'""", re.S)


def _number(kind: type[int] | type[float], text: str) -> Any:
    """Returns a number, or its text if it is out of the range of ``kind``."""
    try:
        value = kind(text)
    except ValueError:  # more digits than Python reads
        return text
    return text if isinstance(value, float) and not math.isfinite(value) else value


DECODER = json.JSONDecoder(
    parse_float=partial(_number, float), parse_int=partial(_number, int), parse_constant=str
)


def read_json(text: str) -> Any:
    """Returns the value of a JSON text. Raises ValueError for any other text.

    Numbers that Python reads and JSON does not have (NaN, Infinity, 1e999) become texts.
    """
    try:
        return DECODER.decode(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def call_of(name: str, arguments: Any) -> ToolCall | None:
    """Returns a call, or None if the arguments are no JSON object or nested too deeply.

    arguments: an object, or its JSON text.
    """
    try:
        value = read_json(arguments) if isinstance(arguments, str) else arguments
        if not isinstance(value, dict) or _is_deep(value):
            return None
        written = json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (ValueError, TypeError):
        return None
    return ToolCall(name, SURROGATE.sub("\ufffd", written))


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


def in_string(text: str) -> bool:
    """Returns whether a JSON text ends within a string."""
    return '"' in STRING.sub("", text)


def json_calls(text: str) -> list[Part]:
    """Returns the calls in a series of JSON texts; none if the text has anything else."""
    calls: list[Part] = []
    rest = text.strip()
    while rest:
        try:
            value, end = DECODER.raw_decode(rest)
        except (ValueError, RecursionError):
            return []
        for call in value if isinstance(value, list) else [value]:
            found = _described(call)
            if found is None:
                return []
            calls.append(found)
        rest = rest[end:].lstrip().removeprefix(";").lstrip()
    return calls


def _described(value: Any) -> Part | None:
    """Returns the call that an object describes; None if it describes none."""
    if not isinstance(value, dict):
        return None
    value = value.get("function", value) if isinstance(value.get("function"), dict) else value
    name = value.get("name")
    arguments = value.get("arguments", value.get("parameters", {}))
    return call_of(name, arguments) if isinstance(name, str) and name else None


NAMED = re.compile(r"\s*call:([\w.-]+)\s*(\{.*\})\s*", re.S)


def gemma_calls(text: str, quote: str = '<|"|>') -> ReadCalls:
    """Reads ``call:NAME{KEY:VALUE,...}``: keys without quotes, strings between quotes."""
    parts = text.split(quote)
    if len(parts) % 2 == 0:
        return ReadCalls([], MAYBE)
    named = NAMED.fullmatch(text)
    if named is None:
        return ReadCalls([])
    parts = named[2].split(quote)
    for i, part in enumerate(parts):
        if i % 2:  # between two quotes
            parts[i] = json.dumps(plain(part))
        else:
            parts[i] = re.sub(r"([{,]\s*)([A-Za-z_][\w.-]*)\s*:", r'\1"\2":', part)
    call = call_of(named[1], "".join(parts))
    return ReadCalls([] if call is None else [call])


def python_calls(text: str) -> ReadCalls:
    """Reads ``[NAME(KEY=VALUE, ...), ...]`` with literals as values."""
    try:
        tree = ast.parse(plain(text).strip(), mode="eval").body
        calls = tree.elts if isinstance(tree, ast.List) else [tree]
        return ReadCalls([_python_call(call) for call in calls])
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        rest = ANY_STRING.sub("", text)
        return ReadCalls([], MAYBE if '"' in rest or "'" in rest else 0)


def _python_call(call: ast.expr) -> ToolCall:
    """Returns a call. Raises ValueError unless it is a call with named literals."""
    if not isinstance(call, ast.Call) or call.args or any(w.arg is None for w in call.keywords):
        raise ValueError("no call with named arguments")
    arguments = {str(w.arg): ast.literal_eval(w.value) for w in call.keywords}
    found = call_of(ast.unparse(call.func), arguments)
    if found is None:  # bytes, sets, infinite numbers
        raise ValueError("no arguments that JSON can say")
    return found
