"""Limits the work and memory of a chat template. A text's size is checked before it is made."""

import json
import re
import time
from collections.abc import Callable, Iterable, Iterator, MappingView
from typing import Any

from jinja2 import TemplateError, Undefined, filters

MAX_STEPS = 1_000_000  # loop iterations, calls and filters of one rendering together
MAX_SECONDS = 2.0  # of wall time and also of this thread's time: garbage collection may add time
MAX_BITS = 60  # of a computed number; smaller numbers have different hashes, so dicts stay fast
MAX_SHOWN_BITS = 4096  # of a number in the conversation
MAX_WIDTH = 1000  # of a field in a format
# characters of a pattern, for searches that may take the product of text and pattern
MAX_PATTERN = 100
MAX_JSON_INDENT = 16
NODE_WEIGHT = 8  # an element of a container counts as so many characters
MAX_COPIES = 64  # all texts together may have so many times the largest text's characters

SLOW_SEARCHES = ("lstrip", "rfind", "rindex", "rpartition", "rsplit", "rstrip", "strip")


class LimitError(TemplateError):
    """A template does too much work, or something that templates may not do."""


class Limits:
    """Counts the work and the sizes of one rendering, and stops it at the limits.

    max_chars: most characters of the output, and of any text or container. A container counts with
    all that is in it, each time that it is in it. So no container can be exponentially larger than
    its text. All new texts together have at most ``MAX_COPIES`` times as many characters.
    """

    def __init__(self, max_chars: int) -> None:
        self.max_chars = max_chars
        self.n_steps = 0
        self.n_chars_shown = 0
        self.n_chars_made = 0
        self.deadline = time.perf_counter() + MAX_SECONDS
        self.cpu_deadline = time.thread_time() + MAX_SECONDS

    def step(self) -> None:
        """Counts one step of work. Raises LimitError if there are too many, or no time is left."""
        self.n_steps += 1
        if self.n_steps > MAX_STEPS:
            raise LimitError(f"it takes more than {MAX_STEPS} steps; does a loop not end?")
        self.timed()

    def timed(self, value: Any = None) -> Any:
        """Returns ``value``. Raises LimitError if no time is left.

        The clock is read first, because the thread's own time takes longer to read.
        """
        if time.perf_counter() > self.deadline and time.thread_time() > self.cpu_deadline:
            raise LimitError(f"it takes longer than {MAX_SECONDS:g} s; does a loop not end?")
        return value

    def fits(self, n_chars: int) -> None:
        """Raises LimitError if n_chars is more than the output may have."""
        if n_chars > self.max_chars:
            raise LimitError(f"it makes a text or list of more than {self.max_chars} characters")

    def makes(self, n_chars: int) -> None:
        """Counts a new text or list. Raises LimitError if it, or all of them, are too large."""
        self.fits(n_chars)
        self.n_chars_made += max(0, n_chars)
        if self.n_chars_made > MAX_COPIES * self.max_chars:
            raise LimitError("its texts and lists have too many characters in all")

    def fits_number(self, n_bits: int) -> None:
        """Raises LimitError for a whole number of more than ``MAX_BITS`` bits."""
        if n_bits > MAX_BITS:
            raise LimitError(f"it makes a number of more than {MAX_BITS} bits")

    def number(self, value: Any) -> Any:
        """Returns ``value``. Raises LimitError for an integer of more than ``MAX_BITS`` bits."""
        if isinstance(value, int):
            self.fits_number(value.bit_length())
        return value

    def built(self, value: Any) -> Any:
        """Returns ``value``, a new text or a new container of existing values. It is measured."""
        self.makes(len(value) if isinstance(value, str) else NODE_WEIGHT * len(value))
        return self.weighed(value)

    def weighed(self, value: Any) -> Any:
        """Returns ``value``. It is measured with all that is in it, which must be plain values."""
        self.step()
        weight = 0
        waiting = [value]
        while waiting:
            item = waiting.pop()
            weight += NODE_WEIGHT
            if isinstance(item, str):
                weight += len(item)
            elif isinstance(item, list | tuple | MappingView):
                self.fits(weight + NODE_WEIGHT * (len(waiting) + len(item)))
                waiting += list(item)  # type: ignore[arg-type]
            elif isinstance(item, dict):
                self.fits(weight + NODE_WEIGHT * (len(waiting) + 2 * len(item)))
                waiting += item.keys()
                waiting += item.values()
            elif isinstance(item, int):
                if item.bit_length() > MAX_SHOWN_BITS:
                    raise LimitError(f"it shows a number of more than {MAX_SHOWN_BITS} bits")
            elif not (item is None or isinstance(item, float | Undefined)):
                kind = type(item).__name__
                raise LimitError(f"it puts a {kind} where a text, number, list or dict belongs")
            self.fits(weight)
        return value

    def text(self, value: Any) -> str:
        """Returns ``str(value)``. The value is measured before its text is made."""
        return value if isinstance(value, str) else str(self.weighed(value))

    def show(self, value: Any) -> str:
        """Returns the text that an expression writes to the output.

        It never has an address in memory.
        """
        self.step()
        text = self.text(value)
        self.n_chars_shown += len(text)
        self.fits(self.n_chars_shown // 4)  # macros and {% set %} blocks show a text again
        return text

    def counted(self, iterable: Iterable[Any]) -> Iterator[Any]:
        """Yields the elements of ``iterable`` and counts a step for each."""
        for item in iterable:
            self.step()
            yield item

    def concatenated(self, parts: Iterable[str]) -> str:
        """Returns the joined texts that a macro or ``{% set %}`` block has written."""
        texts = list(parts)
        self.makes(sum(map(len, texts)))
        return "".join(texts)

    def joined(self, parts: Iterable[Any], separator: str = "") -> str:
        """Returns the texts of ``parts`` with ``separator`` between them."""
        texts: list[str] = []
        n_chars = 0
        for part in self.counted(parts):
            texts.append(self.text(part))
            n_chars += len(texts[-1]) + len(separator)
            self.fits(n_chars)
        self.makes(n_chars)
        return separator.join(texts)

    def replace(self, text: str, old: str, new: str, count: int | None = -1) -> str:
        """Returns ``text.replace(old, new, count)``. count None or negative: all."""
        self.step()
        text = self.text(text)
        n_found = text.count(old)
        if count is None or count < 0:
            count = -1
        else:
            n_found = min(count, n_found)
        self.makes(len(text) + n_found * len(new))
        return text.replace(old, new, count)

    def padded(self, text: str, method: str, width: int = 80, fill: str = " ") -> str:
        """Returns ``text`` padded by str's method ``center``, ``ljust``, ``rjust`` or ``zfill``."""
        self.step()
        self.makes(width)
        return getattr(self.text(text), method)(width, *([] if method == "zfill" else [fill]))

    def indent(
        self, text: str, width: int | str = 4, first: bool = False, blank: bool = False
    ) -> str:
        """Does the same as jinja2's filter ``indent``."""
        self.step()
        n_columns = len(width) if isinstance(width, str) else width
        self.makes(len(text) + (text.count("\n") + 1) * n_columns)
        return filters.do_indent(text, width, first, blank)

    def percent_format(self, text: str, values: Any) -> str:
        """Returns ``text % values``."""
        self.check_format(text, r"\*|\d{4}", [values], text.count("%"))
        return text % values

    def check_brace_format(self, text: str, values: list[Any]) -> None:
        """Checks the size of ``text.format(values)``."""
        if re.search(r"\{[^{}:!]*[.[]", text):
            raise LimitError("it formats a part of a value, which is not allowed")
        self.check_format(text, r"\{[^{}]*\{|\d{4}", values, text.count("{"))

    def check_format(self, text: str, refused: str, values: list[Any], n_fields: int) -> None:
        """Raises LimitError if a format asks for large widths. Counts its result.

        The result counts as if each of n_fields fields had all values. refused: a pattern that may
        not occur.
        """
        if re.search(refused, text):
            raise LimitError(f"it formats with a width beyond {MAX_WIDTH} or one given elsewhere")
        n_chars = sum(len(self.text(value)) for value in values)
        self.makes(len(text) + n_fields * (MAX_WIDTH + n_chars))

    def batch(self, value: Iterable[Any], linecount: int, fill_with: Any = None) -> list[list[Any]]:
        """Does the same as jinja2's filter ``batch``."""
        self.fits(linecount)
        return self.built(list(filters.do_batch(self.counted(value), linecount, fill_with)))

    def round(self, value: float, precision: int = 0, method: Any = "common") -> float:
        """Does the same as jinja2's filter ``round``."""
        self.step()
        if abs(precision) > 100:
            raise LimitError("it rounds to more than 100 places")
        return filters.do_round(value, precision, method)

    def sum(self, values: Iterable[Any], start: float = 0) -> float:
        """Returns the sum of numbers."""
        total = start
        for value in self.counted(values):
            if not isinstance(total, int | float) or not isinstance(value, int | float):
                raise LimitError("it sums what is not numbers")
            total += value
        return self.number(total)

    def tojson(
        self,
        value: Any,
        ensure_ascii: bool = False,
        indent: int | str | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        """Returns JSON as transformers' templates do: it is not escaped for HTML."""
        n_columns = len(indent) if isinstance(indent, str) else indent or 0
        if n_columns > MAX_JSON_INDENT:
            raise LimitError(f"it indents JSON by more than {MAX_JSON_INDENT} columns")
        if separators is not None and sum(map(len, separators)) > MAX_JSON_INDENT:
            raise LimitError(f"it separates JSON by more than {MAX_JSON_INDENT} characters")
        self.weighed(value)
        encoder = json.JSONEncoder(
            ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
        )
        if not n_columns:
            return self.built(encoder.encode(value))
        return self.joined(encoder.iterencode(value))  # in pieces, because indents may be large

    def text_method(self, text: str, name: str) -> Callable[..., Any]:
        """Returns the method ``name`` of ``text``. It raises LimitError for too large results."""
        if name == "replace":
            return lambda *args, **kwargs: self.replace(text, *args, **kwargs)
        if name == "join":
            return lambda parts: self.joined(parts, text)
        if name in ("center", "ljust", "rjust", "zfill"):
            return lambda *args: self.padded(text, name, *args)

        def run(*args: Any, **kwargs: Any) -> Any:
            patterns = [arg for arg in (*args, *kwargs.values()) if isinstance(arg, str)]
            if name in SLOW_SEARCHES and any(len(each) > MAX_PATTERN for each in patterns):
                raise LimitError(f"it searches or strips more than {MAX_PATTERN} characters")
            result = getattr(text, name)(*args, **kwargs)
            self.makes(len(text))  # the result, or the parts that it holds
            return self.weighed(result)

        return run

    def trim(self, value: Any, chars: str | None = None) -> str:
        """Does the same as jinja2's filter ``trim``."""
        return self.text_method(self.text(value), "strip")(chars)
