"""How the house is laid out: the names of methods, and how many files a folder has."""

from __future__ import annotations

import pytest
from source_tree import FOLDERS, root

from sparsekv_cli.methods import METHODS

# A folder of cpu/ and kernels/ is a method's, or holds what several methods call.
SHARED = {"jit", "weights", "attention", "layer", "eviction"}
# Folders of many alike things, one file each.
ONE_FILE_EACH = {"sparsekv_cli/methods", "sparsekv_cli/commands", "models/architectures"}


def names_in(folder: str) -> set[str]:
    """Modules and packages of a folder below the root."""
    found = {path.stem for path in (root() / folder).glob("*.py")}
    found |= {path.parent.name for path in (root() / folder).glob("*/__init__.py")}
    return found - {"__init__"}


def test_a_method_has_one_name_everywhere():
    """The command line's is its path in methods/, cpu/, kernels/ and device/methods/."""
    assert names_in("sparsekv_cli/methods") - {"base"} == set(METHODS)
    assert all(entry.partition(":")[0] == name for name, entry in METHODS.items())
    for folder in ("cpu", "kernels"):
        packages = {path.parent.name for path in (root() / folder).glob("*/__init__.py")}
        assert packages <= set(METHODS) | SHARED, folder
    for name in names_in("sparsekv_cli/device/methods"):
        assert name.partition("_")[0] in METHODS, name


@pytest.mark.parametrize("folder", FOLDERS.values())
def test_a_folder_has_at_most_twelve_files(folder):
    for path in (root() / folder, *(root() / folder).rglob("*/")):
        files = {file.stem for file in path.glob("*.py")} - {"__init__", "__main__"}
        name = path.relative_to(root()).as_posix()
        assert len(files) <= 12 or name in ONE_FILE_EACH, f"{name} has {len(files)} files"
