"""The task ``code``: which function of a file has this body? The task is ours, not RULER's.

The functions are those of Python's standard library. So the text is real code, and a sample stays
the same while this program changes. Each name gets two words at its end. So a body does not reveal
its name, and no name exists twice.
"""

import ast
import os
from functools import cache
from itertools import cycle
from pathlib import Path
from random import Random
from typing import NamedTuple

from sparsekv_cli.evaluation.ruler.words import compound

LIBRARY = Path(os.__file__).parent
LEAST_LINES, MOST_LINES = 4, 20  # lines of a body


class Function(NamedTuple):
    """A function: its name, the text between the name and its code, and its code."""

    name: str
    head: str
    body: str

    def text(self, name: str) -> str:
        return f"def {name}{self.head}\n{self.body}\n"


@cache
def functions() -> tuple[Function, ...]:
    """Returns functions of the standard library, sorted by file, without repeated bodies."""
    found: dict[str, Function] = {}
    for path in sorted(LIBRARY.glob("*.py")):
        source = path.read_text(encoding="utf-8")
        outer, lines = ast.parse(source).body, source.splitlines()
        methods = (node for each in outer if isinstance(each, ast.ClassDef) for node in each.body)
        for node in (*outer, *methods):  # functions inside functions are part of the outer body
            if isinstance(node, ast.FunctionDef) and not node.name.startswith("__"):
                each = function_of(node, lines)
                if LEAST_LINES <= each.body.count("\n") + 1 <= MOST_LINES:
                    found.setdefault(each.body, each)
    return tuple(each for each in found.values() if each.name not in each.body)


def function_of(node: ast.FunctionDef, lines: list[str]) -> Function:
    """Returns a function without its decorators. Its docstring is part of ``head``.

    lines: the lines of its file.
    """
    has_docstring = ast.get_docstring(node) is not None and len(node.body) > 1
    first = node.body[int(has_docstring)].lineno
    margin = " " * node.col_offset  # a string's line can start left of the margin
    text = [line.removeprefix(margin) for line in lines[node.lineno - 1 : node.end_lineno]]
    n_head = first - node.lineno
    head = "\n".join(text[:n_head]).removeprefix(f"def {node.name}")
    return Function(node.name, head, "\n".join(text[n_head:]))


def code_file(random: Random, n: int) -> tuple[str, str, str, float]:
    """Returns a file of about n lines, and the name, body and place of the function asked for.

    The last function may be cut, so that a file can have any length. If the library is too short,
    its functions come again with other names. The place is a share of the file, 0 to 1.
    """
    depth, names = random.random(), set[str]()
    asked, *others = random.sample(functions(), len(functions()))

    def named(each: Function) -> str:
        name = ""
        while not name or name in names:
            name = f"{each.name}_{compound(random).replace('-', '_')}"
        names.add(name)
        return name

    asked_name = named(asked)
    lines: list[str] = []
    starts = []
    for each in cycle(others):
        if len(lines) >= n:
            break
        starts.append(len(lines))
        lines += f"{each.text(named(each))}\n".splitlines()
    place = starts[int(depth * len(starts))]
    del lines[n:]
    lines[place:place] = f"{asked.text(asked_name)}\n".splitlines()
    return "\n".join(lines), asked_name, asked.body, place / n
