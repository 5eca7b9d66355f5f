"""A Jinja environment for templates that nobody has read: no escape, bounded work, bounded memory.

jinja2's sandbox keeps a template away from Python's internals, but not from ``'a' * 10**10`` or from
loops in loops; and a call that hangs inside C cannot be interrupted.  So every operation that can
make something large is checked before it runs: the syntax tree is rewritten so that loops are
counted and new lists, tuples, dicts and ``~`` texts are measured; operators, methods and filters are
those of a list, each with its own check.  A container counts with all that it holds, as often as it
holds it, so nothing is exponentially larger than it looks.
"""

from __future__ import annotations

import functools
import json
import re
import time
from collections.abc import Callable, Iterable, Iterator, MappingView
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import TemplateError, Undefined, filters, nodes, runtime, utils
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

MAX_STEPS = 1_000_000  # loop iterations, calls and filters of one rendering
MAX_SECONDS = 1.0
MAX_BITS = 4096  # of a whole number
MAX_WIDTH = 1000  # of padding and indents
NODE_WEIGHT = 8  # what an element of a container counts, in characters

COUNTED, JOINED, BUILT = "(counted)", "(joined)", "(built)"  # filters of ours, no name in Jinja

STR_METHODS = frozenset(
    [
        "capitalize",
        "casefold",
        "center",
        "count",
        "endswith",
        "find",
        "format",
        "index",
        "isalnum",
        "isalpha",
        "isascii",
        "isdecimal",
        "isdigit",
        "islower",
        "isnumeric",
        "isspace",
        "istitle",
        "isupper",
        "join",
        "ljust",
        "lower",
        "lstrip",
        "partition",
        "removeprefix",
        "removesuffix",
        "replace",
        "rfind",
        "rindex",
        "rjust",
        "rpartition",
        "rsplit",
        "rstrip",
        "split",
        "splitlines",
        "startswith",
        "strip",
        "swapcase",
        "title",
        "upper",
        "zfill",
    ]
)
METHODS: dict[type, frozenset[str]] = {
    str: STR_METHODS,
    dict: frozenset(("get", "items", "keys", "values", "copy")),
    list: frozenset(("count", "index", "copy")),
    tuple: frozenset(("count", "index")),
}
MEASURED = (str, list, tuple, dict, MappingView, utils.Namespace)
FILTERS = (  # of jinja2's own, safe with bounded input
    "abs capitalize count d default dictsort e escape first float groupby int items last length "
    "list lower map max min reject rejectattr reverse safe select selectattr sort string title trim "
    "truncate unique upper wordcount"
).split()


class LimitError(TemplateError):
    """A template that does too much."""


class GenerationTag(Extension):
    """``{% generation %}`` marks the model's part of a text for training; here it does nothing."""

    tags = frozenset({"generation"})

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class Instrument(NodeTransformer):
    """Puts our filters around what makes a template work long or hold much."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        node.iter = through(COUNTED, node.iter)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return through(JOINED, nodes.List(node.nodes, lineno=node.lineno))

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:
        self.generic_visit(node)
        return through(BUILT, node) if node.ctx == "load" else node

    def visit_List(self, node: nodes.List) -> nodes.Node:
        self.generic_visit(node)
        return through(BUILT, node)

    def visit_Dict(self, node: nodes.Dict) -> nodes.Node:
        self.generic_visit(node)
        return through(BUILT, node)


def through(name: str, node: nodes.Expr) -> nodes.Filter:
    """``node`` piped through the filter ``name``."""
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """The environment of one rendering.

    max_chars: of the output, and of any text or container on the way.
    """

    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def __init__(self, max_chars: int) -> None:
        self.max_chars = max_chars
        self.n_steps = 0
        self.n_chars_shown = 0
        self.deadline = time.perf_counter() + MAX_SECONDS
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=["jinja2.ext.loopcontrols", GenerationTag],
            finalize=self.show,
        )
        self.concat = self.join_output  # type: ignore[method-assign,assignment]
        own: dict[str, Callable[..., Any]] = {
            COUNTED: self.counted,
            JOINED: lambda parts: self.joined(parts, ""),
            BUILT: self.weighed,
            "join": self.join_filter,
            "replace": lambda text, old, new, count=-1: self.replace(
                to_text(text), old, new, count
            ),
            "indent": self.indent,
            "center": lambda text, width=80: self.padded(to_text(text).center, width),
            "format": self.format_filter,
            "batch": self.batch,
            "round": self.round,
            "sum": self.sum,
            "tojson": self.tojson,
        }
        kept = {name: self.stepped(filters.FILTERS[name]) for name in FILTERS}
        self.filters = {**kept, **own}
        self.globals = {
            name: self.globals[name] for name in ("range", "dict", "namespace", "cycler", "joiner")
        }
        self.globals["raise_exception"] = raise_exception
        self.globals["strftime_now"] = strftime_now

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = Instrument().visit(super()._parse(source, name, filename))
        tree.set_environment(self)
        return tree

    # limits

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

    def weighed(self, value: Any) -> Any:
        """``value``, measured with all that it holds."""
        self.step()
        weight, waiting = 0, [value]
        while waiting:
            item = waiting.pop()
            weight += NODE_WEIGHT
            if isinstance(item, str | bytes):
                weight += len(item)
            elif isinstance(item, list | tuple | MappingView):
                self.fits(weight + NODE_WEIGHT * (len(waiting) + len(item)))
                waiting += item
            elif isinstance(item, dict):
                self.fits(weight + NODE_WEIGHT * (len(waiting) + 2 * len(item)))
                waiting += item.keys()
                waiting += item.values()
            elif isinstance(item, int) and item.bit_length() > MAX_BITS:
                raise LimitError(f"it makes a number of more than {MAX_BITS} bits")
            elif isinstance(item, utils.Namespace):
                raise LimitError("it puts a namespace where a value was expected")
            self.fits(weight)
        return value

    def stepped(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """A filter of jinja2's that counts as a step, its input and result measured."""

        @functools.wraps(function)  # with jinja2's mark of what it wants passed first
        def run(*args: Any, **kwargs: Any) -> Any:
            for arg in args:
                if isinstance(arg, MEASURED):
                    self.weighed(arg)
            result = function(*args, **kwargs)
            return self.weighed(result) if isinstance(result, MEASURED) else result

        return run

    # output

    def show(self, value: Any) -> Any:
        """An expression's value on its way to the output (jinja2's ``finalize``)."""
        if not isinstance(value, str):
            value = self.to_text(value)
        self.step()
        self.n_chars_shown += len(value)
        if self.n_chars_shown > 4 * self.max_chars:  # macros and {% set %} show a text again
            self.fits(self.n_chars_shown)
        return value

    def to_text(self, value: Any) -> str:
        """``str(value)``, measured first."""
        return value if isinstance(value, str) else str(self.weighed(value))

    def join_output(self, parts: Iterable[str]) -> str:
        """What a macro or ``{% set %}`` block has shown, in one text (jinja2's ``concat``)."""
        parts = list(parts)
        self.fits(sum(map(len, parts)))
        return "".join(parts)

    # operators and calls

    def call_binop(self, context: runtime.Context, operator: str, left: Any, right: Any) -> Any:
        """``left operator right`` where the operator can make something large."""
        if operator == "%" and isinstance(left, str):
            return self.percent_format(left, right)
        if operator == "*":
            for sized, times in ((left, right), (right, left)):
                if isinstance(sized, str | list | tuple) and isinstance(times, int):
                    self.weighed(sized)
                    self.fits(len(sized) * times)
        bits = [abs(int(x)).bit_length() for x in (left, right) if isinstance(x, int)]
        if len(bits) == 2 and operator in ("*", "**"):
            made = bits[0] + bits[1] if operator == "*" else bits[0] * abs(right)
            if made > MAX_BITS:
                raise LimitError(f"it makes a number of more than {MAX_BITS} bits")
        if operator == "+" and isinstance(left, str) and isinstance(right, str):
            self.fits(len(left) + len(right))
        result = super().call_binop(context, operator, left, right)
        return self.weighed(result) if isinstance(result, list | tuple) else result

    def call(__self, __context: runtime.Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """A call in a template: our functions, macros, and methods of a list."""
        __self.step()
        method = getattr(__obj, "__wrapped__", __obj)  # jinja2 wraps str.format
        owner, name = getattr(method, "__self__", None), getattr(method, "__name__", "")
        if isinstance(owner, str | dict | list | tuple):
            allowed = next(names for kind, names in METHODS.items() if isinstance(owner, kind))
            if name not in allowed:
                raise LimitError(f"it calls the method {name}, which templates may not use")
            if isinstance(owner, str) and name == "format":
                __self.check_format(
                    owner, r"\{[^{}]*\{|\d{4}", [*args, *kwargs.values()], owner.count("{")
                )
            elif isinstance(owner, str):
                return __self.weighed(__self.call_text_method(owner, name, args, kwargs))
        elif not (
            isinstance(__obj, runtime.Macro | runtime.LoopContext | utils.Joiner)
            or isinstance(owner, runtime.LoopContext | utils.Cycler)
            or any(__obj is known for known in __self.globals.values())
        ):
            if isinstance(__obj, Undefined):
                __obj._fail_with_undefined_error()
            raise LimitError(f"it calls {type(__obj).__name__} {name}, which templates may not use")
        result = super().call(__context, __obj, *args, **kwargs)
        return __self.weighed(result) if isinstance(result, list | dict | str) else result

    def call_text_method(
        self, text: str, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """``text.name(*args)``, refused where the result would be too large."""
        if name == "replace":
            return self.replace(text, *args, **kwargs)
        if name == "join":
            return self.joined(*args, text)
        if name in ("center", "ljust", "rjust", "zfill"):
            return self.padded(getattr(text, name), *args)
        return getattr(text, name)(*args, **kwargs)

    # checked text functions

    def counted(self, iterable: Iterable[Any]) -> Iterator[Any]:
        """``iterable``, each element a step."""
        for item in iterable:
            self.step()
            yield item

    def joined(self, parts: Iterable[Any], separator: str) -> str:
        """The texts of ``parts`` with ``separator`` between them."""
        texts, n_chars = [], 0
        for part in self.counted(parts):
            texts.append(self.to_text(part))
            n_chars += len(texts[-1]) + len(separator)
            self.fits(n_chars)
        return separator.join(texts)

    def join_filter(self, value: Iterable[Any], d: str = "", attribute: Any = None) -> str:
        if attribute is not None:
            value = map(filters.make_attrgetter(self, attribute), value)
        return self.joined(value, self.to_text(d))

    def replace(self, text: str, old: str, new: str, count: int | None = -1) -> str:
        count = -1 if count is None else count
        n_found = text.count(old) if count < 0 else min(count, text.count(old))
        self.fits(len(text) + n_found * len(new))
        return text.replace(old, new, count)

    def padded(self, method: Callable[..., str], width: int, fill: str = " ") -> str:
        self.fits(width)
        return method(width) if fill == " " else method(width, fill)

    def indent(
        self, text: str, width: int | str = 4, first: bool = False, blank: bool = False
    ) -> str:
        n_columns = len(width) if isinstance(width, str) else width
        self.fits(len(text) + (text.count("\n") + 1) * n_columns)
        return filters.do_indent(text, width, first, blank)

    def format_filter(self, text: str, *args: Any, **kwargs: Any) -> str:
        return self.percent_format(self.to_text(text), kwargs or args)

    def percent_format(self, text: str, values: Any) -> str:
        self.check_format(text, r"\*|\d{4}", [values], text.count("%"))
        return self.weighed(text % values)

    def check_format(self, text: str, refused: str, values: list[Any], n_fields: int) -> None:
        """Bounds the result: no large widths, and every field may show all values."""
        if re.search(refused, text):
            raise LimitError(f"it formats with a width beyond {MAX_WIDTH} or one given elsewhere")
        n_chars = sum(len(self.to_text(value)) for value in values)
        self.fits(len(text) + n_fields * (MAX_WIDTH + n_chars))

    def batch(self, value: Iterable[Any], linecount: int, fill_with: Any = None) -> list[list[Any]]:
        self.fits(linecount)
        return self.weighed(list(filters.do_batch(self.counted(value), linecount, fill_with)))

    def round(self, value: float, precision: int = 0, method: Any = "common") -> float:
        if abs(precision) > 100:
            raise LimitError("it rounds to more than 100 places")
        return filters.do_round(value, precision, method)

    def sum(self, iterable: Iterable[Any], attribute: Any = None, start: Any = 0) -> Any:
        if attribute is not None:
            iterable = map(filters.make_attrgetter(self, attribute), iterable)
        total = start
        for value in self.counted(iterable):
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
        """As transformers has it: not escaped for HTML."""
        n_columns = len(indent) if isinstance(indent, str) else indent or 0
        if n_columns > 16:
            raise LimitError("it indents JSON by more than 16 columns")
        self.weighed([value, separators])
        return self.weighed(
            json.dumps(
                value,
                ensure_ascii=ensure_ascii,
                indent=indent,
                separators=separators,
                sort_keys=sort_keys,
            )
        )


def to_text(value: Any) -> str:
    """A filter's input that must be a text already."""
    if not isinstance(value, str):
        raise LimitError(f"a text was expected, not {type(value).__name__}")
    return value


def raise_exception(message: Any = "") -> NoReturn:
    """A template's own refusal, e.g. of roles that do not alternate."""
    raise TemplateError(str(message)[:1000])


def strftime_now(format: str) -> str:
    """The local time by a strftime format of at most 100 characters."""
    if len(format) > 100 or re.search(r"%[-_0^#]*\d", format):
        raise LimitError("it formats the time with a width or more than 100 characters")
    return datetime.now().strftime(format)
