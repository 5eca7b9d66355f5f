"""The parts of an answer, and the calls of functions in the texts that models write for them.

A call is written as JSON (Hermes, Llama 3, Mistral), in tags (Qwen3-Coder, Qwen3.5), in Gemma 4's
own notation or as Python (LFM2). A text that is none of a form has no calls in it.
"""

from __future__ import annotations

import ast
import json
import re
from typing import Any, NamedTuple


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


def is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def json_calls(text: str) -> list[Part]:
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
    if isinstance(arguments, str) and is_json(arguments):
        arguments = json.loads(arguments)
    if not isinstance(name, str) or not name or not isinstance(arguments, dict):
        return None
    return _call(name, arguments)


def _call(name: str, arguments: dict[str, Any]) -> ToolCall:
    return ToolCall(name, json.dumps(arguments, ensure_ascii=False))


FUNCTION = re.compile(r"\s*<function=([^>\s]+)>(.*?)(?:</function>\s*|\Z)", re.S)
PARAMETER = re.compile(r"\s*<parameter=([^>\s]+)>\n?(.*?)\n?</parameter>\s*", re.S)


def tagged_calls(text: str) -> list[Part]:
    """``<function=NAME><parameter=KEY>VALUE</parameter></function>``, one or several.

    A value that is JSON but no string is taken as such, and Python's constants as theirs: the tags
    do not tell.
    """
    calls: list[Part] = []
    for name, body in _all_of(FUNCTION, text):
        pairs = _all_of(PARAMETER, body.strip())
        if body.strip() and not pairs:
            return []
        calls.append(_call(name, {key: _value(value) for key, value in pairs}))
    return calls


def _all_of(pattern: re.Pattern[str], text: str) -> list[tuple[str, str]]:
    """The groups of all matches, if they are all of the text; else none."""
    found, at = [], 0
    while at < len(text.rstrip()):
        match = pattern.match(text, at)
        if match is None:
            return []
        found.append((match[1], match[2]))
        at = match.end()
    return found


CONSTANTS = {"True": True, "False": False, "None": None}


def _value(text: str) -> Any:
    if text in CONSTANTS:
        return CONSTANTS[text]
    if not is_json(text) or isinstance(json.loads(text), str):
        return text
    return json.loads(text)


QUOTE = '<|"|>'
NAMED = re.compile(r"\s*call:([\w.-]+)\s*(\{.*\})\s*", re.S)


def gemma_calls(text: str) -> list[Part]:
    """``call:NAME{KEY:VALUE,...}``: keys without quotes, strings between ``<|"|>``."""
    named = NAMED.fullmatch(text)
    if named is None:
        return []
    parts = named[2].split(QUOTE)
    for i, part in enumerate(parts):
        if i % 2:  # between two quotes
            parts[i] = json.dumps(part)
        else:
            parts[i] = re.sub(r"([{,]\s*)([A-Za-z_][\w.-]*)\s*:", r'\1"\2":', part)
    written = "".join(parts)
    if len(parts) % 2 == 0 or not is_json(written):
        return []
    return [_call(named[1], json.loads(written))]


def python_calls(text: str) -> list[Part]:
    """``[NAME(KEY=VALUE, ...), ...]`` with literals as values."""
    try:
        tree = ast.parse(text.strip(), mode="eval").body
        calls = tree.elts if isinstance(tree, ast.List) else [tree]
        return [_python_call(call) for call in calls]
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return []


def _python_call(call: ast.expr) -> ToolCall:
    """ValueError for what is no call with names and literals."""
    if not isinstance(call, ast.Call) or call.args or any(w.arg is None for w in call.keywords):
        raise ValueError("no call with named arguments")
    arguments = {str(w.arg): ast.literal_eval(w.value) for w in call.keywords}
    try:
        return _call(ast.unparse(call.func), arguments)
    except TypeError as error:  # bytes, sets
        raise ValueError(str(error)) from None
