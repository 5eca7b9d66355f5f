"""A Jinja environment for untrusted templates: no access to Python, limited work and memory.

jinja2's sandbox protects Python's internals, but it allows ``'a' * 10**10`` and loops in loops. A
call that hangs inside C cannot be interrupted. So each operation that can make something large is
checked before it runs. For that, the syntax tree is rewritten: loops and comparisons are counted.
New lists, tuples, dicts, slices and ``~`` texts are measured. Only the operators, methods and
filters that are listed here are allowed. If a call still hangs, the process ends (watchdog.py).
"""

import functools
import re
from collections.abc import Callable, Iterable, MappingView
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import TemplateError, Undefined, filters, nodes, pass_context, runtime, utils
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from sparsekv_cli.models.chat.limits import MAX_BITS, NODE_WEIGHT, LimitError, Limits

# Names of our own filters, which no template can write.
COUNTED, JOINED, BUILT, SLICED, TIMED = "(counted)", "(joined)", "(built)", "(sliced)", "(timed)"

STR_METHODS = (
    *("capitalize", "casefold", "center", "count", "endswith", "find", "format", "index"),
    *("isalnum", "isalpha", "isascii", "isdecimal", "isdigit", "islower", "isnumeric", "isspace"),
    *("istitle", "isupper", "join", "ljust", "lower", "lstrip", "partition", "removeprefix"),
    *("removesuffix", "replace", "rfind", "rindex", "rjust", "rpartition", "rsplit", "rstrip"),
    *("split", "splitlines", "startswith", "strip", "swapcase", "title", "upper", "zfill"),
)
METHODS: dict[type, tuple[str, ...]] = {
    str: STR_METHODS,
    dict: ("get", "items", "keys", "values", "copy"),
    list: ("count", "index", "copy"),
    tuple: ("count", "index"),
}
FILTERS = (  # jinja2's filters with a result that is about as large as the input
    *("abs", "capitalize", "count", "d", "default", "dictsort", "e", "escape", "first", "float"),
    *("groupby", "int", "items", "last", "length", "list", "lower", "map", "max", "min", "reject"),
    *("rejectattr", "reverse", "safe", "select", "selectattr", "sort", "string", "title"),
    *("truncate", "unique", "upper", "wordcount"),
)
ITERATING = (  # filters in FILTERS that accept any iterable
    *("first", "groupby", "list", "map", "max", "min", "reject", "rejectattr", "select"),
    *("selectattr", "sort", "unique"),
)
TEXT_FILTERS = (  # filters in FILTERS that convert any value to text
    *("capitalize", "e", "escape", "lower", "safe", "string", "title", "truncate", "upper"),
    "wordcount",
)
MAX_NODES = 8000  # nodes of the syntax tree; compiling a node takes about 0.1 ms
GLOBALS = ("range", "dict", "namespace", "cycler", "joiner")
MEASURED = (str, list, tuple, dict, MappingView)


class RefusalError(TemplateError):
    """A template has called ``raise_exception`` with this text."""


class GenerationTag(Extension):
    """Ignores ``{% generation %}``, which marks the model's part of a text for training."""

    tags = {"generation"}  # noqa: RUF012  jinja2 declares it so

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class Instrument(NodeTransformer):
    """Sends values through filters of this module where a node may take long or much memory."""

    n_nodes = 0

    def generic_visit(self, node: nodes.Node, *args: Any, **kwargs: Any) -> nodes.Node:
        self.n_nodes += 1
        if self.n_nodes > MAX_NODES:
            raise LimitError(f"it has more than {MAX_NODES} parts")
        return super().generic_visit(node, *args, **kwargs)

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        node.iter = through(COUNTED, node.iter)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return through(JOINED, nodes.List(node.nodes, lineno=node.lineno))

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        self.generic_visit(node)
        for operand in node.ops:
            operand.expr = through(TIMED, operand.expr)
        return node

    def visit_Test(self, node: nodes.Test) -> nodes.Node:
        self.generic_visit(node)
        node.node = through(TIMED, node.node)
        return node

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        self.generic_visit(node)
        return through(SLICED, node) if isinstance(node.arg, nodes.Slice) else node

    def visit_Const(self, node: nodes.Const) -> nodes.Node:
        if isinstance(node.value, int) and node.value.bit_length() > MAX_BITS:
            raise LimitError(f"it has a number of more than {MAX_BITS} bits")
        return self.generic_visit(node)

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:
        self.generic_visit(node)
        return through(BUILT, node) if node.ctx == "load" else node

    def visit_List(self, node: nodes.List) -> nodes.Node:
        self.generic_visit(node)
        return through(BUILT, node)

    def visit_Dict(self, node: nodes.Dict) -> nodes.Node:
        self.generic_visit(node)
        return through(BUILT, node)


def through(name: str, node: nodes.Node) -> nodes.Filter:
    """Returns ``node`` piped through the filter ``name``."""
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


def runtime_only(function: Callable[[Any], Any]) -> Callable[..., Any]:
    """Returns a filter that jinja2's compiler does not apply to constants."""
    return pass_context(lambda _context, value: function(value))


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """The environment of one rendering. Its options and names are those of transformers."""

    intercepted_binops = frozenset(("+", "-", "*", "**", "%"))

    def __init__(self, limits: Limits, clock: datetime | None = None) -> None:
        """clock: the time that a template reads; None: the present time."""
        self.limits = limits
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=["jinja2.ext.loopcontrols", GenerationTag],
            finalize=limits.show,
        )
        self.concat = limits.concatenated  # type: ignore[method-assign]
        self.filters = {
            **{name: self.measured(name, filters.FILTERS[name]) for name in FILTERS},
            COUNTED: limits.counted,
            JOINED: limits.joined,
            BUILT: limits.built,
            SLICED: self.computed,
            TIMED: runtime_only(limits.timed),
            "batch": limits.batch,
            "center": lambda text, width=80: limits.padded(text, "center", width),
            "format": lambda text, *args, **kwargs: limits.percent_format(
                limits.text(text), kwargs or args
            ),
            "indent": limits.indent,
            "join": self.join,
            "replace": limits.replace,
            "round": limits.round,
            "sum": self.sum,
            "tojson": limits.tojson,
            "trim": limits.trim,
        }
        self.tests = {
            **self.tests,
            "lower": lambda value: limits.text(value).islower(),
            "upper": lambda value: limits.text(value).isupper(),
        }
        self.globals = {name: self.globals[name] for name in GLOBALS}
        now = functools.partial(strftime_now, clock)
        self.globals.update(raise_exception=raise_exception, strftime_now=now)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = Instrument().visit(super()._parse(source, name, filename))
        tree.set_environment(self)
        return tree

    def measured(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Returns jinja2's filter ``name``, with limits.

        It counts a step for itself and one for each element of its input. Its result is measured.
        The text of an input value is measured before it is made.
        """
        # position of the filtered value in the arguments
        place = 1 if hasattr(function, "jinja_pass_arg") else 0

        @functools.wraps(function)  # keeps jinja2's mark of its first argument
        def run(*args: Any, **kwargs: Any) -> Any:
            limits = self.limits
            limits.step()
            value = args[place]
            if name in TEXT_FILTERS:
                args = (*args[:place], limits.text(value), *args[place + 1 :])
            elif name in ITERATING and value:
                args = (*args[:place], limits.counted(value), *args[place + 1 :])
            result = function(*args, **kwargs)
            if any(result is arg for arg in args):
                return result
            return limits.number(result) if name == "int" else self.computed(result)

        return run

    def computed(self, value: Any) -> Any:
        """Returns ``value``. A text or container is measured first."""
        return self.limits.built(value) if isinstance(value, MEASURED) else value

    def join(self, value: Iterable[Any], d: str = "", attribute: Any = None) -> str:
        """Does the same as jinja2's filter ``join``."""
        if attribute is not None:
            value = map(filters.make_attrgetter(self, attribute), value)
        return self.limits.joined(value, self.limits.text(d))

    def sum(self, iterable: Iterable[Any], attribute: Any = None, start: float = 0) -> float:
        """Does the same as jinja2's filter ``sum``, for numbers only."""
        if attribute is not None:
            iterable = map(filters.make_attrgetter(self, attribute), iterable)
        return self.limits.sum(iterable, start)

    def call_binop(self, context: runtime.Context, operator: str, left: Any, right: Any) -> Any:
        """Returns the result of a binary operator. Its size is checked before it is computed."""
        limits = self.limits
        limits.step()
        if operator == "%" and isinstance(left, str):
            return limits.percent_format(left, right)
        if isinstance(left, int) and isinstance(right, int):
            n_bits = left.bit_length()
            if operator == "*":
                limits.fits_number(n_bits + right.bit_length())
            elif operator == "**":
                limits.fits_number(n_bits * abs(right))
        elif operator == "*":
            for sized, times in ((left, right), (right, left)):
                if isinstance(sized, str | list | tuple) and isinstance(times, int):
                    limits.fits(len(sized) * times)
        elif operator == "+" and isinstance(left, str) and isinstance(right, str):
            limits.fits(len(left) + len(right))
        result = super().call_binop(context, operator, left, right)
        return limits.number(self.computed(result))

    def call(__self, __context: runtime.Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """Runs a call in a template: of our functions, macros, and the listed methods."""
        limits = __self.limits
        limits.step()
        limits.makes(NODE_WEIGHT * len(args))  # *args may be any number
        method = getattr(__obj, "__wrapped__", __obj)  # jinja2 wraps str.format
        owner, name = getattr(method, "__self__", None), getattr(method, "__name__", "")
        if isinstance(owner, str | dict | list | tuple):
            if not any(isinstance(owner, kind) and name in METHODS[kind] for kind in METHODS):
                raise LimitError(f"it calls the method {name}, which templates may not use")
            own = {key: kwargs[key] for key in kwargs if key not in ("_loop_vars", "_block_vars")}
            if isinstance(owner, str) and name != "format":
                return limits.text_method(owner, name)(*args, **own)
            if isinstance(owner, str):
                limits.check_brace_format(owner, [*args, *own.values()])
        elif isinstance(__obj, Undefined):
            __obj._fail_with_undefined_error()
        elif not (
            isinstance(__obj, runtime.Macro | runtime.LoopContext | utils.Joiner)
            or isinstance(owner, runtime.LoopContext | utils.Cycler)
            or any(__obj is known for known in __self.globals.values())
        ):
            raise LimitError(f"it calls {name or type(__obj).__name__}, which templates may not")
        elif __obj in (dict, utils.Namespace):
            args = tuple(arg if isinstance(arg, dict) else limits.counted(arg) for arg in args)
        result = super().call(__context, __obj, *args, **kwargs)
        return limits.weighed(result) if isinstance(result, str | list | tuple | dict) else result


def raise_exception(message: Any = "") -> NoReturn:
    """Raises RefusalError: a template refuses a conversation, e.g. roles that do not alternate."""
    raise RefusalError(message if isinstance(message, str) else type(message).__name__)


def strftime_now(clock: datetime | None, format: str) -> str:
    """Returns the time ``clock`` in a strftime format of at most 100 characters.

    clock: None: the present local time.
    """
    if len(format) > 100 or re.search(r"%[-_0^#]*\d", format):
        raise LimitError("it formats the time with a width or more than 100 characters")
    return (clock or datetime.now()).strftime(format)
