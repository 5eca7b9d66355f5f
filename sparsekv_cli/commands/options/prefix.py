"""Options of the prefix cache on disk, for the commands that use it."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from sparsekv_cli.commands.options.model import gathered
from sparsekv_cli.commands.options.numbers import FiniteRange, Percent
from sparsekv_cli.commands.options.verbose import Invocation
from sparsekv_cli.commands.shared.terminal import one_line, say
from sparsekv_cli.errors import SparseKVError
from sparsekv_cli.settings.option import TRUTH

if TYPE_CHECKING:
    from sparsekv_cli.methods.base import Method
    from sparsekv_cli.model import Model
    from sparsekv_cli.prefix.prefixes import Prefixes

SWITCH = "SPARSEKV_NO_CACHE"

DIRECTORY_OPTION = click.option(
    "--cache-dir", metavar="DIR", type=click.Path(file_okay=False, path_type=Path),
    help="Folder of kept prompts. [default: sparsekv-cli/prefixes in the user's cache]",
)  # fmt: skip

FOLDER: list[Callable[[Any], Any]] = [
    DIRECTORY_OPTION,
    click.option(
        "--cache-limit",
        metavar="GIB",
        type=FiniteRange(min=0, min_open=True),
        help="Largest size of the folder; the least recently used files are removed. [default: a "
        "tenth of the free disk, at most 16]",
    ),
    click.option(
        "--no-cache",
        is_flag=True,
        help=f"Do not write the prompt's rows to disk, nor read them. [env: {SWITCH}=1]",
    ),
]
REUSE: list[Callable[[Any], Any]] = [
    click.option(
        "--reuse",
        type=click.Choice(["exact", "passages"]),
        default="exact",
        show_default=True,
        help="Rows of kept prompts that serve again: of equal beginnings, or also of passages that "
        "stand in another place, with a small loss.",
    ),
    click.option(
        "--reuse-repair",
        metavar="PERCENT",
        type=Percent(),
        default=None,
        help="Share of a passage's rows that are computed again. [default: 15%]",
    ),
]
SESSION: list[Callable[[Any], Any]] = [
    click.option(
        "--session", metavar="FILE", type=click.Path(dir_okay=False, path_type=Path),
        help="Keep the prompt's rows in FILE, not in the folder. A missing FILE is made. Its rows "
        "may be of another machine or method.",
    ),
]  # fmt: skip


@dataclass(frozen=True)
class PrefixOptions:
    """Where prompts are kept on disk."""

    directory: Path | None  # None: the user's folder
    limit: float | None  # GiB; None: a tenth of the free disk, at most 16
    is_off: bool
    session: Path | None  # a file to use instead
    repair: float | None = None  # the share of passages that is computed again; None: exact rows


def _gather_prefix(values: dict[str, Any]) -> PrefixOptions:
    from sparsekv_cli.models.reuse.repair import share_repaired
    from sparsekv_cli.prefix.folder import check_folder

    directory, limit = values.pop("cache_dir"), values.pop("cache_limit")
    no_cache, session = values.pop("no_cache"), values.pop("session", None)
    try:
        repair = share_repaired(values.pop("reuse", "exact"), values.pop("reuse_repair", None))
    except SparseKVError as error:
        raise click.UsageError(str(error)) from None
    if session is not None and repair is not None:
        raise click.UsageError("--session keeps one prompt: leave it or --reuse passages out")
    is_off = no_cache or is_switched_off()
    if session is not None:
        if no_cache or directory is not None:
            what = "--session keeps the rows in its own FILE"
            raise click.UsageError(f"{what}: leave --cache-dir and --no-cache out")
        check_session_file(session)
        is_off = False  # the environment does not stop what the user asks for
    elif directory is not None and not is_off:
        check_folder(directory)
    return PrefixOptions(directory, limit, is_off, session, repair)


prefix_options = gathered("prefix", _gather_prefix, [*FOLDER, *REUSE, *SESSION])
server_options = gathered("prefix", _gather_prefix, [*FOLDER, *REUSE])
folder_options = gathered("prefix", _gather_prefix, FOLDER)


def check_session_file(path: Path) -> None:
    """Raises SparseKVError for a file of another kind, or if its folder does not exist."""
    from sparsekv_cli.prefix.blocks import MAGIC
    from sparsekv_cli.system.files import naming, open_regular

    if not path.parent.is_dir():
        raise SparseKVError(f"--session {path}: there is no folder {path.parent}")
    if path.exists():
        with naming(f"--session {path}"), open_regular(path) as file:
            start = file.read(len(MAGIC))
        if start and start != MAGIC:
            raise SparseKVError(
                f"--session {path}: is not a session file of this version, and is left as it is: "
                "choose another name"
            )


def is_switched_off() -> bool:
    """Returns whether the environment switches it off. Raises click.UsageError for a bad value."""
    value = os.environ.get(SWITCH, "").strip().lower()
    if value and value not in TRUTH:
        raise click.UsageError(f"{SWITCH} is {value!r} in the environment: set it to 1 or 0")
    return bool(value) and TRUTH[value]


def open_prompt_rows(model: Model, options: PrefixOptions, method: Method) -> Prefixes | None:
    """Returns the object that finds and keeps prompts on disk; None if off or impossible."""
    from sparsekv_cli.prefix.session_file import SessionFile

    if options.repair is not None and options.is_off:
        raise SparseKVError(
            f"--reuse passages needs kept prompts: leave --no-cache out, and {SWITCH} unset"
        )
    if options.session is None:
        return prefixes_maker(model, options)(method)
    reason, n_queried = _reason_against(method, model), method.n_queried
    if not reason and model.hparams.other_layers:
        reason = f"{model.hparams.other_layers} do not keep the rows of all tokens"
    if reason or n_queried is None:
        raise SparseKVError(f"--session: {reason}; leave it out, or use another method or model")
    identity = model.decoder.identity_of(method.kv_types)
    if identity.known() is None:
        size = f"{model.gguf.size / 2**30:.1f} GiB"
        _warn(f"--session: the {size} of the model are read once, to identify the model")
        model.gguf.content.wait()
    name, types = model.gguf.path.name, method.kv_types
    return SessionFile(options.session, name, identity, types, n_queried, _warn, _teller())


def prefixes_maker(model: Model, options: PrefixOptions) -> Callable[[Method], Prefixes | None]:
    """Returns a function that returns a method's prompts on disk, or None if impossible.

    Raises SparseKVError if the options ask for passages, and the model's rows cannot be moved.
    """
    from sparsekv_cli.models.reuse.repair import check_movable
    from sparsekv_cli.prefix.folder import PrefixFolder, default_prefix_folder, limit_of
    from sparsekv_cli.prefix.prefixes import prompts_in

    if options.repair is not None:
        check_movable(model)
    tell = _teller()
    directory = options.directory or default_prefix_folder()

    def make(method: Method) -> Prefixes | None:
        if options.repair is not None and method.n_queried is None:
            raise SparseKVError(
                f"--reuse passages: {method.name} needs the queries of all tokens; leave it out, "
                "or use another method"
            )
        if options.is_off:
            return None
        reason, n_queried = _reason_against(method, model), method.n_queried
        if directory is None:
            reason = "there is no home folder and no XDG_CACHE_HOME"
        if reason or n_queried is None or directory is None:
            (tell if options.directory is None else _warn)(f"prefix cache: off, {reason}")
            return None
        folder = PrefixFolder(directory, limit_of(directory, options.limit), _warn)
        prompts = prompts_in(folder, model.decoder, method.kv_types, n_queried, tell)
        prompts.repair = options.repair
        return prompts

    return make


def _reason_against(method: Method, model: Model) -> str:
    """Returns why a method and a model cannot keep prompts on disk; empty if they can."""
    from sparsekv_cli.prefix.snapshots import can_keep

    if method.n_queried is None:
        return f"{method.name} needs the queries of all tokens"
    if not can_keep(model.decoder):
        return f"rows of {model.hparams.other_layers} on a GPU cannot be kept"
    return ""


def _warn(text: str) -> None:
    say(one_line(text))


def _teller() -> Callable[[str], None]:
    """Returns a function that says a line under -v. Without a command (on a node) it is silent."""
    context = click.get_current_context(silent=True)
    verbose = context is not None and context.ensure_object(Invocation).verbose
    return _warn if verbose else lambda text: None
