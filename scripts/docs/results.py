"""Measures this machine, part by part, and writes docs/: run by scripts/results.

    scripts/results --quick                    the main tables (15 minutes on two cores)
    scripts/results --all                      every part; what is there for this commit is skipped
    scripts/results --only memory,start        these parts, again
    scripts/results --only real_speed --size real_depths=0,8192 --size "trained=A.gguf B.gguf"
    scripts/results --only peer --machine amd  of another machine; the pages show both
    scripts/results --pages                    the pages again, from docs/data
    scripts/results --quick --tiny --into DIR  small sizes, to see that it runs

A part is a file docs/data/PART.json with its figures, its commands, the machine, the commit and the
date. With --machine it is PART@MACHINE.json. From these files come docs/benchmarks.md, the pictures
in docs/ and README's results. --size changes one of the sizes in results.toml.
"""

import argparse
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import results_pages
from measuring import log
from results_parts import PARTS, SIZES, TINY, Sizes
from results_runner import ROOT, UNFINISHED, Runner

from sparsekv_cli.errors import SparseKVError

MEASURED = ("cpu", "kernels", "models", "sparsekv_cli", "scripts/bench", "scripts/accuracy")


def commit() -> str:
    """The last commit that changed what is measured; ``+`` when there are changes beside it."""

    def git(*arguments: str) -> str:
        done = subprocess.run(
            ["git", *arguments, "--", *MEASURED], cwd=ROOT, capture_output=True, text=True
        )
        if done.returncode:
            raise SparseKVError(
                "this is no git checkout, so what is measured has no commit; clone it"
            )
        return done.stdout.strip()

    changed = "+" if git("status", "--porcelain") else ""
    return git("log", "-1", "--format=%H") + changed


def machine() -> dict[str, Any]:
    """What the figures are of."""
    from sparsekv_cli.evaluation.roofline import cpu_name

    return {
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30),
        "system": f"{platform.system()} {platform.machine()}, Python {platform.python_version()}",
    }


def busy_cores(seconds: float = 2.0) -> float | None:
    """How many cores other programs keep busy now; None where there is no /proc/stat."""

    def ticks() -> list[int]:  # of all cores: user, nice, system, idle, waiting for a disk, ...
        return [int(text) for text in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]

    try:
        start = ticks()
        time.sleep(seconds)
        spent = [end - begin for begin, end in zip(start, ticks(), strict=True)]
    except OSError:
        return None
    share = 1 - (spent[3] + spent[4]) / max(1, sum(spent))
    return round((os.cpu_count() or 1) * share, 2)


def without_folders(sizes: Sizes) -> Sizes:
    """The sizes with the names of files in place of their paths."""
    return {
        name: re.sub(r"(?<!\S)\S*/", "", size) if name in ("model", "trained", "large") else size
        for name, size in sizes.items()
    }


def is_there(path: Path, about: dict[str, Any]) -> bool:
    """Whether ``path`` holds a part of this commit, this machine and these sizes."""
    if not path.is_file() or about["commit"].endswith("+"):
        return False
    told = json.loads(path.read_text(encoding="utf-8"))
    return all(told.get(name) == about[name] for name in ("commit", "machine", "sizes"))


def measure(name: str, sizes: Sizes, path: Path, about: dict[str, Any], ik: str) -> None:
    """Runs a part and writes its file."""
    busy = busy_cores()
    unfinished = UNFINISHED / f"{name}-{about['commit']}"
    if about["commit"].endswith("+"):  # of what code, nobody knows
        shutil.rmtree(unfinished, ignore_errors=True)
    begin, run = time.perf_counter(), Runner(ik=ik, unfinished=unfinished)
    rows = PARTS[name].measure(run, sizes)
    seconds = time.perf_counter() - begin
    told = {
        **about,
        "date": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "busy_cores": busy,
        "seconds": round(seconds, 1),
        "commands": run.commands,
        "rows": rows,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(told, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    shutil.rmtree(unfinished, ignore_errors=True)
    log(f"{name}: {seconds:.0f} s")


def measure_parts(files: Mapping[str, Path], sizes: Sizes, again: bool, ik: str) -> int:
    """Measures parts, by name, for their files.

    Returns 1 when a part failed; the others are measured nevertheless.
    """
    status = 0
    about = {"machine": machine(), "commit": commit(), "sizes": without_folders(sizes)}
    begin = time.perf_counter()
    left = [name for name, file in files.items() if again or not is_there(file, about)]
    for name in sorted(set(files) - set(left)):
        log(f"{name}: there for this commit")
    if left and sizes["prepare"]:
        Runner().cli("warmup", "-m", sizes["model"])
        log(f"kernels and calibrations: {time.perf_counter() - begin:.0f} s")
    for name in left:
        if PARTS[name].missing:
            log(f"{name}: left out, {PARTS[name].needs} is not installed")
            continue
        try:
            measure(name, sizes, files[name], about, ik)
        except SparseKVError as error:
            log(f"error: {name}: {error}")
            status = 1
    log(f"all: {time.perf_counter() - begin:.0f} s")
    return status


def size_of(text: str) -> tuple[str, Any]:
    """``steps=16`` -> ("steps", 16)."""
    name, _, value = text.partition("=")
    default = SIZES.get(name)
    if default is None:
        raise argparse.ArgumentTypeError(f"{name!r}: choose from {', '.join(SIZES)}")
    return name, type(default)(value)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        "results", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--quick", action="store_true", help="the main tables")
    what.add_argument("--all", action="store_true", help="every part")
    what.add_argument("--only", metavar="PART,...", help=", ".join(PARTS))
    what.add_argument("--pages", action="store_true", help="write the pages only")
    parser.add_argument("-m", "--model", default=SIZES["model"], help="GGUF file or packaged model")
    parser.add_argument("--ik", default="", metavar="FILE", help="llama-bench of ik_llama.cpp")
    parser.add_argument("--machine", metavar="NAME", help="keep these figures beside others")
    parser.add_argument("--again", action="store_true", help="parts of this commit, too")
    parser.add_argument("--tiny", action="store_true", help="small sizes, to see that it runs")
    parser.add_argument("--size", action="append", default=[], type=size_of, metavar="NAME=VALUE",
        help="one of the sizes of results.toml (repeatable)")  # fmt: skip
    parser.add_argument("--into", type=Path, default=ROOT, help="where docs/ and README.md lie")
    options = parser.parse_args(arguments)
    names = [name for name, part in PARTS.items() if part.quick]
    names += [name for name in PARTS if options.all and name not in names]
    if options.only:
        names = options.only.split(",")
        unknown = [name for name in names if name not in PARTS]
        if unknown:
            parser.error(f"unknown part {unknown[0]!r}: choose from {', '.join(PARTS)}")
    sizes = (TINY if options.tiny else SIZES) | {"model": options.model} | dict(options.size)
    status = 0
    try:
        if not options.pages:
            again = options.again or bool(options.only)
            end = f"@{options.machine}.json" if options.machine else ".json"
            files = {name: options.into / "docs" / "data" / f"{name}{end}" for name in names}
            status = measure_parts(files, sizes, again, options.ik)
        results_pages.write(options.into)
    except SparseKVError as error:
        log(f"error: {error}")
        return 1
    except KeyboardInterrupt:
        return 130
    return status


if __name__ == "__main__":
    sys.exit(main())
