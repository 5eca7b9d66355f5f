"""Reads JSON objects of users as pydantic models: lines of ``run --jsonl``, requests of serve.

A model checks types and bounds. This file has the base class of all models and their error
messages.
"""

import codecs
import json
import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic import model_validator as check_model
from pydantic_core import ErrorDetails, PydanticCustomError, from_json

from sparsekv_cli.errors import SparseKVError
from sparsekv_cli.settings.option import MAX_FLOAT, MAX_WHOLE, did_you_mean

MAX_EXACT = 2.0**53  # beyond it an f64 cannot represent every whole number
MAX_SHOWN = 60  # characters of a value that an error message shows
MAX_FIELDS = 256  # most fields of one object; an error for each field takes a kilobyte
LARGE = re.compile(
    rb"(?<![0-9])[0-9]{200}|[eE]\+?[0-9]{3}"
)  # matches every number that an f64 may not hold


class FieldError(SparseKVError):
    """A wrong field of a JSON object. field: its path; empty: the whole object is wrong."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}{message}")
        self.field = field


class Fields(BaseModel):
    """The fields of a JSON object. A field with the value null counts as missing.

    5.0 is a whole number, as in JSON Schema.
    """

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)
    elsewhere: ClassVar[Mapping[str, str]] = {}  # a field's name in other programs -> its name here

    @check_model(mode="before")
    @classmethod
    def _without_nulls(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        check_length(values)
        return {key: _whole(value) for key, value in values.items() if value is not None}


def _whole(value: Any) -> Any:
    """Returns 5.0 as 5, and every other value unchanged. Floats above 2^53 stay floats."""
    is_whole = isinstance(value, float) and value.is_integer() and abs(value) <= MAX_EXACT
    return int(value) if is_whole else value


def check_length(values: dict[str, Any]) -> dict[str, Any]:
    """Returns ``values``. Raises FieldError if the object has more than MAX_FIELDS fields."""
    if len(values) > MAX_FIELDS:
        raise FieldError(
            "", f"an object has {len(values)} fields: expected at most {MAX_FIELDS} of them"
        )
    return values


F = TypeVar("F", bound=Fields)
T = TypeVar("T")
Many = Annotated[
    list[T], Field(fail_fast=True)
]  # only the first wrong one of a million is reported


def read_json(data: bytes | bytearray) -> Any:
    """Returns the value of a JSON text in UTF-8, with or without a byte order mark.

    Raises FieldError for any other text, for NaN, and for numbers outside the range of f64. It
    also raises FieldError for half a surrogate pair, which cannot be encoded.
    """
    try:
        value = from_json(data.removeprefix(codecs.BOM_UTF8), allow_inf_nan=False)
        if LARGE.search(data):
            json.dumps(value, allow_nan=False)  # 1e999 was read as infinite
        return value
    except (ValueError, RecursionError) as error:
        reason = "a number is out of range" if "JSON compliant" in str(error) else str(error)
        if b"\n" not in data.strip():
            reason = reason.replace(" line 1 ", " ")
        raise FieldError("", f"not JSON in UTF-8: {' '.join(reason.split())}") from None


def read_object(data: bytes | bytearray) -> dict[str, Any]:
    """Returns the JSON object in ``data``. Raises FieldError for another value or bad JSON."""
    values = read_json(data)
    if not isinstance(values, dict):
        raise FieldError("", f"expected an object, found {shown(values)}")
    return values


def read_fields(kind: type[F], values: Mapping[str, Any]) -> F:
    """Returns ``values`` as an object of ``kind``. Raises FieldError for the first bad field."""
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        raise FieldError(*_words(kind, values, error.errors(include_url=False))) from None


WORDS = {
    "string_type": "a text",
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "dict_type": "an object",
    "model_type": "an object",
    "list_type": "a list",
    "tuple_type": "a list",
    "greater_than_equal": "{ge} or more",
    "greater_than": "more than {gt}",
    "less_than_equal": "at most {le}",
    "literal_error": "{expected}",
    "too_long": "at most {max_length} of them",
    "string_too_long": "at most {max_length} characters",
}


def _words(
    kind: type[Fields], values: Mapping[str, Any], found: Sequence[ErrorDetails]
) -> tuple[str, str]:
    """Returns the path of the first wrong field, and its fault in words.

    kind: the model that refused ``values``. found: pydantic's errors.
    """
    error, context = found[0]["type"], found[0].get("ctx", {})
    place, value = _place(values, found[0]["loc"]), found[0]["input"]
    field = path_of(place)
    if error == "extra_forbidden":
        names = names_of(kind) if len(place) == 1 else ()
        if place[-1] in names:
            return field, ": is given twice, under two names"
        if field in kind.elsewhere:
            return field, f": no such field: use {kind.elsewhere[field]}"
        return field, f": no such field{did_you_mean(str(place[-1]), names)}"
    if error == "missing":
        return path_of([*_place(values, found[0]["loc"][:-1]), found[0]["loc"][-1]]), ": is missing"
    if error == "value_error":
        return field, f": {context['error']}"
    if error in ("string_too_short", "too_short"):
        return field, f" is {shown(value)}: expected one that is not empty"
    if error == "string_pattern_mismatch":
        return path_of(place[:-1]), f": the key {shown(value)} is no token's number"
    # a union gives one error for each of its types
    same = [each for each in found if _place(values, each["loc"]) == place]
    expected = dict.fromkeys(_expected(each) for each in same)
    return field, f" = {shown(value)}: expected {' or '.join(expected)}"


def _expected(found: ErrorDetails) -> str:
    if found["type"] == "missing":
        return f"an object with {found['loc'][-1]}"
    words = WORDS.get(found["type"])
    return found["msg"] if words is None else words.format(**found.get("ctx", {}))


def _place(values: Any, parts: Sequence[str | int]) -> list[str | int]:
    """Returns the path of an error in ``values``.

    Parts that only name a type of a union are left out.
    """
    place: list[str | int] = []
    for part in parts:
        is_key = isinstance(values, Mapping) and part in values
        if is_key or (isinstance(values, list) and isinstance(part, int)):
            place.append(part)
            values = values[part]
    return place


def names_of(kind: type[Fields]) -> list[str]:
    """Returns all names under which the fields of a model are accepted."""
    names: list[Any] = []
    for name, declared in kind.model_fields.items():
        choices = getattr(declared.validation_alias, "choices", None)
        names += choices or [declared.alias or name]
    return [str(name) for name in names]


def path_of(place: Sequence[str | int]) -> str:
    """Returns a path as text: ["messages", 0, "role"] gives ``messages[0].role``.

    Text beyond MAX_SHOWN characters is cut.
    """
    text = ""
    for part in place:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return ascii(text[:MAX_SHOWN])[1:-1]


def shown(value: Any) -> str:
    """Returns ``value`` as error messages show it: JSON in ASCII, at most MAX_SHOWN characters."""
    try:
        text = json.dumps(value)
    except ValueError:  # a whole number of thousands of digits
        text = "a very large number"
    except TypeError:  # a Python value that JSON does not have
        text = f"a value of type {type(value).__name__}"
    return text if len(text) <= MAX_SHOWN else text[: MAX_SHOWN - 3] + "..."


def _only_false(value: Any) -> Any:
    if value is not False:
        raise PydanticCustomError("not_false", "false")
    return value


def as_texts(value: Any) -> Any:
    """Returns a text, or a list of texts, as a tuple without empty texts."""
    given = [value] if isinstance(value, str) else value
    if not isinstance(given, list | tuple) or not all(isinstance(each, str) for each in given):
        raise ValueError("expected a text or a list of texts")
    return tuple(each for each in given if each)


Number = Annotated[float, Field(ge=-MAX_FLOAT, le=MAX_FLOAT)]
Whole = Annotated[int, Field(ge=-MAX_WHOLE, le=MAX_WHOLE)]
Off = Annotated[Literal[False], BeforeValidator(_only_false)]  # a switch that accepts only false
Text = Annotated[str, Field(min_length=1)]  # not empty
Texts = Annotated[
    tuple[str, ...], BeforeValidator(as_texts, json_schema_input_type=str | list[str])
]
