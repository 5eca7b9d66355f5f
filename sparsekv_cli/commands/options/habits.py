"""Flags of llama.cpp that people type by habit. They are translated, or ignored with a reason.

Every command with a model accepts them. A command's own flag comes first. docs/models.md lists all
of them.
"""

import os
from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass
from typing import Any

import click
from click.parser import _OptionParser

from sparsekv_cli.commands.shared.terminal import say

# Option of this program -> its names in other programs.
ALIASES: dict[str, tuple[str, ...]] = {
    "model": ("-hf", "-hfr", "--hf-repo"),
    "models": ("-hf", "-hfr", "--hf-repo"),
    "parallel": ("-np",),
    "n_predict": ("--predict",),
    "draft_model": ("-md", "--model-draft"),
    "grammar": ("--grammar-file",),
    "json_schema": ("-j", "-jf", "--json-schema-file"),
    "timeout": ("-to",),
    "stop": ("--reverse-prompt",),
}


# First words of ollama and llama.cpp -> words of this program.
WORDS = {
    "version": ("--version",),
    "help": ("--help",),
    "list": ("models",),
    "ls": ("models",),
    "pull": ("models", "get"),
    "rm": ("models", "rm"),
    "ps": ("models", "ps"),
}


@dataclass(frozen=True)
class Habit:
    """A flag that this program accepts and that is no option of its own."""

    names: tuple[str, ...]
    takes: str = ""  # name of its value, in brackets if it may be missing; "": it has no value
    why: str = ""  # why it has no effect, for the user
    # Changes the values of other options. Returns a line for the user, or "". Raises
    # click.UsageError for an impossible value.
    change: Callable[[dict[str, Any], str], str] | None = None
    commands: tuple[str, ...] = ()  # commands that accept it; empty: all

    @property
    def key(self) -> str:
        return "habit_" + self.names[0].lstrip("-").replace("-", "_")

    def option(self, names: list[str]) -> click.Option:
        """Returns the hidden click option of the flag. names: those of its names that are free."""
        if not self.takes:
            return click.Option([*names, self.key], is_flag=True, hidden=True)
        optional: dict[str, Any] = {}
        if self.takes.startswith("["):
            optional = {"is_flag": False, "flag_value": "on"}
        return click.Option([*names, self.key], type=str, hidden=True, **optional)


def _gpu_layers(values: dict[str, Any], text: str) -> str:
    """Changes the values for ``-ngl``: 0 means the CPU. Other numbers have no effect."""
    word = text.strip().lower()
    if word not in ("auto", "all") and not word.lstrip("-").isdecimal():
        raise click.UsageError(f"-ngl {text}: expected a number of layers, auto or all")
    if "device" not in values:
        return "" if word == "0" else "this command computes on the CPU"
    if word == "0":
        if values.get("device") == "cuda":
            raise click.UsageError("-ngl 0 is the CPU, and --device cuda is a GPU: leave one out")
        values["device"] = "cpu"
        return ""
    return "--device chooses the GPU or the CPU for all layers"


def _host_cache(values: dict[str, Any], _text: str) -> str:
    if "kv" not in values:
        return "this command chooses the memory of the KV cache itself"
    values["kv"] = "host"
    return ""


def _no_conversation(values: dict[str, Any], _text: str) -> str:
    if "raw" not in values:
        raise click.UsageError("-no-cnv: chat is a conversation; use 'sparsekv-cli run --raw'")
    values["raw"] = True
    return ""


def _offline(_values: dict[str, Any], _text: str) -> str:
    os.environ["HF_HUB_OFFLINE"] = "1"
    return ""


ONE_GPU = "one GPU computes all layers"
CHUNKS = "the prefill chooses its chunks itself"
MAPPED = "the file is mapped, and the system keeps the pages that are used"
TEMPLATE = "prompts and chats get the model's chat template, except with --raw"
THREADS = "prefill and decode use the same threads, set by -t"
QUIET = "the output is always plain text"
HABITS = (
    Habit(("-ngl", "--gpu-layers", "--n-gpu-layers"), "N", change=_gpu_layers),
    Habit(("-nkvo", "--no-kv-offload"), change=_host_cache),
    Habit(
        ("-no-cnv", "-nocnv", "--no-conversation"),
        change=_no_conversation,
        commands=("run", "chat"),
    ),
    Habit(("--offline",), change=_offline),
    Habit(
        ("-cnv", "--conversation", "-i", "--interactive"),
        why="chat is a conversation, and run gives one answer with the chat template",
    ),
    Habit(
        ("-st", "--single-turn"),
        why="run gives one answer, and chat goes on until /exit",
    ),
    Habit(("-fa", "--flash-attn"), "[on|off|auto]", "attention is always computed in blocks"),
    Habit(("-b", "--batch-size"), "N", CHUNKS),
    Habit(("-ub", "--ubatch-size"), "N", CHUNKS),
    Habit(("-tb", "--threads-batch"), "N", THREADS),
    Habit(("--jinja",), why=TEMPLATE),
    Habit(("-sm", "--split-mode"), "MODE", ONE_GPU),
    Habit(("-mg", "--main-gpu"), "N", f"{ONE_GPU}: choose it with CUDA_VISIBLE_DEVICES"),
    Habit(("-ts", "--tensor-split"), "LIST", ONE_GPU),
    Habit(("--mlock",), why=MAPPED),
    Habit(("--mmap",), why=MAPPED),
    Habit(("--no-mmap",), why=f"{MAPPED}; --repack on makes a copy"),
    Habit(("-mmp",), "0|1", MAPPED, commands=("bench",)),
    Habit(("--numa",), "TYPE", "threads and memory are placed by the system"),
    Habit(("--prio",), "N", "the system's priority is used, as nice sets it"),
    Habit(("-cb", "--cont-batching"), why="requests always join a running batch"),
    Habit(("--no-warmup",), why="there is no empty run before the first prompt"),
    Habit(("--no-perf",), why="the line about speed goes to stderr"),
    Habit(("-e", "--escape"), why="texts are taken as they are: write $'\\n' in the shell"),
    Habit(("--no-escape",), why="texts are taken as they are"),
    Habit(("--no-display-prompt",), why="the prompt is never printed"),
    Habit(("--simple-io",), why=QUIET),
    Habit(("-co", "--color"), "[on|off|auto]", QUIET),
    Habit(("--log-disable",), why="there is no log; 2>/dev/null hides the remarks on stderr"),
    Habit(("--no-context-shift",), why="the context shifts only with chat's --context-shift"),
    Habit(("--metrics",), why="/metrics is always there", commands=("serve",)),
)  # fmt: skip


def free_names(names: tuple[str, ...], taken: set[str]) -> list[str]:
    return [name for name in names if name not in taken]


def habits_of(command: click.Command, name: str | None) -> Iterator[tuple[Habit, click.Option]]:
    """Yields the habits that a command with a model accepts, with their options.

    name: the command's name.
    """
    taken = {name for each in command.params for name in each.opts}
    for habit in HABITS:
        if habit.commands and name not in habit.commands:
            continue
        if names := free_names(habit.names, taken):
            yield habit, habit.option(names)


def add_aliases(command: click.Command, parser: _OptionParser) -> None:
    """Lets a command's parser accept the names that other programs have for its options."""
    taken = {name for each in command.params for name in each.opts}
    for each in command.params:
        names = free_names(ALIASES.get(each.name or "", ()), taken)
        if names and isinstance(each, click.Option):
            action = "append" if each.multiple else "store"
            parser.add_option(obj=each, opts=names, dest=each.name, action=action, nargs=1)


def apply_habits(command: click.Command, context: click.Context) -> None:
    """Removes the habits from a command line's values.

    Each is translated, or a line tells the user why it has no effect.
    """
    values = context.params
    for habit, option in habits_of(command, context.info_name):
        given = values.pop(habit.key, None)
        if given in (None, False):
            continue
        text = given if isinstance(given, str) else ""
        try:
            line = habit.change(values, text) if habit.change else habit.why
        except click.UsageError as error:
            error.ctx = context
            raise
        if line:
            typed = " ".join(filter(None, [option.opts[0], text]))
            say(f"{typed} has no effect: {line}")


def translated(words: list[str], commands: Container[str]) -> list[str]:
    """Returns a command line with this program's words. commands: the program's own names."""
    if not words or words[0] in commands or words[0].startswith("-"):
        return words
    first, *rest = words
    if first == "help" and rest:
        return [*rest, "--help"]
    if first in WORDS:
        return [*WORDS[first], *rest]
    return ["chat", "-m", *words] if is_model(first) else words


def is_model(word: str) -> bool:
    """Returns whether ``word`` means a model: by its form, or because a model has this name."""
    if word.lower().endswith(".gguf") or "/" in word:
        return True
    from sparsekv_cli.models.sources.folder import find_by_name
    from sparsekv_cli.models.sources.locate import PACKAGED_MODELS

    return word in PACKAGED_MODELS or find_by_name(word) is not None
