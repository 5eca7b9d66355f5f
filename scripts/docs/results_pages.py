"""docs/benchmarks.md, README's results and the pictures, from the files in docs/data.

The same data give the same pages, byte for byte: a test makes them again and compares.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import results_elsewhere
import results_plots
from results_peers import PEERS
from results_sections import SECTIONS, Column, Row, figure, name, table, three

Data = Mapping[str, Mapping[str, Any]]  # by part: what its file holds
BUSY = 0.5  # cores in other programs' hands that a page speaks of

INTRO = """# Benchmarks

`scripts/results` wrote this page from the files in [data](data). Each section names its commands,
machine, commit and date. Figures of different sections may be of different machines or commits. The
model is SmolLM2-135M-Instruct (Q4_1) with default options, unless a section says otherwise. No
prompt comes from disk (`SPARSEKV_NO_CACHE=1`). Speed is in tokens a second. It is the median of
several runs.
"""


def by_method(data: Data, *parts: str) -> dict[str, dict[int, Row]]:
    """Rows of decode by method and depth, of several parts together."""
    found: dict[str, dict[int, Row]] = {}
    for part in parts:
        for row in data[part]["rows"] if part in data else ():
            found.setdefault(row["method"], {})[row["depth"]] = row
    return found


def speed_cell(row: Row | None) -> str:
    """``132 (2.4)``: tokens a second, and over those of full."""
    if row is None:
        return ""
    ratio = f" ({row['of_full']:.1f})" if "of_full" in row and row["method"] != "full" else ""
    return three(row["tokens_per_s"]) + ratio


def read(folder: Path) -> dict[str, Any]:
    """The parts that are there, by name."""
    return {
        path.stem: json.loads(path.read_text(encoding="utf-8"))
        for path in sorted(folder.glob("*.json"))
    }


def provenance(told: Mapping[str, Any]) -> str:
    """Machine, commit, date and commands of a part."""
    where = told["machine"]
    line = f"{where['cpu']}, {where['cores']} cores, {where['memory_gib']} GiB; {where['system']}"
    cores = told["busy_cores"]
    busy = "; how busy the machine was is not known" if cores is None else ""
    if cores is not None and cores > BUSY:
        busy = f"; **{cores} cores busy with other work**"
    commands = "\n".join(told["commands"])
    when = f"commit {told['commit'][:12]}, {told['date']}, {told['seconds']:.0f} s{busy}"
    return f"{line}; {when}.\n\n```sh\n{commands}\n```"


def benchmarks(data: Data) -> str:
    """docs/benchmarks.md."""
    parts = [INTRO]
    pictures = {"speed.svg": "Speed by depth", "accuracy.svg": "Accuracy against speed"}
    drawn = results_plots.drawn_from(data)
    parts += [f"![{title}]({file})\n" for file, title in pictures.items() if file in drawn]
    for section in SECTIONS:
        if section.part in data:
            told = data[section.part]
            parts.append(f"## {section.title}\n")
            parts += [f"{section.about}\n"] * bool(section.about)
            parts.append(section.body(told["rows"]) + "\n")
            parts.append(provenance(told) + "\n")
    return "\n".join(parts)


def results(data: Data) -> str:
    """README's table: speed at depths, memory and accuracy of every method; then some lines."""
    speeds = by_method(data, "decode", "deep", "deep_others")
    depths = [d for d in (2048, 8192, 32768) if any(d in rows for rows in speeds.values())]
    depths = depths or sorted({d for rows in speeds.values() for d in rows})
    told = data["decode"]
    distances = {row["method"]: row for row in data["accuracy"]["rows"]}
    length = data["accuracy"]["rows"][0]["tokens"]
    where = told["machine"]
    held = max(row["depth"] for row in told["rows"])
    rows = [{"method": m, "speeds": speeds[m], **distances.get(m, {})} for m in speeds]
    columns = [Column("method", name)]
    for d in depths:
        columns.append(
            Column(f"tokens/s at {d}", lambda row, d=d: speed_cell(row["speeds"].get(d)))
        )
    columns += [
        Column(f"MB at {held}", lambda row: three(row["speeds"][held]["cache_mb"])),
        Column("KLD", figure("kld", 3)),
        Column("top-1", figure("top1", 2)),
        Column("needles", figure("needles", 0)),
    ]
    lines = [
        f"SmolLM2-135M (Q4_1) on {where['cores']} cores of {where['cpu']}. Every method is sparse",
        "from the first row (`--sparse-from 0`). By default it attends to all rows while that is",
        "faster. Speed is by rows in the cache, and in brackets how many times as fast as `full`.",
        f"KLD and top-1 are relative to `full` after {length} tokens. Needles are facts found of "
        f"{data['accuracy']['rows'][0]['needles_of']}.",
        "",
        table(rows, columns),
        "",
        *(f"- {line}" for line in remarks(data)),
    ]
    return "\n".join(lines).rstrip()


def remarks(data: Data) -> Iterable[str]:
    """Lines below README's table."""
    if "prefill" in data:
        pairs = [(r["n_prompt"], three(r["tokens_per_s"])) for r in data["prefill"]["rows"]]
        yield "Prefill: " + ", ".join(f"{s} tokens/s for {n} tokens" for n, s in pairs) + "."
    if "start" in data:
        for row in data["start"]["rows"]:
            yield (
                f"First token with `{row['method']}`: {row['warm_s']:.2f} s. The first time it "
                f"takes {row['cold_s']:.0f} s, because kernels are compiled."
            )
    if "memory" in data:
        rows = [r for r in data["memory"]["rows"] if r["method"] in ("full", "lfps")]
        peaks = [f"{three(r['peak_mb'])} MB with `{r['method']}`" for r in rows]
        yield f"Peak memory with {rows[0]['prompt_tokens']} prompt tokens: {', '.join(peaks)}."
    if "peer" in data:
        ratios = [(r["test"], r["ratio"]) for r in data["peer"]["rows"] if r["unit"] == "t/s"]
        wanted = ("pp512", "tg32 @ d8192, full", "tg32 @ d8192, lfps", "tg32 @ d32768, lfps")
        of_test = {test.replace("tg32 @ d", "at "): x for test, x in ratios if test in wanted}
        found = [f"{test} {ratio:.1f}" for test, ratio in of_test.items()]
        if found:
            names = [p for p in PEERS if any(f"{p} median" in r for r in data["peer"]["rows"])]
            of = "the faster of " if len(names) > 1 else ""
            yield f"Times as fast as {of}{' and '.join(names)}:\n  {'; '.join(found)}."


def write(root: Path) -> None:
    """Writes the pages and pictures of ``root``/docs/data; README if it is there."""
    docs = root / "docs"
    data = read(docs / "data")
    (docs / "benchmarks.md").write_text(benchmarks(data), encoding="utf-8")
    for file, picture in results_plots.pictures(data).items():
        (docs / file).write_text(picture, encoding="utf-8")
    readme = root / "README.md"
    if readme.is_file() and {"decode", "accuracy"} <= data.keys():
        page = readme.read_text(encoding="utf-8")
        readme.write_text(
            results_elsewhere.between(page, "results", results(data)), encoding="utf-8"
        )
    results_elsewhere.write(docs, data, provenance)
