"""Reads calls in the tags of Qwen3-Coder and Qwen3.5, with the schemas of the functions.

A call is ``<function=NAME><parameter=KEY>VALUE</parameter></function>``. The tags do not say
whether a value is a text or a number. A text may hold the tags themselves.
"""

import re
from collections.abc import Mapping
from typing import Any

from sparsekv_cli.models.chat.calls import MAYBE, Part, ReadCalls, call_of, read_json

FUNCTION = re.compile(r"\s*<function=([^>\s]+)>")
FUNCTION_END = re.compile(r"\s*</function>")
PARAMETER = re.compile(r"\s*<parameter=([^>\s]+)>\n?")
# The end of a value: its tag, the next parameter if that is missing, or the end of the function.
ENDS = r"""\n?(?P<own></parameter>)(?=\s*(?:<parameter=|</function>|<function=|\Z))
    | \n(?=<parameter=(?:%s)>)
    | (?P<last>\n?(?=</function>\s*(?:<function=|\Z)))"""
CONSTANTS = {"True": True, "False": False, "None": None}
TYPES: Mapping[str, type | tuple[type, ...]] = {
    "string": str, "integer": int, "number": (int, float), "boolean": bool, "object": dict,
    "array": list, "null": type(None),
}  # fmt: skip
MAX_REFERENCES = 8  # most references that are followed from one schema


def tagged_calls(text: str, functions: Mapping[str, Any]) -> ReadCalls:
    """Returns the calls in a text that holds nothing else.

    functions: the schemas of their arguments, by name. A value of a declared type is read as that
    type. An undeclared value is read as JSON or as a constant of Python, if it is one. Doubt 1: the
    last tag or two are missing. Doubt 2: the last value does not end.
    """
    calls: list[Part] = []
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
    """Returns the names of the types that a JSON schema allows; None if it does not say.

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
    """Returns whether a value is of a JSON type."""
    if isinstance(value, bool):
        return name == "boolean"
    if name == "integer" and isinstance(value, float):
        return value.is_integer()
    return name in TYPES and isinstance(value, TYPES[name])


def typed(text: str, types: set[str] | None) -> Any:
    """Returns the value of a text. types: its allowed types; None: the text's form decides."""
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
