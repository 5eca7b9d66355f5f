"""``sparsekv-cli cache``: lists and removes the prompts whose rows are stored on disk."""

import contextlib
import re
import textwrap
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from sparsekv_cli.commands.options.prefix import DIRECTORY_OPTION
from sparsekv_cli.commands.options.verbose import verbose_option
from sparsekv_cli.commands.shared.tables import print_table
from sparsekv_cli.commands.shared.terminal import in_singular, one_line, say, write_json, write_text
from sparsekv_cli.errors import SparseKVError
from sparsekv_cli.prefix.blocks import SUFFIX, DamagedError, own_hash
from sparsekv_cli.prefix.folder import PrefixFolder, check_folder, default_prefix_folder

ROLE = re.compile(r"^\s*(user|system|assistant|model)\s*\n")
MOST_WORDS = 48  # characters of the words of a prompt that are shown


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
    A prompt begins with the words of its longest message, if its model is still found by name.
    """
    folder = _folder(cache_dir)
    prompts, n_bytes = prompts_of(folder)
    if as_json:
        write_json({"folder": str(folder.path), "bytes": n_bytes, "prompts": prompts})
        return
    if prompts:
        rows: list[tuple[Any, ...]] = [
            (
                each["model"], each["tokens"], f"{each['bytes'] / 2**20:.1f}", _ago(each["used"]),
                each["begins"],
            )
            for each in prompts
        ]  # fmt: skip
        print_table("", ("model", "tokens", "MiB", "used", "begins"), rows)
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
    """Returns a description of each prompt, the last used first, and the bytes of all files."""
    entries = folder.entries()
    blocks = {own_hash(e.path.name): e for e in entries if e.path.suffix == SUFFIX}
    sizes = Counter[str]()  # bytes of a block with its snapshots
    for entry in entries:
        sizes[own_hash(entry.path.name)] += entry.size
    children, words = folder.children(), FirstWords()
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
        first = header
        while first.first and first.parent in blocks:
            try:
                first = folder.read_header(blocks[first.parent].path.name)
            except (OSError, DamagedError):
                break
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
                "begins": "" if first.first else words(header.model, first.tokens),
            }
        )
    return prompts, sum(entry.size for entry in entries)


class FirstWords:
    """Returns first words of prompts, with the tokenizers of models that -m finds by name."""

    def __init__(self) -> None:
        self._tokenizers: dict[str, Any] = {}

    def __call__(self, model: str, tokens: Sequence[int]) -> str:
        """Returns the first words of the longest message in ``tokens``; "" without its model."""
        if model not in self._tokenizers:
            self._tokenizers[model] = self._tokenizer(model)
        tokenizer = self._tokenizers[model]
        if tokenizer is None:
            return ""
        try:
            text = tokenizer.decode(list(tokens))
        except (SparseKVError, IndexError, ValueError):  # another model has this name now
            return ""
        marks = "|".join(map(re.escape, sorted(tokenizer.control_texts, key=len, reverse=True)))
        parts = re.split(marks, text) if marks else [text]
        longest = ROLE.sub("", max(parts, key=len))
        return textwrap.shorten(one_line(longest), MOST_WORDS, placeholder="")

    def _tokenizer(self, model: str) -> Any:
        from sparsekv_cli.models.gguf.file import open_gguf
        from sparsekv_cli.models.sources.locate import SOURCES
        from sparsekv_cli.models.tokenizer.tokenizer import load_tokenizer

        for find in SOURCES.values():
            for _, path in find():
                if path.name == model:
                    with contextlib.suppress(SparseKVError), open_gguf(path) as file:
                        return load_tokenizer(file.metadata)
        return None


def _ago(used: float) -> str:
    """Returns the age in the largest unit that is at least one."""
    seconds = max(0.0, time.time() - used)
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit} ago"
    return f"{seconds:.0f} s ago"
