"""Options: fields of frozen dataclasses, each declared once with default, help and bounds.

The methods, the engine and the samplers declare their options with ``option``. The declaration is
used to check a value, to read it from the command line, and for ``sparsekv-cli methods``.
"""

import difflib
import math
import numbers
from collections.abc import Iterable
from dataclasses import Field, dataclass, field, fields
from typing import Any

# largest value of an option without its own bound, because kernels have 32 bits
MAX_WHOLE = 2**31 - 1
MAX_FLOAT, LEAST_FLOAT = 3.4028234e38, 1.1754944e-38  # bounds of f32 values, except 0
TRUTH = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}


@dataclass(frozen=True)
class Allowed:
    """The allowed values of an option: some choices, or numbers within bounds."""

    choices: tuple[Any, ...] = ()
    at_least: float | None = None
    above: float | None = None
    at_most: float | None = None
    below: float | None = None
    multiple_of: int | None = None

    def permits(self, value: Any) -> bool:
        """Returns whether ``value``, of the option's type, is allowed."""
        return (
            (not self.choices or value in self.choices)
            and (self.at_least is None or value >= self.at_least)
            and (self.above is None or value > self.above)
            and (self.at_most is None or value <= self.at_most)
            and (self.below is None or value < self.below)
            and (self.multiple_of is None or value % self.multiple_of == 0)
        )

    def as_dict(self) -> dict[str, Any]:
        """Returns the choices and bounds that are set, by name."""
        named = {each.name: getattr(self, each.name) for each in fields(self)}
        return {name: value for name, value in named.items() if value not in (None, ())}

    def __str__(self) -> str:
        """Returns words: ``a or b``, ``0 or more``, ``1 to 9``, ``above 0 and below 1``.

        ``, a multiple of 4`` may follow. The text is empty if any value is allowed.
        """
        if self.choices:
            *others, last = map(str, self.choices)
            return f"{', '.join(others)} or {last}" if others else last
        words = (
            (self.at_least, "{} or more"),
            (self.above, "above {}"),
            (self.at_most, "at most {}"),
            (self.below, "below {}"),
        )
        bounds = " and ".join(text.format(bound) for bound, text in words if bound is not None)
        if self.at_least is not None and self.at_most is not None:
            bounds = f"{self.at_least} to {self.at_most}"
        step = "" if self.multiple_of is None else f"a multiple of {self.multiple_of}"
        return ", ".join(part for part in (bounds, step) if part)


def option(
    default: Any,
    help: str,
    *,
    choices: Iterable[Any] = (),
    at_least: float | None = None,
    above: float | None = None,
    at_most: float | None = None,
    below: float | None = None,
    multiple_of: int | None = None,
    flags: tuple[str, ...] = (),
    metavar: str | None = None,
) -> Any:
    """Returns a dataclass field that is an option. The option has the type of its default.

    flags: its spellings on the command line; empty: ``--`` and its name. metavar: the word for its
    value in the help.
    """
    allowed = Allowed(tuple(choices), at_least, above, at_most, below, multiple_of)
    metadata = {"help": help, "allowed": allowed, "flags": flags, "metavar": metavar}
    return field(default=default, metadata=metadata)


def options_of(owner: Any) -> dict[str, Field[Any]]:
    """Returns name -> field of the options of a dataclass, or of an instance."""
    return {each.name: each for each in fields(owner) if "allowed" in each.metadata}


def allowed_values(declared: Field[Any]) -> Allowed:
    """Returns the choices and bounds of an option."""
    return declared.metadata["allowed"]


def check_options(owner: Any) -> None:
    """Raises ValueError, with option and value, if an option of ``owner`` has a wrong value."""
    for declared in options_of(owner).values():
        check_value(declared, getattr(owner, declared.name))


def check_value(declared: Field[Any], value: Any) -> None:
    """Raises ValueError unless ``value`` has the type of the option's default and is allowed.

    Whole numbers without a bound of their own must fit 32 bits, other numbers f32.
    """
    kind, allowed = _kind(declared), allowed_values(declared)
    wanted = ""
    if kind in (int, float):
        number = numbers.Integral if kind is int else numbers.Real
        is_number = isinstance(value, number) and not isinstance(value, bool)
        if not is_number:
            wanted = _number_words(kind)
        elif kind is int and allowed.at_most is None and abs(value) > MAX_WHOLE:
            wanted = f"from {-MAX_WHOLE} to {MAX_WHOLE}"
        elif kind is float and (value != value or abs(value) == math.inf):
            wanted = "finite"
        elif kind is float and value != 0 and not LEAST_FLOAT <= abs(value) <= MAX_FLOAT:
            wanted = f"0, or from {LEAST_FLOAT:.1e} to {MAX_FLOAT:.1e} in size"
    elif not isinstance(value, kind):
        wanted = f"of type {kind.__name__}"
    if not wanted and not allowed.permits(value):
        wanted = str(allowed)
    if wanted:
        shown = repr(value) if not isinstance(value, numbers.Real) else _short(value)
        raise ValueError(f"{declared.name} = {shown}: must be {wanted}")


def parse_number_or_word(declared: Field[Any], text: str) -> Any:
    """Returns ``text`` as the value of an option that is a number, a word or true/false.

    Raises ValueError as ``check_value`` does.
    """
    kind = _kind(declared)
    if kind is bool:
        if text.lower() not in TRUTH:
            raise ValueError(f"{declared.name} = {text!r}: must be true or false")
        return TRUTH[text.lower()]
    try:
        value = kind(text)
    except ValueError:
        raise ValueError(f"{declared.name} = {text!r}: must be {_number_words(kind)}") from None
    check_value(declared, value)
    return value


def _kind(declared: Field[Any]) -> Any:
    return type(declared.default)


def _short(value: Any) -> str:
    """Returns a number for a message. Numbers of 40 and more digits become words."""
    is_long = isinstance(value, int) and abs(value) >= 10**40
    return "a very large number" if is_long else str(value)


def _number_words(kind: type) -> str:
    return "a whole number" if kind is int else "a number"


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Returns `` (did you mean NAME?)`` with the name most like ``word``; "" if none is like it."""
    names = {name.casefold(): name for name in known}
    close = difflib.get_close_matches(word.casefold(), list(names), 1)
    return f" (did you mean {names[close[0]]}?)" if close else ""
