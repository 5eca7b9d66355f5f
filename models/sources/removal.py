"""Removes models that were downloaded or put into the models folder, and nothing else."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from sparsekv_cli.errors import SparseKVError
from sparsekv_cli.models.sources.folder import find_by_name, models_by_name, models_folder
from sparsekv_cli.models.sources.hub import cache_folder, cached_models, is_hub_name
from sparsekv_cli.models.sources.locate import PACKAGED_MODELS, packaged_models
from sparsekv_cli.models.sources.naming import parts_of
from sparsekv_cli.settings.option import did_you_mean
from sparsekv_cli.system.files import naming


class Removal(NamedTuple):
    """A model's files, and the bytes that their removal frees."""

    name: str
    files: list[Path]
    n_bytes: int


def removal_of(name: str) -> Removal:
    """Returns which files to remove for a model that ``sparsekv-cli models`` lists.

    Raises SparseKVError for another name, a model of a package, and a model in use.
    """
    found = find_by_name(name) if Path(name).name == name else None
    if found is not None:
        folder = found.parent
        files = [folder / each for each in parts_of(found.name, sorted(os.listdir(folder)))]
    elif name in PACKAGED_MODELS and name in packaged_models():
        package = PACKAGED_MODELS[name][0]
        raise SparseKVError(
            f"{name}: is in the package {package}: remove it with `pip uninstall {package}`"
        )
    else:
        files = list(_cached_files(name))
    if not files:
        names = [*models_by_name(), *(each.name for each in cached_models())]
        where = f" (a file outside {models_folder()} is yours to remove)" if "/" in name else ""
        raise SparseKVError(
            f"{name}: no such model{did_you_mean(name, names)}{where}; 'sparsekv-cli models' "
            "lists them"
        )
    for file in files:
        if user := _process_with(os.path.realpath(file)):
            raise SparseKVError(f"{name}: is in use by process {user}: end it first")
    sizes = (each.lstat().st_size for each in files if not each.is_symlink())
    return Removal(name, files, sum(sizes))


def remove(removal: Removal) -> None:
    """Removes the files. Raises SparseKVError, which names a file that cannot be removed."""
    for file in removal.files:
        with naming(file):
            file.unlink(missing_ok=True)


def _cached_files(name: str) -> Iterator[Path]:
    """Yields the files of a hub's model in all revisions, and the blobs that no other file uses."""
    if not is_hub_name(name):
        return
    named = [each.path for each in cached_models() if each.name.casefold() == name.casefold()]
    for path in named[:1]:
        repository = next(each for each in path.parents if each.parent == cache_folder())
        snapshots, blobs = repository / "snapshots", Path(os.path.realpath(repository / "blobs"))
        first = path.relative_to(snapshots).parts
        wanted = set()
        for snapshot in sorted(snapshots.iterdir()):
            here = snapshot.joinpath(*first[1:])
            if here.parent.is_dir():
                names = parts_of(here.name, sorted(os.listdir(here.parent)))
                wanted |= {here.with_name(each) for each in names}
        wanted = {each for each in wanted if os.path.lexists(each)}
        yield from sorted(wanted)
        others = {os.path.realpath(each) for each in snapshots.rglob("*") if each not in wanted}
        for target in sorted({os.path.realpath(each) for each in wanted}):
            if Path(target).parent == blobs and target not in others:
                yield Path(target)


def _process_with(path: str) -> int:
    """Returns the id of a process that has mapped the file ``path``; 0 if none is known."""
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, UnicodeDecodeError):
            maps = (folder / "maps").read_text()
            if any(line.endswith(f" {path}") for line in maps.splitlines()):
                return int(folder.name)
    return 0
