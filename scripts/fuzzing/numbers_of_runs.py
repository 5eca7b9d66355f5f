"""The numbers of runs by hand, in docs/data/reliability."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sparsekv_cli.system.files import alone_in

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "data" / "reliability"


def commit() -> str:
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def read_numbers(file: str) -> dict[str, Any]:
    path = FOLDER / f"{file}.json"
    return json.loads(path.read_text("utf-8")) if path.exists() else {}


def write_numbers(file: str, name: str, numbers: dict[str, Any], order: Sequence[str]) -> None:
    """Puts the numbers of one run next to those of others; ``order`` has the names of all."""
    with alone_in(FOLDER):
        known = {**read_numbers(file), name: numbers}
        ordered = {each: known[each] for each in order if each in known}
        (FOLDER / f"{file}.json").write_text(json.dumps(ordered, indent=1) + "\n", "utf-8")
