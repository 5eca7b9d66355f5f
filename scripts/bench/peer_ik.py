"""ik_llama.cpp in scripts/bench/peer: its llama-bench, started anew for every measurement.

llama-bench times itself, so that neither loading nor repacking is part of a figure. Each test runs
with weights as they are and repacked (``-rtr`` 0 and 1) in its first round, and as was faster from
then on. The prompt in front of decoded tokens is prefilled again each time, untimed.
"""

from __future__ import annotations

import json
import re
import signal
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from measuring import run
from peer_table import Case

from sparsekv_cli.errors import SparseKVError

OPTIONS = ("-rtr", "-gp", "-fa")  # that are needed; llama.cpp's llama-bench lacks the first two
N_UBATCH = 512  # rows of a prefill at once, as in the other programs


@dataclass
class IkBench:
    """ik_llama.cpp by the path of its llama-bench; ``about`` has what it says of itself."""

    name: str
    program: str
    model: Path
    threads: int
    environment: dict[str, str]
    about: dict[str, Any] = field(default_factory=dict)
    _repack: dict[Case, int] = field(default_factory=dict)
    _peaks: dict[int, int] = field(default_factory=dict)  # bytes, by repack

    def __enter__(self) -> IkBench:
        said = self._run("--help")[0]
        if missing := [option for option in OPTIONS if f" {option}" not in said]:
            raise SparseKVError(
                f"{self.program} has no option {missing[0]}: --ik wants the llama-bench of "
                "ik_llama.cpp, llama.cpp's is another program"
            )
        row = self._bench(0, 1, "-p", "1", "-n", "0")  # and the file is in memory
        self.about = {"version": row["build_commit"], "cpu": row["cpu_info"], "rtr": {}}
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing runs between two measurements."""

    def warm_up(self, case: Case) -> None:
        """llama-bench warms itself up."""

    def fill(self, depth: int) -> None:
        """llama-bench prefills in each run."""

    def rate(self, case: Case) -> float:
        """Tokens a second of one repetition of a test."""
        if case in self._repack:
            return self._rate(case, self._repack[case])
        rates = {repack: self._rate(case, repack) for repack in (0, 1)}
        best = max(rates, key=lambda repack: rates[repack])
        self._repack[case] = self.about["rtr"][case.label] = best
        return rates[best]

    def peak_memory(self) -> int:
        """Most memory of what ran so far, with ``-rtr`` 0 or 1, whichever took less; bytes.

        Never less than this process' own peak, which the system counts as that of a child, too.
        """
        return min(self._peaks.values())

    def _rate(self, case: Case, repack: int) -> float:
        shape = ["-p", str(case.n_prompt), "-n", str(case.n_gen)]
        if case.n_depth:
            shape = ["-p", "0", "-n", "0", "-gp", f"{case.n_depth},{case.n_gen}"]
        # Its own warm-up is one token, so a prompt is run twice; a depth is one already.
        row = self._bench(repack, 1 if case.n_depth else 2, *shape)
        if (row["n_prompt"], row["n_gen"]) != (case.n_depth or case.n_prompt, case.n_gen):
            raise SparseKVError(f"{self.name} ran another test than {case.label}: {row['test']}")
        return float(row["samples_ts"][-1])

    def _bench(self, repack: int, repetitions: int, *shape: str) -> dict[str, Any]:
        """llama-bench's row of one test."""
        text, peak = self._run(
            "-m", str(self.model), "-t", str(self.threads), "-fa", "1", "-ub", str(N_UBATCH),
            "-rtr", str(repack), "-r", str(repetitions), "-o", "json", *shape,
        )  # fmt: skip
        self._peaks[repack] = max(peak, self._peaks.get(repack, 0))
        # An object is found by its lines: loading a model prints into the array around it.
        rows = re.findall(r"^  \{$.*?^  \}", text, flags=re.DOTALL | re.MULTILINE)
        if len(rows) != 1:
            raise SparseKVError(
                f"{self.name} gave {len(rows)} results of one test: {text[-200:]!r}"
            )
        return json.loads(rows[0])

    def _run(self, *arguments: str) -> tuple[str, int]:
        """Returns the program's output and its peak memory in bytes.

        Raises SparseKVError when it fails.
        """
        try:
            done = run([self.program, *arguments], self.environment)
        except OSError as error:
            raise SparseKVError(f"{self.program}: {error.strerror}") from None
        if done.code:
            raise SparseKVError(f"{self.name} ended {ending(done.code)}: {done.last_line}")
        return done.stdout, done.peak_bytes


def ending(code: int) -> str:
    """``with exit code 1`` or ``by SIGILL``."""
    return f"with exit code {code}" if code >= 0 else f"by {signal.Signals(-code).name}"
