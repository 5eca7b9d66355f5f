"""Words and flags of llama.cpp and ollama: translated, or taken with a word why not.

A flag of llama.cpp that has a counterpart becomes that. Another one is taken out of the command
line, and a line says why it has no effect here.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from pathlib import Path
from typing import NamedTuple

import click

COMMANDS = ("run", "chat", "serve", "bench")  # whose flags are those of llama.cpp's programs
WORDS = {"version": "--version", "-V": "--version", "list": "models", "ls": "models"}
GROUP_OPTIONS = ("-h", "--help", "-v", "--verbose", "--version")
ON_OFF = ("on", "off", "auto", "0", "1")
FITS = "prefill takes chunks of the size that is best for the model"
ONE_GPU = "a model runs on one GPU"
SYSTEM = "the system keeps the file's pages, and repacked weights are in memory"


class Habit(NamedTuple):
    """A flag of llama.cpp. ``ours`` is put in its place; without it ``reason`` is told."""

    ours: str = ""
    reason: str = ""
    n_values: int = 1
    choices: Sequence[str] = ()  # a value that may follow


HABITS = {
    ("-hf", "-hfr", "--hf-repo"): Habit("-m"),
    ("-np",): Habit("--parallel"),
    ("-tb", "--threads-batch"): Habit(reason="prefill and decode have the same threads (-t)"),
    ("-ub", "--ubatch-size"): Habit(reason=FITS),
    ("-b", "--batch-size"): Habit(reason=FITS),
    ("-sm", "--split-mode"): Habit(reason=ONE_GPU),
    ("-mg", "--main-gpu"): Habit(reason=ONE_GPU),
    ("-ts", "--tensor-split"): Habit(reason=ONE_GPU),
    ("-ngl", "--gpu-layers", "--n-gpu-layers"): Habit(
        reason="all layers are on the GPU if there is one; --device cpu takes none"
    ),
    ("-fa", "--flash-attn"): Habit(
        reason="attention never keeps all scores", n_values=0, choices=ON_OFF
    ),
    ("--jinja",): Habit(reason="chat templates are always rendered", n_values=0),
    ("--mlock",): Habit(reason=SYSTEM, n_values=0),
    ("--no-mmap",): Habit(reason=SYSTEM, n_values=0),
    ("-cnv", "--conversation"): Habit(reason="'chat' is the conversation", n_values=0),
    ("-no-cnv", "--no-conversation"): Habit(reason="'run' is no conversation", n_values=0),
}
FLAGS = {flag: habit for flags, habit in HABITS.items() for flag in flags}


def translated(
    arguments: Sequence[str],
    commands: Container[str],
    command_of: Callable[[str], click.Command],
    tell: Callable[[str], object],
) -> list[str]:
    """Returns the command line in our words.

    commands: names of sub-commands. command_of: finds one. tell: gets the lines about what has no
    effect. Raises click.UsageError for a line without a sub-command.
    """
    if not arguments:
        return []
    first, *rest = arguments
    if first in WORDS:
        return [WORDS[first], *rest]
    if first == "help":
        return [*rest, "--help"]
    if first == "pull":
        name = " ".join(rest) or "OWNER/REPO:QUANT"
        raise click.UsageError(
            f"a model is downloaded when it is first used: 'sparsekv-cli chat -m {name}'"
        )
    if first.startswith("-") and first not in GROUP_OPTIONS and "-" + first.lstrip("-") in STARTS:
        raise click.UsageError(f"a command comes first: 'sparsekv-cli chat {' '.join(arguments)}'")
    if first not in commands and is_model(first):
        tell(f"sparsekv-cli chat -m {first}")
        return ["chat", "-m", *arguments]
    return flags_translated(first, rest, command_of, tell) if first in COMMANDS else [*arguments]


STARTS = {"-m", "-hf", "-hfr", "-hf-repo", "-model", "-p", "-f", "-c", "-n", "-t"}


def is_model(word: str) -> bool:
    """Whether a word is a file, a repository of the hub, or the packaged model."""
    is_name = "/" in word or word.endswith(".gguf") or word == "smollm2"
    return not word.startswith("-") and (is_name or Path(word).is_file())


def flags_translated(
    command: str,
    words: Sequence[str],
    command_of: Callable[[str], click.Command],
    tell: Callable[[str], object],
) -> list[str]:
    """``translated`` of the words after a sub-command."""
    options = [each for each in command_of(command).params if isinstance(each, click.Option)]
    ours = {name for each in options for name in (*each.opts, *each.secondary_opts)}
    valued = {name for each in options if not each.is_flag for name in each.opts}
    result, left = [command], list(words)
    while left:
        word = left.pop(0)
        if word == "--":
            return [*result, word, *left]
        flag, joined, value = word.partition("=")
        habit = FLAGS.get(flag)
        if habit is None or flag in ours:
            result.append(word)
            if word in valued and left:
                result.append(left.pop(0))
            continue
        values = [value] if joined else [left.pop(0) for _ in range(habit.n_values) if left]
        if len(values) < habit.n_values:
            raise click.UsageError(f"{flag} needs a value")
        if habit.choices and left and left[0] in habit.choices:
            left.pop(0)
        if habit.ours:
            result += [habit.ours, *values]
        else:
            tell(f"{flag} has no effect: {habit.reason}")
    return result
