"""``sparsekv-cli cache``: lists and clears the prompts whose rows are kept on disk."""

import time
from collections import Counter
from pathlib import Path
from typing import Any

import click

from sparsekv_cli.commands.options.model import verbose_option
from sparsekv_cli.commands.options.prefix import DIRECTORY_OPTION
from sparsekv_cli.commands.shared.tables import print_table
from sparsekv_cli.commands.shared.terminal import in_singular, one_line, say, write_json, write_text
from sparsekv_cli.errors import SparseKVError
from sparsekv_cli.prefix.blocks import SUFFIX, DamagedError, own_hash
from sparsekv_cli.prefix.folder import PrefixFolder, check_folder, default_prefix_folder


@click.group()
@verbose_option
def command() -> None:
    """List or clear the prompts whose rows `run` and `chat` keep on disk."""


@command.command("list")
@DIRECTORY_OPTION
@click.option("--json", "as_json", is_flag=True, help="Print a JSON object.")
@verbose_option
def list_command(cache_dir: Path | None, as_json: bool) -> None:
    """List the kept prompts, last used first.

    Prompts with the same beginning share files. MIB counts the files that only one prompt has.
    """
    folder = _folder(cache_dir)
    prompts, n_bytes = prompts_of(folder)
    if as_json:
        write_json({"folder": str(folder.path), "bytes": n_bytes, "prompts": prompts})
        return
    if prompts:
        rows: list[tuple[Any, ...]] = [
            (each["model"], each["tokens"], f"{each['bytes'] / 2**20:.1f}", _ago(each["used"]))
            for each in prompts
        ]
        print_table("", ("model", "tokens", "MiB", "used"), rows)
    write_text(f"{n_bytes / 2**20:.1f} MiB in {one_line(str(folder.path))}\n")


@command.command("clear")
@DIRECTORY_OPTION
@verbose_option
def clear_command(cache_dir: Path | None) -> None:
    """Remove all kept prompts."""
    folder = _folder(cache_dir)
    n_files, n_bytes, n_left = folder.clear()
    if n_left:
        raise SparseKVError(f"{folder.path}: {n_left} files cannot be removed")
    write_text(in_singular(f"{n_files} files removed, {n_bytes / 2**20:.1f} MiB\n"))


def _folder(directory: Path | None) -> PrefixFolder:
    path = directory or default_prefix_folder()
    if path is None:
        raise SparseKVError("there is no home folder and no XDG_CACHE_HOME: give --cache-dir DIR")
    if directory is not None:
        check_folder(directory)
    return PrefixFolder(path, 0, lambda text: say(one_line(text)))


def prompts_of(folder: PrefixFolder) -> tuple[list[dict[str, Any]], int]:
    """Returns each prompt's description, most recently used first, and the bytes of all files."""
    entries = folder.entries()
    blocks = {own_hash(e.path.name): e for e in entries if e.path.suffix == SUFFIX}
    sizes = Counter[str]()  # of blocks and their snapshots
    for entry in entries:
        sizes[own_hash(entry.path.name)] += entry.size
    children = folder.children()
    prompts: list[dict[str, Any]] = []
    for own, entry in blocks.items():
        if own in children:
            continue
        try:
            header = folder.read_header(entry.path.name)
        except OSError:
            continue  # it has just been removed
        except DamagedError as error:
            folder.warn(f"{entry.path}: {error}; 'sparsekv-cli cache clear' removes it")
            continue
        size, parent = sizes[own], header.parent
        while parent in blocks and len(children.get(parent, ())) == 1:
            size += sizes[parent]
            parent = blocks[parent].path.name.partition("-")[0]
        prompts.append(
            {
                "model": header.model,
                "tokens": header.first + len(header.tokens),
                "types": list(header.types),
                "bytes": size,
                "used": entry.used,
            }
        )
    return prompts, sum(entry.size for entry in entries)


def _ago(used: float) -> str:
    """Returns the age in the largest unit that is at least one."""
    seconds = max(0.0, time.time() - used)
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit} ago"
    return f"{seconds:.0f} s ago"
