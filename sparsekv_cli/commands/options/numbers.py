"""Types of numbers and lists for options of the command line."""

import contextlib
import math
from typing import Any

import click

from sparsekv_cli.settings.option import MAX_WHOLE, Allowed


def _words(least: float | None, most: float | None) -> str:
    """Returns the bounds of a number as words after a comma; "" without bounds."""
    bounds = str(Allowed(at_least=least, at_most=None if most == MAX_WHOLE else most))
    return f", {bounds}" if bounds else ""


class WholeRange(click.IntRange):
    """A whole number in a range. Its errors say in words what is expected."""

    name = "whole number"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        try:
            return super().convert(value, param, ctx)
        except click.BadParameter:
            words = _words(self.min, self.max)
            self.fail(f"{value!r}: expected a whole number{words}", param, ctx)


class FiniteRange(click.FloatRange):
    """A number in a range. It refuses ``inf`` and ``nan``; click's range accepts ``nan``."""

    name = "number"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        with contextlib.suppress(click.BadParameter):
            if math.isfinite(number := super().convert(value, param, ctx)):
                return number
        self.fail(f"{value!r}: expected a number{_words(self.min, self.max)}", param, ctx)


class Percent(click.ParamType):
    """A share, such as 15%. Its value is from 0 to 1."""

    name = "percent"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        if isinstance(value, float):
            return value
        with contextlib.suppress(ValueError):
            if 0 <= (number := float(value.removesuffix("%"))) <= 100:
                return number / 100
        self.fail(f"{value!r}: expected a share from 0% to 100%", param, ctx)


def number_list(_context: click.Context, _parameter: click.Parameter, value: str) -> list[int]:
    """Callback of an option with numbers between commas: returns them."""
    numbers = [part.strip() for part in value.split(",")]
    if not all(number.isdecimal() for number in numbers):
        raise click.BadParameter(f"{value!r} is not a list of whole numbers such as 0,8192")
    return [int(number) for number in numbers]


def at_least_one(context: click.Context, parameter: click.Parameter, value: str) -> list[int]:
    numbers = number_list(context, parameter, value)
    if not all(numbers):
        raise click.BadParameter(f"{value!r}: every number must be 1 or more")
    return numbers


def pairs_of_numbers(
    _context: click.Context, _parameter: click.Parameter, values: tuple[str, ...]
) -> list[tuple[int, int]]:
    pairs = []
    for value in values:
        prompt, comma, gen = value.partition(",")
        if not (comma and prompt.isdecimal() and gen.isdecimal() and int(prompt) and int(gen)):
            raise click.BadParameter(f"{value!r} is not PROMPT,GEN with two numbers above 0")
        pairs.append((int(prompt), int(gen)))
    return pairs


def name_list(_context: click.Context, _parameter: click.Parameter, value: str) -> list[str]:
    names = [name.strip() for name in value.split(",")]
    if not all(names):
        raise click.BadParameter(f"{value!r} has an empty name")
    return names
