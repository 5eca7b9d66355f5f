"""Completions for a shell: paths, models, methods, and options of methods."""

from typing import Any

import click
from click.shell_completion import CompletionItem

from sparsekv_cli.settings.option import allowed_values, options_of


def files(_: click.Context, _parameter: click.Parameter, text: str) -> list[CompletionItem]:
    """Returns an item that asks the shell itself to complete a path."""
    return [CompletionItem(text, type="file")]


def models(_: click.Context, _parameter: click.Parameter, text: str) -> list[CompletionItem]:
    """Returns names of models that -m finds; without one, an item for paths."""
    from sparsekv_cli.models.sources.folder import models_by_name
    from sparsekv_cli.models.sources.hub import cached_models
    from sparsekv_cli.models.sources.locate import PACKAGED_MODELS

    names = [*PACKAGED_MODELS, *models_by_name(), *(each.name for each in cached_models())]
    found = [CompletionItem(n) for n in names if n.startswith(text) and n.isprintable()]
    return found or [CompletionItem(text, type="file")]


def methods(_: click.Context, _parameter: click.Parameter, text: str) -> list[CompletionItem]:
    """Returns names of methods, for the last part of a list with commas."""
    from sparsekv_cli.methods import METHODS

    before, comma, name = text.rpartition(",")
    return [CompletionItem(before + comma + each) for each in METHODS if each.startswith(name)]


def method_options(
    context: click.Context, _parameter: click.Parameter, text: str
) -> list[CompletionItem]:
    """Returns the options of the method on the command line, each with its choices or default."""
    from sparsekv_cli.methods import METHODS, method_class

    name = str(context.params.get("method") or "full").partition(",")[0]
    items: list[CompletionItem] = []
    for key, declared in options_of(method_class(name)).items() if name in METHODS else ():
        values: tuple[Any, ...] = allowed_values(declared).choices or (declared.default,)
        if isinstance(declared.default, tuple):
            values = (",".join(map(str, declared.default)),)
        texts = [f"{key}={str(value).partition(' ')[0]}" for value in values]
        items += [
            CompletionItem(each, help=declared.metadata["help"])
            for each in texts
            if each.startswith(text)
        ]
    return items
