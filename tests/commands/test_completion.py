"""What a shell is offered."""

from collections.abc import Callable
from typing import Any

import pytest

from sparsekv_cli.cli import COMMANDS
from sparsekv_cli.commands.completion import SHELLS, VARIABLE
from sparsekv_cli.methods import METHODS

Invoke = Callable[..., Any]


@pytest.fixture
def offered(invoke: Invoke, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """What bash is offered for the last of some words: a kind and a value each."""

    def ask(*words: str) -> list[str]:
        monkeypatch.setenv(VARIABLE, "bash_complete")
        monkeypatch.setenv("COMP_WORDS", " ".join(["sparsekv-cli", *words]))
        monkeypatch.setenv("COMP_CWORD", str(len(words)))
        return invoke().out.split()

    return ask


def test_commands_and_options(offered):
    assert offered("c") == [f"plain,{name}" for name in COMMANDS if name.startswith("c")]
    assert offered("run", "--cache-l") == ["plain,--cache-limit"]
    assert offered("run", "--device", "c") == ["plain,cpu", "plain,cuda"]
    assert offered("run", "-f", "doc") == ["file,doc"]


def test_methods_and_their_options(offered):
    assert offered("run", "--method", "f") == [f"plain,{m}" for m in METHODS if m[0] == "f"]
    assert offered("bench", "--method", "full,qu") == ["plain,full,quest"]
    assert offered("methods", "lf") == ["plain,lfps"]
    quest = ["run", "--method", "quest", "-o"]
    assert offered(*quest, "summary") == ["plain,summary=minmax", "plain,summary=meanstd"]
    assert offered(*quest, "p") == ["plain,page=8"]
    assert offered("run", "-o", "dense") == ["plain,dense_layers=0,1"]


def test_models(offered, tmp_path, monkeypatch):
    monkeypatch.setenv("SPARSEKV_MODELS", str(tmp_path))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    (tmp_path / "Tiny-Q8_0.gguf").write_bytes(b"")
    assert offered("run", "-m", "T") == ["plain,Tiny-Q8_0"]
    assert offered("inspect", "./x") == ["file,./x"]


@pytest.mark.parametrize("shell", SHELLS)
def test_scripts(shell, invoke):
    script = invoke("completion", shell).out
    assert VARIABLE in script and "sparsekv-cli" in script
