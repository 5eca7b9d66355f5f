"""Reads JSON as models write it: with line breaks in strings, and with Python's literals."""

import json
import math
import re
from functools import partial
from typing import Any


class CutError(ValueError):
    """The text ends within a value."""


def _number(kind: type[int] | type[float], text: str) -> Any:
    """Returns the number in ``text``, or ``text`` itself if ``kind`` cannot represent it."""
    try:
        value = kind(text)
    except ValueError:  # more digits than Python reads
        return text
    return text if isinstance(value, float) and not math.isfinite(value) else value


DECODER = json.JSONDecoder(
    parse_float=partial(_number, float),
    parse_int=partial(_number, int),
    parse_constant=str,
    strict=False,
)
MAX_DEPTH = 100  # objects and lists that may be nested
SPACE = re.compile(r"\s*")
KEY = re.compile(r"[A-Za-z_$][\w.$-]*")
WORD = re.compile(r"[\w.+-]+")
INTEGER = re.compile(r"[+-]?\d+")
NUMBER = re.compile(r"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?")
CONSTANTS = {"true": True, "false": False, "null": None, "none": None, "undefined": None}
TEXTS = ("NaN", "Infinity", "-Infinity")  # numbers that JSON does not have
BRACKETS = {"{": "}", "[": "]", "(": ")"}
QUOTES = ('"""', "'''", '"', "'")
STRINGS = (
    re.compile(r'"""((?:(?!""")[^\\]|\\.)*)"""', re.S),
    re.compile(r"'''((?:(?!''')[^\\]|\\.)*)'''", re.S),
    re.compile(r'"((?:[^"\\]|\\.)*)"', re.S),
    re.compile(r"'((?:[^'\\]|\\.)*)'", re.S),
)
ESCAPE = re.compile(r"\\(u[0-9a-fA-F]{4}|x[0-9a-fA-F]{2}|.)", re.S)
ESCAPED = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "\n": ""}
LITERALLY = frozenset("\"'\\/")
# An escaped whole character, an escaped half of a character, or another escape.
HALVES = re.compile(r"\\u[dD][89abAB]\w\w\\u[dD][c-fC-F]\w\w|(\\u[dD][89a-fA-F]\w\w)|\\.", re.S)


def read_json(text: str) -> Any:
    """Returns the value of a JSON text. Raises ValueError for any other text.

    Numbers that Python reads and JSON does not have (NaN, Infinity, 1e999) become texts.
    """
    try:
        return DECODER.decode(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def read_value(text: str, at: int, ends: tuple[str, ...] = (), quote: str = "") -> tuple[Any, int]:
    """Returns the value that begins at text[at], and the place after it.

    ends: texts that close all open lists and objects. quote: a further quotation mark of strings.
    An escaped half of a character becomes U+FFFD. Raises CutError if the text ends within the
    value, and ValueError if no value begins there.
    """
    if "\\u" in text:
        text = HALVES.sub(lambda found: "\\ufffd" if found[1] else found[0], text)
    try:
        return DECODER.raw_decode(text, at)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    except ValueError:
        return _Loose(text, ends, quote).value(at, 0)


class _Loose:
    """Reads values from a text that is not JSON, or whose beginning only is JSON."""

    def __init__(self, text: str, ends: tuple[str, ...], quote: str) -> None:
        self._text, self._ends, self._quote = text, ends, quote

    def value(self, at: int, depth: int) -> tuple[Any, int]:
        at = self._next(at)
        char = self._text[at]
        if depth > MAX_DEPTH:
            raise ValueError("nested too deeply")
        if char in BRACKETS:
            return self._items(at + 1, depth, BRACKETS[char])
        if self._is_string(at):
            return self._string(at)
        found = WORD.match(self._text, at)
        if found is None:
            raise ValueError(f"no value at {at}")
        if found.end() == len(self._text):
            raise CutError
        return _literal(found[0]), found.end()

    def _items(self, at: int, depth: int, closing: str) -> tuple[Any, int]:
        pairs: dict[str, Any] = {}
        values: list[Any] = []
        result: Any = pairs if closing == "}" else values
        while True:
            at = self._next(at)
            if self._text[at] == closing:
                return result, at + 1
            if self._text.startswith(self._ends, at):
                return result, at
            if closing == "}":
                key, at = self._key(at)
                at = self._next(at)
                if self._text[at] != ":":
                    raise ValueError(f"no colon at {at}")
                pairs[key], at = self.value(at + 1, depth + 1)
            else:
                value, at = self.value(at, depth + 1)
                values.append(value)
            at = self._next(at)
            if self._text[at] == ",":
                at += 1
            elif self._text[at] != closing and not self._text.startswith(self._ends, at):
                raise ValueError(f"no comma at {at}")

    def _key(self, at: int) -> tuple[str, int]:
        if self._is_string(at):
            return self._string(at)
        found = KEY.match(self._text, at)
        if found is None:
            raise ValueError(f"no key at {at}")
        if found.end() == len(self._text):
            raise CutError
        return found[0], found.end()

    def _is_string(self, at: int) -> bool:
        is_own = bool(self._quote) and self._text.startswith(self._quote, at)
        return is_own or self._text[at] in "\"'"

    def _string(self, at: int) -> tuple[str, int]:
        if self._quote and self._text.startswith(self._quote, at):
            at += len(self._quote)
            end = self._text.find(self._quote, at)
            if end < 0:
                raise CutError
            return self._text[at:end], end + len(self._quote)
        pairs = zip(QUOTES, STRINGS, strict=True)
        string = next(each for quote, each in pairs if self._text.startswith(quote, at))
        found = string.match(self._text, at)
        if found is None:
            raise CutError
        return _whole(ESCAPE.sub(_unescaped, found[1])), found.end()

    def _next(self, at: int) -> int:
        """Returns the place of the next character that is no white space."""
        found = SPACE.match(self._text, at)
        end = at if found is None else found.end()
        if end >= len(self._text):
            raise CutError
        return end


def _literal(word: str) -> Any:
    if word.lower() in CONSTANTS:
        return CONSTANTS[word.lower()]
    if word in TEXTS:
        return word
    if not NUMBER.fullmatch(word):
        raise ValueError(f"no value: {word}")
    return _number(int if INTEGER.fullmatch(word) else float, word)


def _unescaped(found: re.Match[str]) -> str:
    word = found[1]
    if len(word) > 1:
        return chr(int(word[1:], 16))
    return word if word in LITERALLY else ESCAPED.get(word, found[0])


def _whole(text: str) -> str:
    """Returns ``text`` with two halves of a character joined to the character."""
    return re.sub(
        "[\ud800-\udbff][\udc00-\udfff]",
        lambda found: found[0].encode("utf-16-le", "surrogatepass").decode("utf-16-le"),
        text,
    )
