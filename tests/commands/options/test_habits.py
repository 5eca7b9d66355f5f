"""Words and flags of llama.cpp and ollama: translated, or taken with a line that says why not."""

from __future__ import annotations

from importlib import import_module

import click
import pytest

from sparsekv_cli.cli import COMMANDS
from sparsekv_cli.commands.options.habits import FLAGS, translated


def line(text: str) -> tuple[str, list[str]]:
    """The command line in our words, and what is told."""
    told: list[str] = []

    def command_of(name: str) -> click.Command:
        return import_module(COMMANDS[name][0]).command

    return " ".join(translated(text.split(), COMMANDS, command_of, told.append)), told


@pytest.mark.parametrize(
    ("typed", "ours"),
    [
        ("-V", "--version"),
        ("version", "--version"),
        ("help", "--help"),
        ("help run", "run --help"),
        ("list --json", "models --json"),
        ("org/name:Q4_K_M -c 900", "chat -m org/name:Q4_K_M -c 900"),
        ("m.gguf", "chat -m m.gguf"),
        ("run -hf org/name -p x", "run -m org/name -p x"),
        ("serve -m a.gguf -np 4", "serve -m a.gguf --parallel 4"),
        ("bench -m a.gguf -b 4", "bench -m a.gguf -b 4"),
        ("run -p -fa --stop --jinja", "run -p -fa --stop --jinja"),
        ("run -p x -- --mlock", "run -p x -- --mlock"),
        ("tokenize -fa", "tokenize -fa"),
        ("nonsense", "nonsense"),
        ("-v methods", "-v methods"),
    ],
)
def test_what_is_meant(typed, ours):
    assert line(typed)[0] == ours


@pytest.mark.parametrize("flag", sorted(name for name, each in FLAGS.items() if each.reason))
def test_what_has_no_effect_is_told(flag):
    habit = FLAGS[flag]
    command = "chat" if flag != "-no-cnv" else "run"
    values = " 3" * habit.n_values + (f" {habit.choices[0]}" if habit.choices else "")
    found, told = line(f"{command} {flag}{values} -m a.gguf")
    assert found == f"{command} -m a.gguf" and told == [f"{flag} has no effect: {habit.reason}"]
    if habit.n_values:
        assert line(f"{command} {flag}=3")[0] == command
        with pytest.raises(click.UsageError, match=f"{flag} needs a value"):
            line(f"{command} {flag}")


def test_what_to_type(invoke):
    for typed, words in (("-hf org/x", "chat -hf org/x"), ("pull org/x", "chat -m org/x")):
        result = invoke(*typed.split())
        assert result.code == 2 and f"'sparsekv-cli {words}'" in result.err and not result.out
