"""The lists on bench's command line."""

from __future__ import annotations

import click

from sparsekv_cli.commands.options.model import number_list


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


def method_names(_context: click.Context, _parameter: click.Parameter, value: str) -> list[str]:
    names = [name.strip() for name in value.split(",")]
    if not all(names):
        raise click.BadParameter(f"{value!r} has an empty name")
    return names


def at_least_one(context: click.Context, parameter: click.Parameter, value: str) -> list[int]:
    numbers = number_list(context, parameter, value)
    if not all(numbers):
        raise click.BadParameter(f"{value!r}: every number must be 1 or more")
    return numbers
