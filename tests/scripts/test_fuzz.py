"""Fuzz targets over what was found before, with a fixed seed; faults in every job that writes."""

from __future__ import annotations

import ast
import re
import subprocess
import sys

import pytest
from scripts_as_modules import FOLDER, load_script
from source_tree import MODULES

N_EXECUTIONS = {"tokenizer": 300, "chat": 12, "jsonl": 12, "gguf": 40}
TARGETS = ("gguf", "split", "tokenizer", "template", "calibration", "session", "prefix")
TARGETS += ("jsonl", "serve", "grammar", "chat")
WRITING = {"write_text", "write_bytes", "mkstemp", "NamedTemporaryFile", "tofile"}


def ran(*command: str) -> str:
    done = subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, cwd=FOLDER.parent
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
def test_a_target(
    target: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    n = N_EXECUTIONS.get(target, 50)
    monkeypatch.setattr(sys, "argv", ["fuzz", target, "--executions", str(n)])
    assert load_script("fuzz").main() == 0
    said = capsys.readouterr().out
    assert re.fullmatch(r"(\d+) executions, 0 found\n", said), said
    assert int(said.split()[0]) >= n


@pytest.mark.parametrize(
    ("writers", "n_writers"),
    [
        (("kernel cache", "chat history", "session file"), 3),
        pytest.param((), 10, marks=pytest.mark.nightly),
    ],
)
def test_faults_in_writers(writers: tuple[str, ...], n_writers: int) -> None:
    """The old file is there or the new one, the user's other files are too, and it goes on.

    Three writers stand for all: test_files_are_written_in_one_place says that they write alike.
    """
    said = ran("scripts/faults", *writers)
    found = re.findall(r"(.+): (\d+) operations, (\d+) faults\n", said)
    assert len(found) == n_writers
    assert all(int(n) >= 3 and int(n_faults) == 7 * int(n) for _, n, n_faults in found)


def writes(call: ast.Call) -> bool:
    """Whether a call writes a file in a way into which no fault could be put."""
    if isinstance(call.func, ast.Attribute) and call.func.attr in WRITING:
        return True
    name = getattr(call.func, "attr", getattr(call.func, "id", ""))
    texts = [str(each.value) for each in ast.walk(call) if isinstance(each, ast.Constant)]
    modes = [text for text in texts if re.fullmatch("[rwaxb+]{1,3}", text)]
    return name == "open" and any(set(mode) & set("wax+") for mode in modes)


def test_files_are_written_in_one_place() -> None:
    calls = {
        f"{module.name}: {ast.unparse(node)}"
        for module in MODULES.values()
        for node in ast.walk(module.tree())
        if isinstance(node, ast.Call) and writes(node)
    }
    others = {call for call in calls if "os.devnull" not in call}
    # A copy for a process on another machine, in a folder of its own that goes with it.
    assert others == {"sparsekv_cli.distributed.settings: sidecar.write_bytes(self.sidecar)"}
    assert len(calls) > 2
