"""``doctor``: what it prints, and what it must not import or show."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from sparsekv_cli import __version__
from sparsekv_cli.doctor import report

HEAVY = ("torch", "triton", "numba", "gguf", "tokenizers", "sentencepiece", "jinja2")


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("XDG_CACHE_HOME", "XDG_DATA_HOME", "SPARSEKV_MODELS"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def test_json(home, invoke):
    result = invoke("doctor", "--json")
    assert result.code == 0 and result.err == ""
    found = json.loads(result.out)
    assert found["version"] == __version__
    assert list(found) == ["version", *report.SECTIONS, "problems"]


def test_text(home, invoke, monkeypatch):
    folder = home / ".local" / "share" / "sparsekv-cli" / "models"
    folder.mkdir(parents=True)
    (folder / "[red]\x1b[2J.gguf").write_bytes(b"")
    monkeypatch.setenv("HF_HUB_CACHE", str(home / "hub"))
    result = invoke("doctor")
    assert result.code == 0 and result.err == ""
    lines = result.out.splitlines()
    assert lines[0].split() == ["sparsekv-cli", __version__]
    titles = [line for line in lines if line.endswith(":") and line[0] != " "]
    assert titles == ["packages:", "folders:", "models:", "environment:", "problems:"]
    assert "[red]\\x1b[2J" in result.out and "\x1b" not in result.out
    assert "is empty; a GGUF model was expected" in lines[-1]
    assert "~/hub" in result.out and str(home) not in result.out
    (folder / "[red]\x1b[2J.gguf").unlink()
    assert invoke("doctor").out.splitlines()[-1] == "no problems"


def test_sections_that_fail_are_unknown(home, invoke, monkeypatch):
    def fail(problems: list[str]) -> Any:
        raise OSError("broken")

    for name in report.SECTIONS:
        monkeypatch.setitem(report.SECTIONS, name, fail)
    result = invoke("doctor")
    assert result.code == 0 and result.err == ""
    assert result.out.count("OSError: broken") == len(report.SECTIONS)
    found = json.loads(invoke("doctor", "--json").out)
    assert all(found[name] is None for name in report.SECTIONS)


def test_nothing_heavy_is_imported_and_no_secret_is_shown(home):
    code = (
        "import sys\nfrom sparsekv_cli.doctor import machine\n"
        "from sparsekv_cli.cli import main\nmachine.may_have_device = lambda: False\n"
        "try:\n    main(['doctor', '--json'])\n"
        "except SystemExit as error:\n    assert not error.code\n"
        f"print([m for m in {HEAVY} if m in sys.modules])"
    )
    secrets = {"HF_TOKEN": "secret-1", "SPARSEKV_API_KEY": "secret-2"}
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, **secrets},
    )
    assert done.stdout.splitlines()[-1] == "[]"
    assert "secret" not in done.stdout and done.stderr == ""


def test_an_environment_that_kernels_refuse(home):
    """Other commands end with one line; this one tells what the line would be."""
    done = subprocess.run(
        [sys.executable, "-m", "sparsekv_cli", "doctor", "--json"],
        capture_output=True,
        text=True,
        env={**os.environ, "NUMBA_CPU_NAME": "generic"},
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["environment"]["NUMBA_CPU_NAME"] == "generic"
    assert any("NUMBA_CPU_NAME is 'generic'" in problem for problem in found["problems"])
