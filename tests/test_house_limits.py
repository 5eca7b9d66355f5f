"""The sizes of the house: code lines a room, files in a folder, parameters; names and circles.

A code line is no docstring, comment, import or blank. A room is a folder of the program with all
that lies in it. scripts/ is one room, and tests/ with fixtures/ another. The numbers and the
exceptions stand in tests/data/limits.toml. An exception that is none any more fails too, so that
the lists only become shorter.
"""

from __future__ import annotations

import ast
import builtins
import re
import tomllib
from collections import Counter
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest
from source_tree import FOLDERS, root
from test_imports import ALLOWED

from sparsekv_cli import __version__

LIMITS = tomllib.loads((root() / "tests/data/limits.toml").read_text("utf-8"))
MOST, EXCEPTIONS = LIMITS["most"], LIMITS["exceptions"]
PYTHON = "#!/usr/bin/env python"
# Decorators of functions that numba or Triton compiles.
KERNEL = re.compile(r"(njit|jit|triton\.jit|intrinsic|emitter|cfunc|vectorize)\b")


def files_of(*folders: str) -> list[Path]:
    """Source files: Python's, and programs without a suffix."""
    return [
        path
        for folder in folders
        for path in sorted((root() / folder).rglob("*"))
        if path.is_file() and path.suffix in (".py", "")
        if not {"__pycache__", "data"} & set(path.relative_to(root()).parts)
    ]


PARTS = {
    "program": files_of(*FOLDERS.values()),
    "scripts": files_of("scripts"),
    "tests": files_of("tests", "fixtures"),
}
FILES = [path for files in PARTS.values() for path in files]
TEXTS = {path: path.read_text("utf-8") for path in FILES}


@cache  # and not at import: every process that collects tests would parse 100 000 lines
def trees() -> dict[Path, ast.Module]:
    return {
        path: ast.parse(text)
        for path, text in TEXTS.items()
        if path.suffix == ".py" or text.startswith(PYTHON)
    }


def shown(path: Path) -> str:
    return path.relative_to(root()).as_posix()


def n_lines(path: Path) -> int:
    return TEXTS[path].count("\n")


def too_many_files() -> Iterator[str]:
    counts = Counter(path.parent for path in FILES if path.stem not in ("__init__", "__main__"))
    alike = LIMITS["one_file_each"]["folders"]
    for folder, count in counts.items():
        if count > MOST["files_in_a_folder"] and shown(folder) not in alike:
            yield shown(folder)


def too_long() -> Iterator[str]:
    yield from (shown(path) for path in FILES if n_lines(path) > MOST["lines_in_a_file"])


def too_many_parameters() -> Iterator[str]:
    """Functions that are no kernel, by file and name."""
    for path, tree in trees().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                arguments = node.args
                count = len(arguments.posonlyargs + arguments.args + arguments.kwonlyargs)
                marks = map(ast.unparse, node.decorator_list)
                if count > MOST["parameters"] and not any(map(KERNEL.match, marks)):
                    yield f"{shown(path)}: {node.name}"


def too_many_positions() -> Iterator[str]:
    """Calls in cpu/ and models/ with many arguments by position, by file and called function."""
    for path, tree in trees().items():
        if not shown(path).startswith(("cpu/", "models/")):
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and len(node.args) > MOST["arguments_by_position"]:
                yield f"{shown(path)}: {ast.unparse(node.func)}"


def named_after_a_builtin() -> Iterator[str]:
    for path in FILES:
        module = path.parent if path.stem == "__init__" else path.with_suffix("")
        if module.name in dir(builtins):
            yield shown(module)


def arrows_of_modules() -> Iterator[str]:
    """Names in the table of arrows that are no folders; the empty one is the package itself."""
    folders = [root() / "sparsekv_cli", *(root() / folder for folder in FOLDERS.values())]
    inner = {path.parent.name for folder in folders for path in folder.glob("*/__init__.py")}
    yield from (name for name in ALLOWED if name and name not in {*inner, *FOLDERS})


@pytest.mark.parametrize(
    ("kind", "find"),
    [
        ("folders", too_many_files),
        ("files", too_long),
        ("functions", too_many_parameters),
        ("calls", too_many_positions),
        ("builtins", named_after_a_builtin),
        ("arrows", arrows_of_modules),
    ],
)
def test_nothing_but_the_known_exceptions(kind, find):
    assert sorted(find()) == sorted(EXCEPTIONS[kind])


DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def code_lines(path: Path) -> int:
    """Lines that are no docstring, comment, import or blank."""
    lines = enumerate(TEXTS[path].splitlines(), 1)
    code = {i for i, line in lines if line.strip() and not line.lstrip().startswith("#")}
    if path not in trees():
        return len(code)
    for node in ast.walk(trees()[path]):
        part: ast.stmt | None = node if isinstance(node, ast.Import | ast.ImportFrom) else None
        if isinstance(node, DOCUMENTED) and ast.get_docstring(node, clean=False) is not None:
            part = node.body[0]
        if part is not None:
            code -= set(range(part.lineno, (part.end_lineno or part.lineno) + 1))
    return len(code)


def room_of(path: Path) -> str:
    """A folder of the program, as cpu/lfps; a file beside such folders is of the one above."""
    if path not in PARTS["program"]:
        return next(name for name in ("scripts", "tests") if path in PARTS[name])
    return "/".join(path.relative_to(root()).parts[:-1][:2])


def test_code_lines_of_a_room():
    """A room that must grow says in its commit what it gives up."""
    found: Counter[str] = Counter()
    for path in FILES:
        found[room_of(path)] += code_lines(path)
    limits = LIMITS["code_lines"]
    assert found.keys() == limits.keys()
    assert {room: n for room, n in found.items() if n > limits[room]} == {}


def test_code_lines_are_counted(tmp_path, monkeypatch):
    path = tmp_path / "module.py"
    text = (
        '"""Two\nlines."""\n\nimport os\nfrom a import (\n    b,\n)\n\n\n'
        '# A comment.\ndef f(x):\n    """One."""\n    import c\n\n    return (  # none\n'
        "        x\n    )\n"
    )
    monkeypatch.setitem(TEXTS, path, text)
    monkeypatch.setitem(trees(), path, ast.parse(text))
    assert code_lines(path) == 4


def test_scripts_import_each_other_in_no_circle():
    """They import by plain names; ``if TYPE_CHECKING`` counts too."""
    scripts = {path.stem: path for path in PARTS["scripts"] if path in trees()}
    arrows: dict[str, set[str]] = {}
    for name, path in scripts.items():
        for node in ast.walk(trees()[path]):
            names = [each.name for each in node.names] if isinstance(node, ast.Import) else []
            names += [str(node.module)] if isinstance(node, ast.ImportFrom) else []
            arrows.setdefault(name, set()).update(scripts.keys() & set(names) - {name})
    assert sum(map(len, arrows.values())) > 10
    for known in EXCEPTIONS["circles"]:
        start, _, end = known.partition(" -> ")
        arrows[start].remove(end)
    list(TopologicalSorter(arrows).static_order())  # or a CycleError, which shows it


def test_the_citation_has_the_version():
    citation = (root() / "CITATION.cff").read_text("utf-8")
    assert re.findall(r"^version: (.*)$", citation, re.MULTILINE) == [__version__]


def test_the_workflow_runs_what_people_run():
    workflow = (root() / ".github/workflows/test.yml").read_text("utf-8")
    assert re.findall(r"run: (.*)", workflow) == [".ci/run"]
    assert "exec scripts/test\n" in (root() / ".ci/run").read_text("utf-8")


def test_a_workflow_runs_all_tests_every_night():
    workflow = (root() / ".github/workflows/nightly.yml").read_text("utf-8")
    assert re.findall(r"run: (.*)", workflow) == ["scripts/test --all"]
    assert re.search(r'cron: "\d+ \d+ \* \* \*"', workflow)
