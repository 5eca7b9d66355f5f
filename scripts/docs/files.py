"""Writes the list of files in docs/architecture.md: every module and the first line of its text.

python scripts/docs/files.py
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "architecture.md"
FOLDERS = ("sparsekv_cli", "models", "cpu", "kernels")
START, END = "<!-- files -->", "<!-- /files -->"


def listed() -> str:
    """A heading a folder, and a line a file below it."""
    lines = []
    for top in FOLDERS:
        for folder in sorted({path.parent for path in (ROOT / top).rglob("*.py")}):
            lines.append(f"\n### {folder.relative_to(ROOT).as_posix()}/\n")
            for path in sorted(folder.glob("*.py")):
                text = ast.get_docstring(ast.parse(path.read_text("utf-8"))) or ""
                first = text.split("\n\n")[0].replace("\n", " ")
                if path.name != "__init__.py":
                    lines.append(f"- `{path.name}`: {first}")
    return "\n".join([START, *lines, "", END])


def rewritten(page: str) -> str:
    """The page with the list as it is to be."""
    return re.sub(f"{START}.*{END}", lambda _: listed(), page, flags=re.DOTALL)


if __name__ == "__main__":
    PAGE.write_text(rewritten(PAGE.read_text("utf-8")), "utf-8")
