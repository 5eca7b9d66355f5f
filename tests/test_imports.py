"""The arrows of the design: commands -> model -> engine -> decoder -> cache and methods -> kernels.

Every import of ours is looked at: at the top of a file, inside a function, under TYPE_CHECKING.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from graphlib import TopologicalSorter

import pytest
from source_tree import MODULES, PACKAGE, imports

# Folder -> folders that it may import beside itself and what lies in it. Modules beside them, such
# as errors, are named by their own names.
ALLOWED: dict[str, set[str]] = {
    "cpu": set(),
    "kernels": set(),
    "cache": {"cpu"},
    "calibration": {"cache", "cpu", "models"},
    "methods": {"cache", "calibration", "cpu"},
    "models": {"cache", "cpu"},
    "prefix": {"cache", "calibration", "cpu", "models"},
    "sampling": set(),
    "warmup": {"cache", "cpu", "methods", "models"},
    "sequence": {"cache", "methods", "models", "prefix", "sampling"},
    "drafts": {"cache", "models", "sequence"},
    "engine": {"cache", "methods", "models", "prefix", "sampling", "sequence", "warmup"},
    "device": {"cache", "cpu", "engine", "kernels", "methods", "models", "sampling", "sequence"},
    "machine": {"cache", "cpu", "device", "engine", "methods", "models", "warmup"},
    "model": {"cache", "calibration", "cpu", "drafts", "engine", "machine", "methods", "models"}
    | {"sequence", "warmup"},
    "evaluation": {"cache", "cpu", "device", "methods", "model", "models", "sequence", "warmup"},
    "distributed": {"cache", "calibration", "cpu", "methods", "model", "models"},
    "generation": {"drafts", "model", "models", "sampling", "sequence"},
    "planning": {"cache", "calibration", "cpu", "evaluation", "machine", "methods", "model"}
    | {"models", "sequence", "warmup"},
    "serve": {"cache", "generation", "methods", "model", "models", "prefix", "sampling"}
    | {"sequence"},
    "commands": {"cache", "calibration", "distributed", "doctor", "drafts", "evaluation"}
    | {
        "generation",
        "methods",
        "model",
        "models",
        "planning",
        "prefix",
        "sampling",
        "sequence",
        "serve",
        "warmup",
    },
    "library": {"cache", "generation", "methods", "model", "models", "prefix", "sequence"},
    "doctor": {"cpu", "device", "evaluation", "models"},
    "cli": {"commands"},
    "__main__": {"cli"},
}
# The empty name is sparsekv_cli/__init__.py.
ANYONE = {"", "errors", "settings", "system"}
ALLOWED |= {name: set() for name in ANYONE}


SOURCES = [(module.name, module.path) for module in MODULES.values()]


def part_of(module: str) -> str:
    return module.split(".")[1] if "." in module else ""


@pytest.mark.parametrize(("module", "path"), SOURCES, ids=[name for name, _ in SOURCES])
def test_imports_follow_the_arrows(module, path):
    part = part_of(module)
    assert part in ALLOWED, f"{module}: give it a line in ALLOWED"
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for imported, line in imports(tree):
        top = imported.split(".")[0]
        at = f"{path.name}:{line} imports {imported}"
        assert top not in ("cpu", "kernels", "models"), f"{at}: use {PACKAGE}.{top}"
        if top != PACKAGE:
            continue
        assert imported in MODULES, f"{at}, which does not exist"
        assert part_of(imported) in {part, *ANYONE, *ALLOWED[part]}, f"{at}: the arrow runs back"


def test_no_modules_import_each_other_in_a_circle():
    """Under TYPE_CHECKING neither; a package is not its modules here."""
    graph = {
        name: {each for each, _ in imports(module.tree())} & set(MODULES) - {name}
        for name, module in MODULES.items()
    }
    assert len(list(TopologicalSorter(graph).static_order())) == len(MODULES)  # or a CycleError


def test_the_walk_sees_imports_wherever_they_are():
    source = """
import os, cpu.bandwidth
from sparsekv_cli import sequence, __version__
if TYPE_CHECKING:
    from sparsekv_cli.cli import main
else:
    import sparsekv_cli.cache
def f():
    class C:
        with x:
            from sparsekv_cli.methods import lfps
"""
    found = {
        "os",
        "cpu.bandwidth",
        "sparsekv_cli",
        "sparsekv_cli.sequence",
        "sparsekv_cli.cache",
        "sparsekv_cli.methods.lfps",
    }
    tree = ast.parse(source)
    assert {name for name, _ in imports(tree, type_checking=False)} == found
    assert {name for name, _ in imports(tree)} == found | {"sparsekv_cli.cli"}


def test_only_a_device_s_code_imports_torch():
    """The CPU works without torch and Triton, so what needs them is imported within functions."""
    for module, path in SOURCES:
        if part_of(module) in ("device", "kernels"):
            continue
        tree = ast.parse(path.read_text("utf-8"))
        assert not {name.split(".")[0] for name, _ in imports(tree)} & {"torch", "triton"}, module
        if module == f"{PACKAGE}.evaluation.device_observer":  # imported for a device only
            continue
        at_once = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
        for name, line in imports(ast.Module(body=at_once, type_ignores=[]), type_checking=False):
            late = part_of(name) in ("device", "kernels") or name.endswith(".device_observer")
            assert not late, f"{module}:{line} imports {name}: within a function"


@pytest.mark.parametrize(
    "module", ["cli", "commands.run.run", "commands.chat.chat", "models.sources.listing"]
)
def test_the_command_line_starts_without_heavy_imports(module):
    heavy = ("torch", "numba", "llvmlite", "tokenizers", "sentencepiece")
    code = f"import sys, sparsekv_cli.{module}; print(*[m for m in {heavy} if m in sys.modules])"
    told = subprocess.check_output([sys.executable, "-c", code], text=True, timeout=240)
    assert told.strip() == ""


def test_all_parts_of_the_table_exist():
    assert {part_of(module) for module in MODULES} == set(ALLOWED)


def test_kernels_are_declared_with_this_packages_cache():
    """numba's own decorator would keep them apart, and ``ahead`` would not find them."""
    for module, path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module == "numba":
                names = {alias.name for alias in node.names}
                assert not names & {"njit", "jit", "cfunc"}, f"{module}: use cpu.jit.kernel"
