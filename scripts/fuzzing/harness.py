"""Runs the cases of a fuzz target in a child process, and keeps what is new and what is found.

The child is ended if a case takes more than MOST_SECONDS of its CPU time, or MOST_BYTES more memory
than it had with its model. Both are found, and so is an end of the child. A case whose outcome is
new joins the corpus: it is refused at another place, or with other words.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import select
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from mutation import Change
from worker import LENGTH, ROOT, receive, send

MOST_SECONDS, MOST_WAIT = 10.0, 300.0  # of a case: of its process, and by the clock
COMPILE_SECONDS = 120.0  # of a first case, for which kernels may be compiled
MOST_BYTES = 1 << 30  # of a case, more than the process has with its model
MOST_CASES = 3000  # of a process
SMALLER_SECONDS = 20.0  # of making a found case smaller
COMMITTED = ROOT / "tests" / "data" / "fuzz"
KEPT = ROOT / "build" / "fuzz"
PAGE, TICK = os.sysconf("SC_PAGE_SIZE"), os.sysconf("SC_CLK_TCK")
Outcome = dict[str, str]


class Child:
    """A process that has a target open, and the seeds that it told."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._folder = Path(tempfile.mkdtemp(prefix="sparsekv-fuzz-"))
        self._said = (self._folder / ".stderr").open("a+b")
        worker = Path(__file__).with_name("worker.py")
        self._process = subprocess.Popen(
            [sys.executable, str(worker), name, str(self._folder)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._said,
        )  # fmt: skip
        self.n_cases = 0
        head = self._answer()
        if head is None:
            raise SystemExit(f"{name}: the target cannot be opened:\n{self._tail()}")
        seeds = [self._answer() for _ in range(LENGTH.unpack(head)[0])]
        self.seeds = [seed for seed in seeds if seed is not None]
        self._bytes = self._resident()

    def run(self, case: bytes, most_seconds: float = MOST_SECONDS) -> Outcome:
        """The outcome of a case. The child has ended if it was found by that."""
        assert self._process.stdin is not None
        self.n_cases += 1
        self._said.truncate(0)
        started, used = time.monotonic(), self._seconds()
        try:
            send(self._process.stdin, case)
            while not self._has_answer(0.2):
                seconds = self._seconds() - used
                if seconds > most_seconds or time.monotonic() - started > MOST_WAIT + most_seconds:
                    return self._end("hang", f"{seconds:.0f} s of CPU time and no answer")
                if self._resident() - self._bytes > MOST_BYTES:
                    return self._end("memory", "a gigabyte more than before")
            answer = self._answer()
        except BrokenPipeError:
            answer = None
        if answer is None:
            return self._ended()
        found: Outcome = json.loads(answer)
        if self._resident() - self._bytes > MOST_BYTES:
            return self._end("memory", "a gigabyte more than before")
        if b"Traceback" in (said := self._tail()):
            return {"kind": "found", "what": said.decode(errors="replace"), "where": "stderr"}
        return found

    def _ended(self) -> Outcome:
        code, said = self._process.wait(), self._tail().decode(errors="replace")
        lines = said.splitlines()
        if code == 1 and lines and lines[-1].startswith("error: "):
            return {"kind": "refused", "what": lines[-1], "where": "the end of the process"}
        where = f"signal {-code}" if code < 0 else f"exit {code}"
        return {"kind": "found", "what": said, "where": where}

    def _end(self, where: str, what: str) -> Outcome:
        self._process.kill()
        return {"kind": "found", "what": what, "where": where}

    def _has_answer(self, seconds: float) -> bool:
        return bool(select.select([self._process.stdout], [], [], seconds)[0])

    def _answer(self) -> bytes | None:
        assert self._process.stdout is not None
        return receive(self._process.stdout)

    def _tail(self) -> bytes:
        self._said.seek(0)
        return self._said.read()[-4000:]

    def _resident(self) -> int:
        try:
            return int(Path(f"/proc/{self._process.pid}/statm").read_text().split()[1]) * PAGE
        except (OSError, IndexError):
            return 0

    def _seconds(self) -> float:
        try:
            parts = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            return 0.0
        return (int(parts[11]) + int(parts[12])) / TICK

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()
        self._said.close()
        shutil.rmtree(self._folder, ignore_errors=True)


def signature(outcome: Outcome) -> str:
    """Outcomes with the same one are of the same fault, or of the same refusal."""
    if outcome["kind"] == "found" and outcome["where"]:
        return f"found {outcome['where']}"
    return f"{outcome['kind']} {outcome['where']} {outcome['what']}"


@dataclass
class Fuzz:
    """A run of one target. ``keeps``: whether the corpus of this machine is read and grows."""

    name: str
    change: Change
    rng: random.Random
    keeps: bool
    tell: Callable[[str], None]
    n: int = 0
    found: dict[str, Outcome] = field(default_factory=dict)
    _corpus: dict[str, bytes] = field(default_factory=dict)  # by the outcome's signature
    _child: Child | None = None

    def run(self, is_done: Callable[[int], bool]) -> None:
        """Runs the seeds and the corpora, then changes of them, until ``is_done(executions)``."""
        child = self._opened()
        folders = [COMMITTED / self.name] + [KEPT / self.name] * self.keeps
        files = [path for folder in folders for path in sorted(folder.glob("*"))]
        try:
            for case in [*child.seeds, *(path.read_bytes() for path in files)]:
                self._corpus.setdefault(f"seed {len(self._corpus)}", case)
                self._try(case, COMPILE_SECONDS)
            cases = list(self._corpus.values())
            while not is_done(self.n):
                case = self.change(self.rng, self.rng.choice(cases))
                if self._try(case):
                    cases.append(case)
        finally:
            if self._child is not None:
                self._child.close()

    def _try(self, case: bytes, most_seconds: float = MOST_SECONDS) -> bool:
        """Runs a case; whether its outcome is new. One that is found is made small and kept."""
        outcome = self._execute(case, most_seconds)
        key = signature(outcome)
        if key in self._corpus or key in self.found:
            return False
        if outcome["kind"] != "found":
            self._corpus[key] = case
            if self.keeps:
                self._keep(KEPT, key, case)
            return True
        self.found[key] = outcome
        path = self._keep(COMMITTED, key, self._smaller(case, key))
        self.tell(f"found in {path}: {outcome['where']}\n{outcome['what']}")
        return False

    def _execute(self, case: bytes, most_seconds: float = MOST_SECONDS) -> Outcome:
        child = self._opened()
        outcome = child.run(case, most_seconds)
        self.n += 1
        if not child.is_alive or outcome["where"] in ("hang", "memory"):
            child.close()
            self._child = None
        return outcome

    def _opened(self) -> Child:
        if self._child is not None and self._child.n_cases >= MOST_CASES:
            self._child.close()
            self._child = None
        if self._child is None:
            self._child = Child(self.name)
        return self._child

    def _smaller(self, case: bytes, key: str) -> bytes:
        """Leaves out parts of a case as long as it is found in the same way."""
        end, size = time.monotonic() + SMALLER_SECONDS, max(1, len(case) // 2)
        while size and time.monotonic() < end:
            at = 0
            while at < len(case) and time.monotonic() < end:
                less = case[:at] + case[at + size :]
                if signature(self._execute(less)) == key:
                    case = less
                else:
                    at += size
            size //= 2
        return case

    def _keep(self, folder: Path, key: str, case: bytes) -> Path:
        path = folder / self.name / hashlib.sha256(key.encode(errors="replace")).hexdigest()[:12]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(case)
        return path
