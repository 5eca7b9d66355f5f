"""Flags and words of llama.cpp and ollama: translated, or accepted with a line that says why."""

import re
from importlib import import_module
from typing import Any

import click
import pytest
from source_tree import root

from sparsekv_cli.cli import COMMANDS as ALL
from sparsekv_cli.commands.options.habits import ALIASES, HABITS, WORDS, habits_of

VALUES = {"-ngl": "99", "-sm": "layer", "-ts": "1,1", "--numa": "distribute", "-fa": "on"}


def command_of(name: str) -> click.Command:
    first, *rest = name.split()
    command = import_module(ALL[first][0]).command
    return command.get_command(None, *rest) if rest else command


def parsed(name: str, *arguments: str) -> dict[str, Any]:
    """The values of a command line, without a run of it."""
    return command_of(name).make_context(name, list(arguments)).params


@pytest.mark.parametrize(
    "name",
    [
        "run", "chat", "serve", "bench", "compare", "eval perplexity", "eval kld", "eval ruler",
        "advise", "plan", "calibrate", "inspect", "tokenize", "warmup",
    ],
)  # fmt: skip
def test_no_flag_is_silent(name, capfd):
    """Each either changes a value of the command, or says that it has no effect."""
    command, plain = command_of(name), parsed(name)
    assert "a/b" in str(parsed(name, "-hf", "a/b"))
    found = list(habits_of(command, name))
    assert len(found) > 20
    for habit, option in found:
        for flag in option.opts:
            if flag in ("--offline", "-no-cnv", "-nocnv", "--no-conversation"):
                continue
            capfd.readouterr()
            value = VALUES.get(habit.names[0], "4")
            values = parsed(name, flag, *([value] if habit.takes else []))
            said = capfd.readouterr().err
            assert values.keys() == plain.keys()
            changed = [key for key in values if values[key] != plain[key]]
            assert bool(changed) != bool(said), flag
            assert not said or (said.count("\n") == 1 and "has no effect: " in said)


def test_translations(capfd, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    for flag in ("-hf", "-hfr", "--hf-repo"):
        assert parsed("run", flag, "a/b:Q8_0")["model"] == "a/b:Q8_0"
    assert parsed("serve", "-np", "4", "-to", "9")["parallel"] == 4
    assert parsed("run", "-ngl", "0", "-nkvo")["device"] == "cpu"
    assert parsed("run", "-nkvo")["kv"] == "host"
    assert parsed("run", "-no-cnv")["raw"] is True
    assert parsed("chat", "-j", "{}", "-md", "x")["json_schema"] == "{}"
    assert parsed("run", "--reverse-prompt", "a", "-r", "b")["stop"] == ("a", "b")
    assert not capfd.readouterr().err
    assert "habit_offline" not in parsed("run", "--offline")
    import os

    assert os.environ["HF_HUB_OFFLINE"] == "1"


@pytest.mark.parametrize(
    ("name", "arguments", "words"),
    [
        ("run", ["-ngl", "x"], "a number of layers"),
        ("run", ["-ngl", "0", "--device", "cuda"], "leave one out"),
        ("chat", ["-no-cnv"], "run --raw"),
        ("serve", ["-np", "0"], "--parallel"),
        ("run", ["smollm2", "why"], "-m MODEL"),
    ],
)
def test_refused(name, arguments, words):
    with pytest.raises(click.UsageError) as caught:
        parsed(name, *arguments)
    assert words in caught.value.format_message()


def test_flag_without_its_value_takes_no_option(capfd):
    assert parsed("run", "-fa", "-n", "3")["n_predict"] == 3
    assert capfd.readouterr().err.startswith("-fa on has no effect")


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["-hf", "a/b"], 2, "chat -m MODEL"),
        (["run", "-p", "x"], 2, "give a GGUF file with -m FILE"),
        (["plan", "-np", "4"], 2, "No such option '-np'. ('sparsekv-cli plan --help'"),
        (["run", "-m"], 2, "requires an argument. ('sparsekv-cli run --help'"),
        (["version"], 0, "version"),
        (["-V"], 0, "version"),
        (["help"], 0, "Commands:"),
        (["help", "serve"], 0, "--port"),
        (["help", "x"], 2, "No such command"),
        (["-v", "list", "--json"], 0, "["),
        (["ls", "--json"], 0, "["),
        (["pull"], 2, "OWNER/REPO"),
        (["pull", "nothing-such"], 1, "no such file"),
        (["models", "get", "./x.gguf"], 1, "no such file"),
        (["no/such.gguf"], 1, "no/such.gguf"),
    ],
)
def test_words(
    arguments, code, words, invoke, tmp_path,
    monkeypatch,
):  # fmt: skip
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("SPARSEKV_MODEL", raising=False)
    result = invoke(*arguments)
    assert result.code == code and words in result.out + result.err
    assert "Traceback" not in result.err


def test_the_page_lists_every_flag():
    page = (root() / "docs/models.md").read_text("utf-8")
    listed = set(re.findall(r"`([^`\s]+)[^`]*`", page))
    flags = {habit.names[0] for habit in HABITS} | {each[0] for each in ALIASES.values()}
    assert flags | set(WORDS) <= listed
