"""Runs the commands of scripts/results, and keeps them as a user would type them."""

import json
import os
import shlex
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from measuring import ROOT, Ended, run

from sparsekv_cli.errors import SparseKVError

UNFINISHED = ROOT / "build" / "results"


@dataclass
class Runner:
    """Runs commands in the repository's root and keeps them as a user would type them.

    They neither find prompts on disk nor keep them there. SparseKVError when one fails.
    ik: llama-bench of ik_llama.cpp, if it is there; unfinished: a folder for what a long part has
    until it is whole.
    """

    ik: str = ""
    unfinished: Path = UNFINISHED
    commands: list[str] = field(default_factory=list)

    def cli(self, *arguments: str) -> Ended:
        """``sparsekv-cli ARGUMENTS``."""
        return self._run(["-m", "sparsekv_cli", *arguments], ["sparsekv-cli", *arguments])

    def program(self, path: str) -> Ended:
        """A program of ours, by its path."""
        return self._run([path], [path])

    def script(self, path: str, *arguments: str, may_end_with: int = 0) -> Any:
        """Returns what ``scripts/PATH ARGUMENTS`` writes with --json."""
        typed = [f"scripts/{path}", *arguments]
        with tempfile.TemporaryDirectory() as folder:
            told = Path(folder) / "told.json"
            self._run([*typed, "--json", str(told)], typed, may_end_with)
            return json.loads(told.read_text(encoding="utf-8"))

    def _run(self, arguments: list[str], typed: list[str], may_end_with: int = 0) -> Ended:
        self.commands.append(shlex.join(typed))
        done = run([sys.executable, *arguments], {**os.environ, "SPARSEKV_NO_CACHE": "1"}, ROOT)
        if done.code not in (0, may_end_with):
            raise SparseKVError(f"'{shlex.join(typed)}' ended with {done.code}: {done.last_line}")
        return done
