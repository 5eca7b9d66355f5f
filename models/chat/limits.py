"""What a chat template may use up, and text functions that refuse before they make too much."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterable, Iterator, MappingView
from typing import Any

from jinja2 import TemplateError, filters, utils

MAX_STEPS = 1_000_000  # loop iterations, calls and filters of one rendering
MAX_SECONDS = 1.0
MAX_BITS = 4096  # of a whole number
MAX_WIDTH = 1000  # of a field in a format
MAX_JSON_INDENT = 16
NODE_WEIGHT = 8  # what an element of a container counts, in characters


class LimitError(TemplateError):
    """A template that does too much, or what templates may not do."""


class Limits:
    """The work and the sizes of one rendering.

    max_chars: of the output, and of any text or container on the way.  A container counts with all
    that it holds, as often as it holds it, so nothing is exponentially larger than it looks.
    """

    def __init__(self, max_chars: int) -> None:
        self.max_chars = max_chars
        self.n_steps = 0
        self.n_chars_shown = 0
        self.deadline = time.perf_counter() + MAX_SECONDS

    def step(self) -> None:
        """Counts one piece of work."""
        self.n_steps += 1
        if self.n_steps > MAX_STEPS:
            raise LimitError(f"it takes more than {MAX_STEPS} steps; does a loop not end?")
        if time.perf_counter() > self.deadline:
            raise LimitError(f"it takes longer than {MAX_SECONDS:g} s; does a loop not end?")

    def fits(self, n_chars: int) -> None:
        """Refuses what would be larger than the whole output may be."""
        if n_chars > self.max_chars:
            raise LimitError(f"it makes a text or list of more than {self.max_chars} characters")

    def fits_number(self, n_bits: int) -> None:
        """Refuses a whole number of more than ``MAX_BITS`` bits."""
        if n_bits > MAX_BITS:
            raise LimitError(f"it makes a number of more than {MAX_BITS} bits")

    def weighed(self, value: Any) -> Any:
        """``value``, measured with all that it holds."""
        self.step()
        weight = 0
        waiting = [value]
        while waiting:
            item = waiting.pop()
            weight += NODE_WEIGHT
            if isinstance(item, str | bytes):
                weight += len(item)
            elif isinstance(item, list | tuple | MappingView):
                self.fits(weight + NODE_WEIGHT * (len(waiting) + len(item)))
                waiting += list(item)  # type: ignore[arg-type]
            elif isinstance(item, dict):
                self.fits(weight + NODE_WEIGHT * (len(waiting) + 2 * len(item)))
                waiting += item.keys()
                waiting += item.values()
            elif isinstance(item, int):
                self.fits_number(item.bit_length())
            elif isinstance(item, utils.Namespace):
                raise LimitError("it puts a namespace where a value was expected")
            self.fits(weight)
        return value

    def text(self, value: Any) -> str:
        """``str(value)``, measured first."""
        return value if isinstance(value, str) else str(self.weighed(value))

    def show(self, value: Any) -> str:
        """An expression's value on its way to the output."""
        self.step()
        text = self.text(value)
        self.n_chars_shown += len(text)
        self.fits(self.n_chars_shown // 4)  # macros and {% set %} blocks show a text again
        return text

    def counted(self, iterable: Iterable[Any]) -> Iterator[Any]:
        """``iterable``, each element a step."""
        for item in iterable:
            self.step()
            yield item

    def concatenated(self, parts: Iterable[str]) -> str:
        """What a macro or ``{% set %}`` block has shown, in one text."""
        texts = list(parts)
        self.fits(sum(map(len, texts)))
        return "".join(texts)

    def joined(self, parts: Iterable[Any], separator: str = "") -> str:
        """The texts of ``parts`` with ``separator`` between them."""
        texts: list[str] = []
        n_chars = 0
        for part in self.counted(parts):
            texts.append(self.text(part))
            n_chars += len(texts[-1]) + len(separator)
            self.fits(n_chars)
        return separator.join(texts)

    def replace(self, text: str, old: str, new: str, count: int | None = -1) -> str:
        """``text.replace``; count None or negative: all."""
        self.step()
        text = self.text(text)
        n_found = text.count(old)
        if count is None or count < 0:
            count = -1
        else:
            n_found = min(count, n_found)
        self.fits(len(text) + n_found * len(new))
        return text.replace(old, new, count)

    def padded(self, text: str, method: str, width: int = 80, fill: str = " ") -> str:
        """``text.center``, ``ljust``, ``rjust`` or ``zfill``."""
        self.step()
        self.fits(width)
        return getattr(self.text(text), method)(width, *([] if method == "zfill" else [fill]))

    def indent(
        self, text: str, width: int | str = 4, first: bool = False, blank: bool = False
    ) -> str:
        """jinja2's filter ``indent``."""
        self.step()
        n_columns = len(width) if isinstance(width, str) else width
        self.fits(len(text) + (text.count("\n") + 1) * n_columns)
        return filters.do_indent(text, width, first, blank)

    def percent_format(self, text: str, values: Any) -> str:
        """``text % values``."""
        self.check_format(text, r"\*|\d{4}", [values], text.count("%"))
        return text % values

    def check_brace_format(self, text: str, values: list[Any]) -> None:
        """Bounds what ``text.format`` makes of ``values``."""
        self.check_format(text, r"\{[^{}]*\{|\d{4}", values, text.count("{"))

    def check_format(self, text: str, refused: str, values: list[Any], n_fields: int) -> None:
        """Bounds the result: no large widths, and every field may show all values."""
        if re.search(refused, text):
            raise LimitError(f"it formats with a width beyond {MAX_WIDTH} or one given elsewhere")
        n_chars = sum(len(self.text(value)) for value in values)
        self.fits(len(text) + n_fields * (MAX_WIDTH + n_chars))

    def batch(self, value: Iterable[Any], linecount: int, fill_with: Any = None) -> list[list[Any]]:
        """jinja2's filter ``batch``."""
        self.fits(linecount)
        return self.weighed(list(filters.do_batch(self.counted(value), linecount, fill_with)))

    def round(self, value: float, precision: int = 0, method: Any = "common") -> float:
        """jinja2's filter ``round``."""
        self.step()
        if abs(precision) > 100:
            raise LimitError("it rounds to more than 100 places")
        return filters.do_round(value, precision, method)

    def sum(self, values: Iterable[Any], start: float = 0) -> float:
        """The sum of numbers."""
        total = start
        for value in self.counted(values):
            if not isinstance(total, int | float) or not isinstance(value, int | float):
                raise LimitError("it sums what is not numbers")
            total += value
        return total

    def tojson(
        self,
        value: Any,
        ensure_ascii: bool = False,
        indent: int | str | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        """JSON as transformers' templates have it: not escaped for HTML."""
        n_columns = len(indent) if isinstance(indent, str) else indent or 0
        if n_columns > MAX_JSON_INDENT:
            raise LimitError(f"it indents JSON by more than {MAX_JSON_INDENT} columns")
        if separators is not None and sum(map(len, separators)) > MAX_JSON_INDENT:
            raise LimitError(f"it separates JSON by more than {MAX_JSON_INDENT} characters")
        self.weighed(value)
        text = json.dumps(
            value,
            ensure_ascii=ensure_ascii,
            indent=indent,
            separators=separators,
            sort_keys=sort_keys,
        )
        return self.weighed(text)

    def text_method(self, text: str, name: str) -> Callable[..., Any]:
        """The method of ``text`` called ``name``, refusing what would be too large."""
        if name == "replace":
            return lambda *args, **kwargs: self.replace(text, *args, **kwargs)
        if name == "join":
            return lambda parts: self.joined(parts, text)
        if name in ("center", "ljust", "rjust", "zfill"):
            return lambda *args: self.padded(text, name, *args)
        return lambda *args, **kwargs: self.weighed(getattr(text, name)(*args, **kwargs))
