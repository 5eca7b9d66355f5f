"""The modules of the installed tree and what they import, for tests of how the code is laid out."""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

PACKAGE = "sparsekv_cli"
FOLDERS = {"": "sparsekv_cli", "cpu": "cpu", "kernels": "kernels", "models": "models"}


class Module(NamedTuple):
    """A module by its full name, its file, and its package: its own name if it is one."""

    name: str
    path: Path
    package: str

    def tree(self) -> ast.Module:
        return ast.parse(self.path.read_text(encoding="utf-8"))


def root() -> Path:
    """The folder that holds sparsekv_cli/, cpu/, kernels/ and models/."""
    spec = importlib.util.find_spec(PACKAGE)
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).parent.parent


def _modules() -> Iterator[Module]:
    for name, folder in FOLDERS.items():
        base = root() / folder
        for path in sorted(base.rglob("*.py")):
            parts = [PACKAGE, *filter(None, [name]), *path.relative_to(base).with_suffix("").parts]
            package = ".".join(parts[:-1])
            yield Module(package if parts[-1] == "__init__" else ".".join(parts), path, package)


MODULES = {module.name: module for module in _modules()}


def imports(tree: ast.AST, type_checking: bool = True) -> Iterator[tuple[str, int]]:
    """(module, line) of every import, at the top of a file or inside a function, with or without
    those under ``if TYPE_CHECKING``; ``from p import m`` is p.m if m is a module.
    """
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            body = [*(node.body if type_checking else ()), *node.orelse]
            yield from imports(ast.Module(body=body, type_ignores=[]), type_checking)
        elif isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: import by the full name"
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield (inner if inner in MODULES else str(node.module)), node.lineno
        else:
            yield from imports(node, type_checking)
