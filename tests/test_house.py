"""How the house is laid out: names of methods, sizes of folders and files, no circles, one name a
class.
"""

from __future__ import annotations

import ast
from collections import Counter
from graphlib import TopologicalSorter
from pathlib import Path

import pytest
from source_tree import FOLDERS, MODULES, PACKAGE, imports, root

from sparsekv_cli.methods import METHODS

HERE = Path(__file__).resolve().parent
# A folder of cpu/ and kernels/ is a method's, or holds what several methods call.
SHARED = {"jit", "weights", "attention", "layer", "experts", "recurrent", "eviction"}
# Folders of many alike things, one file each.
ONE_FILE_EACH = {
    "sparsekv_cli/methods",
    "sparsekv_cli/methods/naive",
    "sparsekv_cli/commands",
    "models/architectures",
}


def names_in(folder: str) -> set[str]:
    """Modules and packages of a folder below the root."""
    found = {path.stem for path in (root() / folder).glob("*.py")}
    found |= {path.parent.name for path in (root() / folder).glob("*/__init__.py")}
    return found - {"__init__"}


def test_a_method_has_one_name_everywhere():
    """The command line's is its path in methods/, methods/naive/, cpu/, kernels/ and
    device/methods/.
    """
    assert names_in("sparsekv_cli/methods") - {"base", "depth", "naive"} == set(METHODS)
    assert names_in("sparsekv_cli/methods/naive") - {"base"} == set(METHODS)
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


def test_a_file_has_at_most_400_lines():
    files = [module.path for module in MODULES.values()] + list(HERE.rglob("*.py"))
    lines = {path: path.read_text(encoding="utf-8").count("\n") for path in files}
    assert not {path: n for path, n in lines.items() if n > 400}


def package_of(name: str) -> str:
    """The folder of a module; a module beside the folders, such as session, stands for itself."""
    package = MODULES[name].package
    return name if package == PACKAGE else package


def test_packages_import_each_other_in_no_circle():
    """Under TYPE_CHECKING neither; device/methods/ is a part of device/, which opens its caches."""
    arrows: dict[str, set[str]] = {}
    for module in MODULES.values():
        for name, _ in imports(module.tree()):
            if name.partition(".")[0] != PACKAGE:
                continue
            start, end = (
                package_of(each).replace(".device.methods", ".device")
                for each in (module.name, name)
            )
            if start != end:
                arrows.setdefault(start, set()).add(end)
    list(TopologicalSorter(arrows).static_order())  # or a CycleError, which shows it


def test_a_public_class_name_exists_once():
    names = Counter(
        node.name
        for module in MODULES.values()
        for node in ast.walk(module.tree())
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    )
    assert [name for name, n in names.items() if n > 1] == []
