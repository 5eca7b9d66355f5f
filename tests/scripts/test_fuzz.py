"""Fuzz targets over what was found before, with a fixed seed; faults in every job that writes."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest
from scripts_as_modules import FOLDER
from source_tree import MODULES

N_EXECUTIONS = {"split": 60, "tokenizer": 400, "grammar": 60, "chat": 20, "jsonl": 25, "gguf": 60}
TARGETS = ("gguf", "split", "tokenizer", "template", "calibration", "session", "prefix")
TARGETS += ("jsonl", "serve", "grammar", "chat")
# Names that write a file, and that only the one place where files are written may have.
WRITING = {"write_text", "write_bytes", "mkstemp", "NamedTemporaryFile", "tofile"}


def ran(*command: str) -> str:
    done = subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, cwd=FOLDER.parent
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("target", TARGETS)
def test_a_target(target: str) -> None:
    n = N_EXECUTIONS.get(target, 100)
    said = ran("scripts/fuzz", target, "--executions", str(n))
    assert re.fullmatch(r"(\d+) executions, 0 found\n", said), said
    assert int(said.split()[0]) >= n


def test_faults_in_every_writer() -> None:
    """The old file is there or the new one, the user's other files are too, and it goes on."""
    found = re.findall(r"(.+): (\d+) operations, (\d+) faults\n", ran("scripts/faults"))
    assert len(found) == 10
    assert all(int(n) >= 3 and int(n_faults) == 7 * int(n) for _, n, n_faults in found)


def test_files_are_written_in_one_place() -> None:
    """Elsewhere nobody opens a file to write: faults could not be put into it."""
    for module in MODULES.values():
        if module.name.endswith("system.files"):
            continue
        for node in ast.walk(module.tree()):
            if not isinstance(node, ast.Call):
                continue
            name = getattr(node.func, "attr", getattr(node.func, "id", ""))
            texts = [each.value for each in ast.walk(node) if isinstance(each, ast.Constant)]
            shown = f"{Path(module.path).name}:{node.lineno}"
            writes = name == "open" and any(
                re.fullmatch("[waxrb+]{1,3}", str(t)) and set(str(t)) & set("wax+") for t in texts
            )
            assert not writes or "devnull" in ast.unparse(node), shown
            assert name not in WRITING or module.name.endswith("commands.shared.terminal"), shown
