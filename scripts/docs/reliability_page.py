"""docs/reliability.md, from the files in docs/data/reliability.

    python scripts/docs/reliability_page.py

The same files give the same page, byte for byte: a test makes it again and compares.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "reliability.md"
Numbers = Mapping[str, Mapping[str, Any]]

TOP = """# Reliability

Two scripts look for faults. A test runs a small part of both.

## Inputs that nobody meant

`scripts/fuzz TARGET` changes inputs: files, lines, requests and commands. It changes header fields
and makes their checksum again. A child process runs each of them. No input may end the process by a
signal, take more than 10 s of CPU time, or take 1 GB more than the model. A refusal is one line, or
a status of 4xx. A file of rows that is accepted leaves the answer as it is without the file. What
is found lies in `tests/data/fuzz`, and every run begins with it.

The table has the last run of each target. "Found" counts the faults of that run. Later commits mend
them.

"""
MIDDLE = """
## Faults of the disk

`scripts/faults` runs small jobs that write files. It puts a fault into each operation on the disk.
The job is killed before the operation or within a write. The disk is full (ENOSPC), over its quota
(EDQUOT) or read-only (EROFS). A write is short. The folder is gone. Then the next run must find the
old file or the new one, and go on. An answer that was appended is there as a whole, or not at all.
The user's other files must be as they were. Three processes write at once, too.

"""


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    lines = [head, *rows]
    shown = [f"| {' | '.join(str(cell) for cell in line)} |" for line in lines]
    shown.insert(1, "|---|" + "---:|" * (len(head) - 1))
    return "\n".join(shown) + "\n"


def page(fuzz: Numbers, faults: Numbers) -> str:
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
    return TOP + targets + MIDDLE + writers


def read(name: str) -> Any:
    return json.loads((ROOT / "docs" / "data" / "reliability" / f"{name}.json").read_text("utf-8"))


if __name__ == "__main__":
    PAGE.write_text(page(read("fuzz"), read("faults")), "utf-8")
