"""docs/reliability.md, from the files in docs/data/reliability.

    python scripts/docs/reliability_page.py

The same files give the same page, byte for byte: a test makes it again and compares.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from measuring import ROOT, table

PAGE = ROOT / "docs" / "reliability.md"
Numbers = Mapping[str, Mapping[str, Any]]

TOP = """# Reliability

This page says how we look for faults, and what we found. A test runs a small part of each script.

## Bad inputs

`scripts/fuzz TARGET` changes inputs: files, lines, requests and commands. If it changes fields of a
header, it makes the checksum again. A child process runs each input. No input may end the process
by a signal. None may take more than 10 s of CPU time, or 1 GiB more than the model. A refusal is
one line, or a status of 4xx. If a file of rows is accepted, the answer is the same as without the
file. Inputs that showed a fault lie in `tests/data/fuzz`. Every run begins with them.

The table has the last run of each target. "Found" counts the faults of that run. Later commits mend
them.

"""
MIDDLE = """

## Faults of the disk

`scripts/faults` runs small jobs that write files. It puts a fault into each operation on the disk.
The faults are a kill before the operation or within a write, a short write, and a missing folder.
Or the disk is full (ENOSPC), over its quota (EDQUOT) or read-only (EROFS). The next run must find
the old file or the new one, and go on. An appended answer is there as a whole, or not at all. The
user's other files must be as they were. Another test has three processes that write at once.

"""
LAST = """

## A server under attack

`scripts/soak attack` attacks a server. Meanwhile a normal client asks it questions. The client's
first token may take twice its usual time. One attacker holds 150 connections, and each sends a byte
now and then. Another sends up to 200 requests a second. Times are medians. The machine had other
work to do.

"""
SOAK = """

## Use for a long time

`scripts/soak` uses the program for a given time. It ends with an error if memory (PSS), open files
or threads grow, or if counters contradict each other. Conversations continue past their context
with every method. A server has 32 clients that ask about long documents. Many of them leave. The
prefix cache on disk is used for simulated days. The clock jumps, and writers are killed.

"""
ARM = """

## ARM under emulation

`scripts/arm` runs tiny models with kernels for ARM, under `qemu-user`. A run has one of the 11
methods, a prompt of 300 tokens and 16 greedy tokens. The tokens must be those of x86. Logits may
differ by 1e-3. `sals` with the layers of `gemma4` differs by 0.2, because rounding chooses other
rows. On x86, embeddings that differ by 2e-6 cause the same difference.

"""


def ms(seconds: float) -> str:
    return f"{1000 * seconds:.0f}"


def page(fuzz: Numbers, faults: Numbers, soak: Numbers, arm: Numbers) -> str:
    """The text of the page."""
    targets = table(
        ("target", "executions", "seconds", "found", "commit"),
        (
            (f"`{name}`", each["executions"], each["seconds"], each["found"], f"`{each['commit']}`")
            for name, each in fuzz.items()
        ),
    )
    writers = table(
        ("writer", "operations", "faults", "files lost", "commit"),
        (
            (name, each["operations"], each["faults"], each["problems"], f"`{each['commit']}`")
            for name, each in faults.items()
        ),
    )
    attacks = table(
        ("attack", "requests", "first token, ms", "meanwhile, ms", "times"),
        (
            (each["attack"], each["requests"], ms(each["usual_s"]), ms(each["meanwhile_s"]),
             f"{each['times']:.2f}")
            for each in soak["attack"]["found"]
        ),
    )  # fmt: skip
    names = {"chat": ("conversations", "turns"), "serve": ("a server", "requests")}
    names["folder"] = ("the prefix cache on disk", "hours")
    found = {part: each["found"] for part, each in soak.items() if part in names}
    rows = [
        (names[part][0], f"{each[names[part][1]]} {names[part][1]}", each)
        for part, parts in found.items()
        for each in (parts if isinstance(parts, list) else [parts])
    ]
    soaked = table(
        ("what", "how much", "seconds", "MB, from", "to", "files", "threads"),
        (
            (what, n, each["seconds"], min(each["pss_mb"][1:]), max(each["pss_mb"]), each["files"],
             each["threads"])
            for what, n, each in rows
        ),
    )  # fmt: skip
    kinds: dict[str, list[Any]] = {}
    for name, each in arm.items():
        kinds.setdefault(name.split()[0], []).append((each["differs"], f"`{each['commit']}`"))
    emulated = table(
        ("layers of", "methods", "largest difference", "commit"),
        (
            (f"`{kind}`", len(runs), max(runs)[0], ", ".join(sorted({run[1] for run in runs})))
            for kind, runs in kinds.items()
        ),
    )
    return TOP + targets + MIDDLE + writers + LAST + attacks + SOAK + soaked + ARM + emulated + "\n"


def read(name: str) -> Any:
    return json.loads((ROOT / "docs" / "data" / "reliability" / f"{name}.json").read_text("utf-8"))


if __name__ == "__main__":
    PAGE.write_text(page(read("fuzz"), read("faults"), read("soak"), read("arm")), "utf-8")
