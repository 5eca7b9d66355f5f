"""The arrows of the design: commands -> session -> decoder -> cache and methods -> kernels.

Every import of ours, at the top of a file or inside a function, is looked at; those under
``if TYPE_CHECKING`` are not, since they never run.
"""

from __future__ import annotations

import ast
import importlib.util
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = "sparsekv_cli"
FOLDERS = {"": "sparsekv_cli", "cpu": "cpu", "kernels": "kernels", "models": "models"}

# Folder -> folders that it may import beside itself and what lies in it. Modules beside them, such
# as errors, are named by their own names.
ALLOWED: dict[str, set[str]] = {
    "cpu": set(),
    "kernels": set(),
    "cache": {"cpu"},
    "calibration": {"cache", "cpu", "methods", "models"},
    "methods": {"cache", "calibration", "cpu"},
    "models": {"cache", "cpu"},
    "sampling": set(),
    "device": {"cache", "cpu", "kernels", "methods", "models"},
    "evaluation": {"cache", "cpu", "device", "methods", "session", "warmup"},
    "engine": {"cache", "cpu", "device", "methods", "models", "warmup"},
    "warmup": {"cache", "cpu", "methods", "models"},
    "session": {"cache", "calibration", "cpu", "engine", "memory", "methods", "models", "warmup"},
    "batch": {"session"},
    "commands": {"batch", "calibration", "evaluation", "methods", "models", "sampling", "session"}
    | {"warmup"},
    "cli": {"commands"},
    "__main__": {"cli"},
}
ANYONE = {"", "config", "errors", "memory", "option"}  # the empty name is sparsekv_cli/__init__.py
ALLOWED |= {name: set() for name in ANYONE}


def root() -> Path:
    """The folder that holds sparsekv_cli/, cpu/, kernels/ and models/."""
    spec = importlib.util.find_spec(PACKAGE)
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).parent.parent


def sources() -> list[tuple[str, Path]]:
    """(module name, file) of everything that is installed."""
    found = []
    for name, folder in FOLDERS.items():
        base = root() / folder
        for path in sorted(base.rglob("*.py")):
            parts = [PACKAGE, *filter(None, [name]), *path.relative_to(base).with_suffix("").parts]
            if parts[-1] == "__init__":
                parts.pop()
            found.append((".".join(parts), path))
    return found


SOURCES = sources()
MODULES = {name for name, _ in SOURCES}


def part_of(module: str) -> str:
    return module.split(".")[1] if "." in module else ""


def imports(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """(module, line) of every import that can run; ``from p import m`` is p.m if m is a module."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            yield from imports(ast.Module(body=node.orelse, type_ignores=[]))
            continue
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: import by the full name"
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield (inner if inner in MODULES else str(node.module)), node.lineno
        else:
            yield from imports(node)


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


def test_the_walk_sees_imports_wherever_they_are():
    source = """
import os, cpu.ops
from sparsekv_cli import session, __version__
if TYPE_CHECKING:
    from sparsekv_cli.cli import main
else:
    import sparsekv_cli.cache
def f():
    class C:
        with x:
            from sparsekv_cli.methods import lfps
"""
    found = {name for name, _ in imports(ast.parse(source))}
    assert found == {
        "os",
        "cpu.ops",
        "sparsekv_cli",
        "sparsekv_cli.session",
        "sparsekv_cli.cache",
        "sparsekv_cli.methods.lfps",
    }


TORCH = {"cpu.jit.floats", "models.torch_rows", "models.torch_products"}


def test_host_code_asks_for_torch_in_one_place():
    """To import it takes as long as all else of a start: tests/test_session.py goes without."""
    for module, path in SOURCES:
        if part_of(module) in ("device", "kernels"):
            continue
        tree = ast.parse(path.read_text("utf-8"))
        found = {name.split(".")[0] for name, _ in imports(tree)}
        assert ("torch" in found) == (module.removeprefix(f"{PACKAGE}.") in TORCH), module
        at_once = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
        for name, line in imports(ast.Module(body=at_once, type_ignores=[])):
            late = name.removeprefix(f"{PACKAGE}.")
            assert late == "cpu.jit.floats" or late not in TORCH, (
                f"{module}:{line}: within a function"
            )
            within = part_of(name) == "device" and module.endswith("device_observer")
            assert part_of(name) != "device" or within, f"{module}:{line}: within a function"


@pytest.mark.parametrize(
    "module", ["sparsekv_cli.cli", "sparsekv_cli.commands.run", "sparsekv_cli.commands.chat"]
)
def test_the_command_line_starts_without_heavy_imports(module):
    heavy = ("torch", "numba", "llvmlite", "tokenizers", "sentencepiece")
    code = f"import sys, {module}; print(*[m for m in {heavy} if m in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == ""


def test_all_parts_of_the_table_exist():
    assert {part_of(module) for module in MODULES} == set(ALLOWED)
