"""``-v``, and what a command line says of itself to the whole process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import click

Function = TypeVar("Function", bound=Callable[..., Any])


@dataclass
class Invocation:
    """Settings of one command line for the whole process (click's context object)."""

    verbose: bool = False


def verbose_option(function: Function) -> Function:
    """Adds ``-v``, for tracebacks and more on stderr. It works before and after the command."""

    def remember(context: click.Context, _parameter: click.Parameter, value: bool) -> None:
        if value:
            context.ensure_object(Invocation).verbose = True

    return click.option(
        "-v",
        "--verbose",
        is_flag=True,
        expose_value=False,
        is_eager=True,
        callback=remember,
        help="Say more on stderr; show the traceback of an error.",
    )(function)
