"""How the house is laid out: names of methods, no circles, one name a class."""

from __future__ import annotations

import ast
from collections import Counter
from graphlib import TopologicalSorter
from pathlib import Path

from source_tree import MODULES, PACKAGE, imports, root

from sparsekv_cli.methods import METHODS

HERE = Path(__file__).resolve().parent
FIXTURES = HERE.parent / "fixtures"
# A folder of cpu/ and kernels/ is a method's, or holds what several methods call.
SHARED = {"jit", "vector", "weights", "attention", "layer", "experts", "recurrent", "eviction"}
SHARED |= {"latent"}


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


def test_shared_code_of_the_device_names_no_method():
    """It finds a method's classes through sparsekv_cli/device/methods/__init__.py."""
    shared = [module for module in MODULES.values() if module.package == f"{PACKAGE}.device"]
    assert len(shared) > 8
    for module in shared:
        for name, line in imports(module.tree()):
            folder, _, last = name.rpartition(".")
            assert not folder.endswith(".device.methods"), f"{module.name}:{line}"
            assert folder != f"{PACKAGE}.methods" or last not in METHODS, f"{module.name}:{line}"


def test_what_scripts_and_tests_share_needs_neither():
    """Scripts import no helper of tests, and fixtures only each other."""
    scripts = {path.stem for path in (HERE.parent / "scripts").rglob("*") if path.is_file()}
    helpers = {path.stem for path in HERE.rglob("*.py")}
    shared = {path.stem for path in FIXTURES.rglob("*.py")}
    assert shared and not shared & (scripts | helpers)
    for folder, others in ((FIXTURES, scripts | helpers), (HERE.parent / "scripts", helpers)):
        for path in filter(is_python, folder.rglob("*")):
            for name, line in imports(ast.parse(path.read_text("utf-8"))):
                assert name.partition(".")[0] not in others, f"{path}:{line} imports {name}"


def is_python(path: Path) -> bool:
    return path.is_file() and (
        path.suffix == ".py" or (not path.suffix and "python" in path.open().readline())
    )


def package_of(name: str) -> str:
    """The folder of a module; a module beside the folders, such as sequence, stands for itself."""
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
