"""Common parts of the sub-commands of ``eval``: choice of methods, opening the model, records."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from sparsekv_cli.commands.compare.compare import parse
from sparsekv_cli.commands.options import completers
from sparsekv_cli.commands.options.completers import files
from sparsekv_cli.commands.options.long_context import warn_of_long_context
from sparsekv_cli.commands.options.model import (
    ModelOptions,
    build_method,
    find_model,
    load_model,
    prepare_methods,
    with_context,
)
from sparsekv_cli.commands.shared.progress import CompileProgress
from sparsekv_cli.commands.shared.prompt import read_prompt
from sparsekv_cli.generation.conversation import chat_template, encode_messages, messages_of

if TYPE_CHECKING:
    from sparsekv_cli.commands.shared.header import ModelHeader
    from sparsekv_cli.evaluation.ruler.samples import Encode
    from sparsekv_cli.methods.base import Method
    from sparsekv_cli.model import Model


JSON_OPTION = click.option(
    "--json", "as_json", is_flag=True, help="Print one JSON object instead of a table."
)


def methods_option(help_text: str) -> Callable[[Any], Any]:
    """Returns the option ``--method``, which may be repeated."""
    return click.option(
        "--method", "methods", metavar="NAME[:OPTIONS]", multiple=True,
        shell_complete=completers.methods, help=help_text,
    )  # fmt: skip


def records_option(help_text: str) -> Callable[[Any], Any]:
    """Returns the option ``--jsonl``, the file of the records."""
    kind = click.Path(dir_okay=False, path_type=Path)
    return click.option(
        "--jsonl", "path", metavar="FILE", type=kind, shell_complete=files, help=help_text
    )


def ray_option(work: str) -> Callable[[Any], Any]:
    """Returns the option ``--ray``. work: what the nodes do, for the help."""
    where = "on the nodes of a Ray cluster (docs/distributed.md)."
    return click.option("--ray", metavar="ADDRESS|auto", help=f"{work} {where}")


def read_text(file: str | None) -> str:
    """Returns the text of ``-f``, or the piped text."""
    if file is None and sys.stdin.isatty():
        raise click.UsageError("no text: give -f FILE, or pipe one to stdin")
    return read_prompt(None, file, "text", "-f FILE")


def chosen_ways(
    specs: Sequence[str], options: ModelOptions, default: str
) -> dict[str, Method | None]:
    """Returns the methods of ``specs``, or {default: None} without any.

    Raises a usage error for an option of methods if there is no method.
    """
    if specs:
        return dict(chosen_methods(specs, options))
    chosen_methods(["full"], options)
    return {default: None}


def chosen_methods(specs: Sequence[str], options: ModelOptions) -> dict[str, Method]:
    """Returns the methods by their texts. ``full`` is only among them if the user names it."""
    found = parse(",".join(specs), options)
    if not {"full", "all"} & {part.strip() for spec in specs for part in spec.split(",")}:
        del found["full"]
    return found


def open_eval(options: ModelOptions, methods: Sequence[Method | None], n_ctx: int) -> Model:
    """Returns a model with ``full`` for which all methods are calibrated and compiled.

    It is on the CPU unless the user has named a device.
    """
    config = with_context(options.config, n_ctx)
    if config.device == "auto":
        config = replace(config, device="cpu")
    compiling = CompileProgress()
    model = load_model(find_model(options.model), build_method("full", {}), config, compiling)
    warn_of_long_context(model)
    prepare_methods(model, filter(None, methods), compiling)
    return model


def configuration_of(model: Model, **others: Any) -> dict[str, Any]:
    """Returns what all records of a file have in common: model, ``others``, and how it computes."""
    changes = model.config.stated()
    return {
        "model": model.gguf.path.name,
        "model_hash": model.calibrations.identity.model_hash,
        **others,
        **({"changes": changes} if changes else {}),
        "device": model.config.device,
        "prefill_dtype": model.config.prefill_dtype,
        "activations": model.config.activations,
    }


def described(name: str, method: Method | None) -> dict[str, Any]:
    """Returns spec, name and options of a method, as the JSON of all commands has them.

    method: None: it has no options.
    """
    if method is None:
        return {"spec": name, "name": name, "options": {}}
    return {"spec": name, "name": method.name, "options": method.options()}


def encoder(model: Model | ModelHeader, raw: bool) -> Encode:
    """Returns a function (message, start of the answer) -> ids.

    The function applies the model's chat template, unless raw or without a template.
    """
    template = None if raw else chat_template(model.gguf)
    tokenizer = model.tokenizer

    def encode(text: str, answer: str) -> list[int]:
        if template is None:
            return tokenizer.encode(f"{text}\n{answer}", add_eos=False, parse_special=False)
        ids = encode_messages(tokenizer, template, messages_of(None, text))
        return ids + tokenizer.encode(answer, add_bos=False, parse_special=False)

    return encode
