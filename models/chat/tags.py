"""Reads calls in the tags of Qwen3-Coder and Qwen3.5, with the schemas of the functions.

A call is ``<function=NAME><parameter=KEY>VALUE</parameter></function>``. The tags do not say
whether a value is a text or a number. A text may hold the tags themselves.
"""

import json
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from sparsekv_cli.models.chat.calls import Notation, ToolCall, call_of
from sparsekv_cli.models.chat.loose import CutError, read_json, read_value

MAYBE = 2  # doubt of calls whose text ends within a value
MAX_ENDS = 64  # tags in a text that are tried as the end of a function


class ReadCalls(NamedTuple):
    """The calls that were read in a text, and whether the text was complete."""

    calls: list[ToolCall]  # empty: the text is not a call
    # 0: the text is complete; 1: its last tags are missing; MAYBE: it ends within a value
    doubt: int = 0


NAME = r"""\s*(?:=|\sname\s*=)\s*["']?([^>\s"']+)["']?\s*>"""
FUNCTION = re.compile(rf"\s*<function{NAME}", re.I)
FUNCTION_END = re.compile(r"\s*</function>", re.I)
PARAMETER = re.compile(rf"\s*<parameter{NAME}\n?", re.I)
BEGINS = ("<parameter", "</function>", "{")  # texts that may follow a function's tag
HEAD = re.compile(r"<function[^>]{0,100}", re.I)
# How a value ends: with its own tag, with the tag of the next parameter, or with the function.
ENDS = r"""\n?(?P<own></parameter>)(?=\s*(?:<parameter[=\s]|</function>|<function[=\s]|\Z))
    | \n(?=<parameter=(?:%s)>)
    | (?P<last>\n?(?=</function>\s*(?:<function[=\s]|\Z)))"""
CONSTANTS = {"True": True, "False": False, "None": None}
TYPES: Mapping[str, type | tuple[type, ...]] = {
    "string": str, "integer": int, "number": (int, float), "boolean": bool, "object": dict,
    "array": list, "null": type(None),
}  # fmt: skip
MAX_REFERENCES = 8  # references of a schema that are followed


def read_tagged(
    text: str, at: int, notation: Notation, *, is_whole: bool, is_sure: bool
) -> tuple[list[ToolCall], int]:
    """Returns the calls whose tags begin at text[at], and the place after them.

    A value may contain ``</function>`` itself, so the first such tag need not end the call.
    is_whole: no more text arrives. is_sure: the model ends a call with a mark that is one token. A
    tag without this mark may then be part of a value. Raises CutError if only more text can decide,
    and ValueError if the text is no call.
    """
    head = FUNCTION.match(text, at)
    if head is None:
        raise CutError if HEAD.fullmatch(text, at) and not is_whole else ValueError("no function")
    begun = text[head.end() :].lstrip()
    begins = (*BEGINS, *notation.ends)
    if not begun.startswith(begins):
        is_open = not is_whole and any(each.startswith(begun) for each in begins)
        raise CutError if is_open else ValueError("no parameter")
    if begun.startswith("{"):
        return _with_object(text, head, notation)
    tags = re.compile("|".join(["(?i:</function>)", *map(re.escape, notation.ends)]))
    choice: tuple[int, list[ToolCall], int] | None = None  # doubt, calls, the place after them
    for n, found in enumerate(tags.finditer(text, head.end())):
        is_tag = found[0][1:].lower() == "/function>"
        end = found.end() if is_tag else found.start()
        calls, doubt = tagged_calls(text[at:end], notation.functions)
        if not calls or n >= MAX_ENDS:
            continue
        after = text[end:].lstrip()
        is_ended = after.startswith(notation.ends)
        mark = next((mark for mark in notation.ends if after.startswith(mark)), "")
        following = after[len(mark) :].lstrip()
        goes_on = following.startswith(("<function", *notation.starts)) or after.startswith(
            "<function"
        )
        if goes_on or (is_sure and is_ended) or (not doubt and after and not is_sure):
            return calls, end
        if choice is None or doubt < choice[0]:
            choice = doubt, calls, end
    if not is_whole:
        raise CutError
    if choice is None:
        calls, doubt = tagged_calls(text[at:], notation.functions)
        choice = doubt, calls if doubt < MAYBE else [], len(text)
    if not choice[1]:
        raise ValueError("no call")
    return choice[1:]


def _with_object(text: str, head: re.Match[str], notation: Notation) -> tuple[list[ToolCall], int]:
    """Reads ``<function=NAME>{...}</function>``, as Llama 3 writes a call."""
    value, end = read_value(text, head.end(), ("</function>", *notation.ends))
    call = call_of(head[1], value)
    if call is None:
        raise ValueError("no arguments")
    closing = FUNCTION_END.match(text, end)
    return [call], end if closing is None else closing.end()


def tagged_calls(text: str, functions: Mapping[str, Any]) -> ReadCalls:
    """Returns the calls in a text that has nothing else.

    functions: name -> schema of the arguments. A value of a declared type is read as that type. A
    value of no declared type is read as JSON or as a constant of Python, if it is one. Doubt 1: the
    last tag or two are missing. Doubt 2: the last value does not end.
    """
    calls: list[ToolCall] = []
    at, doubt = 0, 0
    while text[at:].strip():
        function = FUNCTION.match(text, at)
        if function is None:
            return ReadCalls([])
        schema = functions.get(function[1])
        properties = schema.get("properties") if isinstance(schema, Mapping) else None
        declared = properties if isinstance(properties, Mapping) else {}
        ends = re.compile(ENDS % ("|".join(map(re.escape, declared)) or r"[^>\s]+"), re.X)
        at, arguments = function.end(), {}
        while (parameter := PARAMETER.match(text, at)) is not None:
            end = ends.search(text, parameter.end())
            at = len(text) if end is None else end.end()
            value = text[parameter.end() : at if end is None else end.start()]
            types = types_of(declared.get(parameter[1]), schema)
            arguments[parameter[1]] = typed(
                value.removesuffix("\n") if end is None else value, types
            )
            doubt = 2 if end is None else 1 if end["last"] is not None else doubt
        closing = FUNCTION_END.match(text, at)
        if closing is None and text[at:].strip() and FUNCTION.match(text, at) is None:
            return ReadCalls([], MAYBE)
        doubt = max(doubt, 1) if closing is None else doubt
        at = at if closing is None else closing.end()
        call = call_of(function[1], arguments)
        if call is None:
            return ReadCalls([])
        calls.append(call)
    return ReadCalls(calls, doubt)


def types_of(schema: Any, root: Any, n_references: int = 0) -> set[str] | None:
    """Returns the names of the types that a JSON schema allows; None if it does not name types.

    root: the schema in which references are looked up.
    """
    if not isinstance(schema, Mapping) or n_references > MAX_REFERENCES:
        return None
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference.startswith("#/"):
        found = root
        for key in reference[2:].split("/"):
            found = found.get(key) if isinstance(found, Mapping) else None
        return types_of(found, root, n_references + 1)
    for key in ("anyOf", "oneOf", "allOf"):
        parts = schema.get(key)
        if isinstance(parts, list) and parts:
            each = [types_of(part, root, n_references + 1) for part in parts]
            known = [types for types in each if types is not None]
            return set().union(*known) if known and (key == "allOf" or known == each) else None
    declared = schema.get("type")
    if declared is None and ("enum" in schema or "const" in schema):
        values = schema["enum"] if isinstance(schema.get("enum"), list) else [schema.get("const")]
        return {name for value in values for name in TYPES if is_of(value, name)}
    names = [declared] if isinstance(declared, str) else declared
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        return None
    return {*names, "null"} if schema.get("nullable") is True else set(names)


def is_of(value: Any, name: str) -> bool:
    """Returns whether ``value`` has the JSON type ``name``."""
    if isinstance(value, bool):
        return name == "boolean"
    if name == "integer" and isinstance(value, float):
        return value.is_integer()
    return name in TYPES and isinstance(value, TYPES[name])


def typed(text: str, types: set[str] | None) -> Any:
    """Returns the value that ``text`` writes. types: its allowed types; None: its form decides."""
    if types is not None and "string" in types:
        return None if "null" in types and text in ("null", "None") else text
    word = text.strip()
    try:
        value = CONSTANTS[word] if word in CONSTANTS else read_json(word)
    except ValueError:
        return text
    if types is None:
        return text if isinstance(value, str) else value
    return value if any(is_of(value, name) for name in types) else text


def declared_arguments(arguments: str, schema: Any) -> str:
    """Returns a call's arguments with values of the types that the schema declares, if possible.

    A text may become the value that it writes, and another value may become its JSON text.
    """
    given = json.loads(arguments)
    fitted = declared(given, schema, schema)
    return arguments if fitted == given else json.dumps(fitted, ensure_ascii=False)


def declared(value: Any, schema: Any, root: Any) -> Any:
    """Returns ``value`` converted to a type that its schema declares, if possible.

    root: the schema in which references are looked up.
    """
    types = types_of(schema, root)
    if types and not any(is_of(value, name) for name in types):
        if isinstance(value, str):
            value = typed(value, types)
        elif "string" in types:
            value = json.dumps(value, ensure_ascii=False)
    if not isinstance(schema, Mapping):
        return value
    if isinstance(value, dict) and isinstance(properties := schema.get("properties"), Mapping):
        return {key: declared(each, properties.get(key), root) for key, each in value.items()}
    if isinstance(value, list) and isinstance(items := schema.get("items"), Mapping):
        return [declared(each, items, root) for each in value]
    return value
