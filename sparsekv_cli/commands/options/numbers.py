"""Numbers and lists on the command line."""

import math
from typing import Any

import click


class FiniteRange(click.FloatRange):
    """A number in a range. It refuses ``inf``, and ``nan``, which every range would contain."""

    name = "number"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        number = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value!r} is not a finite number", param, ctx)
        return number


def number_list(_context: click.Context, _parameter: click.Parameter, value: str) -> list[int]:
    """Callback of an option that takes numbers separated by commas. Returns them."""
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
