"""Runs the commands of scripts/results, and keeps them as a user would type them."""

import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
UNFINISHED = ROOT / "build" / "results"


class PartError(Exception):
    """A command that failed, in one line."""


class Done(NamedTuple):
    """What a command printed, how long it took, and the most memory it had."""

    stdout: str
    stderr: str
    seconds: float
    peak_bytes: int


@dataclass
class Runner:
    """Runs commands in the repository's root and keeps them as a user would type them.

    They neither find prompts on disk nor keep them there.
    ik: llama-bench of ik_llama.cpp, if it is there; unfinished: a folder for what a long part has
    until it is whole.
    """

    ik: str = ""
    unfinished: Path = UNFINISHED
    commands: list[str] = field(default_factory=list)

    def cli(self, *arguments: str, stdin: str | None = None) -> Done:
        """``sparsekv-cli ARGUMENTS``, with the file ``stdin``. PartError when it fails."""
        typed = shlex.join(["sparsekv-cli", *arguments]) + (f" < {stdin}" if stdin else "")
        self.commands.append(typed)
        return self._run(["-m", "sparsekv_cli", *arguments], typed, stdin)

    def program(self, path: str) -> Done:
        """A program of ours, by its path. PartError when it fails."""
        self.commands.append(path)
        return self._run([path], path, None)

    def script(self, path: str, *arguments: str, may_end_with: int = 0) -> Any:
        """What ``scripts/PATH ARGUMENTS`` writes with --json. PartError when it fails."""
        typed = shlex.join([f"scripts/{path}", *arguments])
        self.commands.append(typed)
        with tempfile.TemporaryDirectory() as folder:
            told = Path(folder) / "told.json"
            command = [f"scripts/{path}", *arguments, "--json", str(told)]
            self._run(command, typed, None, {0, may_end_with})
            return json.loads(told.read_text(encoding="utf-8"))

    def _run(
        self, arguments: Sequence[str], typed: str, stdin: str | None, codes: set[int] | None = None
    ) -> Done:
        begin = time.perf_counter()
        with (
            tempfile.TemporaryFile("w+", encoding="utf-8") as out,
            tempfile.TemporaryFile("w+", encoding="utf-8") as err,
            open(ROOT / stdin if stdin else os.devnull, "rb") as source,
        ):
            process = subprocess.Popen(
                [sys.executable, *arguments], cwd=ROOT, stdin=source, stdout=out, stderr=err,
                env={**os.environ, "SPARSEKV_NO_CACHE": "1"},
            )  # fmt: skip
            try:
                _, status, usage = os.wait4(process.pid, 0)
            except KeyboardInterrupt:
                process.kill()
                raise
            seconds = time.perf_counter() - begin
            process.returncode = os.waitstatus_to_exitcode(status)
            texts = []
            for file in (out, err):
                file.seek(0)
                texts.append(file.read())
        if process.returncode not in (codes or {0}):
            last = (texts[1].strip().splitlines() or ["it said nothing"])[-1]
            raise PartError(f"'{typed}' ended with {process.returncode}: {last}")
        unit = 1 if sys.platform == "darwin" else 1024
        return Done(*texts, seconds, usage.ru_maxrss * unit)
