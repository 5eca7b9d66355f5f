"""The program on systems that are not Linux: what it must not call, and what it says."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from as_on_macos import LINUX_ONLY, LINUX_SYMBOLS
from source_tree import MODULES

from sparsekv_cli import cli

HELPER = Path(__file__).parents[1] / "helpers" / "as_on_macos.py"
# Modules that name what only Linux has, and the switch that each has: a name's absence is asked
# for, or the system's, or that of a GPU.
SWITCHES = {
    "sparsekv_cli.cpu.jit.features": 'sys.platform == "linux"',
    "sparsekv_cli.cpu.jit.bf16": 'sys.platform != "linux"',
    "sparsekv_cli.system.work": 'hasattr(os, "sched_getaffinity")',
    "sparsekv_cli.kernels.pinned": 'device.type != "cuda"',
    "sparsekv_cli.models.decoder": '"malloc_trim", None)',
    "sparsekv_cli.system.memory_file": 'sys.platform != "linux"',
}


def on_macos(cache: Path, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, str(HELPER), *arguments],
        capture_output=True, text=True, check=False,
        env={**os.environ, "XDG_CACHE_HOME": str(cache)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_what_only_linux_has_is_named_behind_a_switch() -> None:
    names = {name for names in LINUX_ONLY.values() for name in names} | set(LINUX_SYMBOLS)
    pattern = re.compile(rf"\.(?:{'|'.join(sorted(names))})\b|\"malloc_trim\"")
    sources = {name: module.path.read_text("utf-8") for name, module in MODULES.items()}
    assert {name for name, text in sources.items() if pattern.search(text)} == set(SWITCHES)
    assert all(switch in sources[name] for name, switch in SWITCHES.items())


def test_doctor_runs_without_what_only_linux_has(tmp_path: Path) -> None:
    found = json.loads(on_macos(tmp_path, "doctor", "--json"))
    assert found["cpu"]["usable"] == found["cpu"]["count"]


def test_windows_is_refused_by_name(monkeypatch, capsys) -> None:
    monkeypatch.setattr(cli.sys, "platform", "win32")
    with pytest.raises(SystemExit) as ended:
        cli.main(["doctor"])
    out, err = capsys.readouterr()
    assert (ended.value.code, out, err.count("\n")) == (1, "", 1)
    assert err.startswith("error: Windows is not supported") and "WSL" in err
