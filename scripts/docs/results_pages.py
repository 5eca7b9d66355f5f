"""docs/benchmarks.md, README's results and the tables of other pages, from the files in docs/data.

The same data give the same pages, byte for byte: a test makes them again and compares.
"""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from textwrap import fill
from typing import Any

import measuring
import results_plots
from measuring import three
from results_parts import PARTS, PEERS, TABLE, Part

Row = Mapping[str, Any]
Data = Mapping[str, Mapping[str, Any]]  # by PART or PART@MACHINE: what the file holds
BUSY = 0.5  # cores in other programs' hands that a page speaks of

INTRO = """# Benchmarks

This page says how fast and how accurate the methods are. `scripts/results` wrote it from the files
in [data](data). Each section names its commands, machine, commit and date, which may differ. Where
a table names no model, it is SmolLM2-135M-Instruct (Q4_1). No prompt comes from disk
(`SPARSEKV_NO_CACHE=1`). Speed is in tokens a second. It is the median of several runs.
"""


def span(row: Row, key: str) -> str:
    """A median and, of several, the range in brackets; empty if there is none."""
    if f"{key}_s" not in row:
        return ""
    median, least, most = (row[f"{key}_{x}"] for x in ("s", "least_s", "most_s"))
    spread = f" ({least:.2f} to {most:.2f})" if row[f"{key}_n"] > 1 else ""
    return f"{median:.2f}{spread}"


def cell(row: Row, key: str, shown: str) -> str:
    """A cell of a table; ``shown`` is a FORMAT of results.toml."""
    value = row.get(key)
    if shown.isdecimal():
        return "" if value is None else f"{value:.{shown}f}"
    if shown == "code":
        return f"`{value}`"
    if shown == "range":
        return f"{three(row['least'])} to {three(row['most'])}"
    if shown == "seconds":
        return span(row, key)
    if shown == "versions":  # as code: they are no figures
        names = (f"{peer} version" for peer in PEERS)
        return ", ".join(f"`{row[name]}`" for name in names if row.get(name))
    if shown == "samples":  # the fewest and the most of a task
        counts = sorted({n for name, n in row.items() if name.endswith("_n")})
        return " to ".join(map(str, dict.fromkeys((*counts[:1], *counts[-1:]))))
    if shown == "difference":
        return measuring.difference(row, key)
    if shown == "kept":  # a score and its difference to full, or a task that says nothing
        points = f" ({row[f'{key}_mean']:+.0f})" if f"{key}_mean" in row else ""
        more = ", dropped" if key in row.get("dropped", ()) else points
        return "" if value is None else f"{value:.0f}{more}"
    if shown.startswith("of "):
        return f"{value} of {row[shown[3:]]}" if key in row else ""
    return str(row[key]) if shown == "text" else three(value)


def table(rows: Iterable[Row], columns: str) -> str:
    """A Markdown table, of ``columns`` as in results.toml; all but the first are figures."""
    for name, group in TABLE["columns"].items():
        columns = columns.replace(f"@{name}", group)
    if "@" in columns:
        return table(rows, columns)
    heads = [column.strip().rpartition(" = ") for column in columns.split("|")]
    keys = [told.partition(":") for _, _, told in heads]
    cells = ([cell(row, key, shown) for key, _, shown in keys] for row in rows)
    return measuring.table([title for title, _, _ in heads], cells)


def body(part: Part, rows: list[Row]) -> str:
    """A part's table, or its tables; of a part without columns what its commands printed."""
    if not part.columns:
        return "\n\n".join(f"```\n{row['output']}\n```" for row in rows)
    if not part.split:
        return table(rows, part.columns)
    values = sorted({row[part.split] for row in rows})
    tables = ((v, [row for row in rows if row[part.split] == v]) for v in values)
    return "\n\n".join(f"### {v} tokens\n\n{table(of, part.columns)}" for v, of in tables)


def speed_cell(row: Row | None) -> str:
    """``132 (2.4)``: tokens a second, and over those of full."""
    if row is None:
        return ""
    ratio = f" ({row['of_full']:.1f})" if "of_full" in row and row["method"] != "full" else ""
    return three(row["tokens_per_s"]) + ratio


def read(folder: Path) -> dict[str, Any]:
    """The parts that are there, by name."""
    return {p.stem: json.loads(p.read_text("utf-8")) for p in sorted(folder.glob("*.json"))}


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


def tables_of(name: str, data: Data) -> str:
    """A part's table with its provenance, and below it those of other machines."""
    files = [told for key, told in data.items() if key.partition("@")[0] == name]
    return "\n\n".join(f"{body(PARTS[name], told['rows'])}\n\n{provenance(told)}" for told in files)


def benchmarks(data: Data) -> str:
    """docs/benchmarks.md."""
    parts = [INTRO]
    pictures = {"speed.svg": "Speed by depth", "accuracy.svg": "Accuracy against speed"}
    drawn = results_plots.drawn_from(data)
    parts += [f"![{title}]({file})\n" for file, title in pictures.items() if file in drawn]
    for name, part in PARTS.items():
        if not part.page and (tables := tables_of(name, data)):
            parts += [f"{text}\n" for text in (f"## {part.title}", part.about, tables) if text]
    return "\n".join(parts)


def results(data: Data) -> str:
    """README's table: speed, memory and accuracy of every method on the last model of the part."""
    told = data["real_speed"]
    model, where = told["rows"][-1]["model"], told["machine"]
    speeds: dict[str, dict[int, Row]] = {}
    far = data.get("depth", {"rows": []})["rows"]
    for row in (*told["rows"], *far):
        if row["model"] == model:
            speeds.setdefault(row["method"], {}).setdefault(row["depth"], row)
    depths = [d for d in sorted({d for rows in speeds.values() for d in rows if d}) if d != 65536]
    about = f"""`{model}` on {where["cores"]} cores of {where["cpu"]}. Every method is sparse from \
the first row (`--sparse-from 0`). In brackets is the speed as times that of `full`."""
    if far:
        about += " The 131072 rows are those of a shorter text, laid end to end."
    measured = data.get("real_accuracy", {"rows": []})["rows"]
    scores = [row for row in measured if row["model"] == model]
    length = min((row["length"] for row in scores), default=0)
    scores = [row for row in scores if row["length"] == length]
    accuracies = {row["spec"]: row for row in scores}
    rows = [{"method": m, **accuracies.get(m, {})} for m in speeds if m in accuracies or not scores]
    for row in rows:
        row |= {f"at {d}": speed_cell(speeds[row["method"]].get(d)) for d in depths}
        row |= {f"mb {d}": each["cache_mb"] for d, each in speeds[row["method"]].items()}
    columns = "".join(f" | tokens/s at {d} = at {d}:text" for d in depths)
    columns += f" | MB at {depths[-1]} = mb {depths[-1]}"
    if scores:
        tasks = ("vt", "niah_multikey_2", "niah_multikey_3", "code")
        columns += " | KLD = kld_code:3"
        columns += "".join(f" | {task.removeprefix('niah_')} = {task}:0" for task in tasks)
        n_samples = [[row[f"{task}_n"] for task in tasks if task in row] for row in scores]
        counts = [min(of_row) for of_row in n_samples if of_row]
        about += f""" KLD, on code, and scores are after {length} tokens. Scores are in per cent, \
of RULER's tasks and a code task ({counts[-1]} samples of each)."""
        if (n := max(counts)) > counts[-1]:
            more = [row for row, of_row in zip(scores, n_samples, strict=True) if n in of_row]
            found = ", ".join(f"`{row['spec']}` {row['niah_multikey_3']:.0f}" for row in more)
            about += f" With {n} samples multikey_3 is: {found}."
    found, lines = table(rows, "method = method:code" + columns), map("- {}".format, remarks(data))
    return "\n".join([fill(about, 100, break_on_hyphens=False), "", found, "", *lines]).rstrip()


def remarks(data: Data) -> Iterable[str]:
    """Lines below README's table, of the model that the table is of."""
    if "real_prefill" in data:
        yield prefill_remark(results_plots.of_last_model(data["real_prefill"]))
    if "speculation" in data:
        yield drafts_remark(data["speculation"]["rows"])


def range_of(ratios: Iterable[float]) -> str:
    """The least and the most of some ratios, such as "1.2 to 2.5 times"."""
    ordered = sorted(ratios)
    shown = (f"{ratio:.1f}" for ratio in (ordered[0], ordered[-1]))
    return " to ".join(dict.fromkeys(shown)) + " times"


def gains(data: Data) -> str:
    """README's first table: what a user gains, and when."""
    peers = [told["rows"] for key, told in data.items() if key.partition("@")[0] == "peer"]
    model = peers[0][0]["model"]

    def times(test: str) -> str:
        """The least and the most ratio of a test on all machines, for the first model."""
        of_test = (r for rows in peers for r in rows if (r["test"], r["model"]) == (test, model))
        return range_of(row["ratio"] for row in of_test) + " as fast"

    kept = next(row for row in data["prefix"]["rows"] if row["method"] == "full")
    speeds = results_plots.of_last_model(data["real_speed"])
    far = [r for key, told in data.items() if key.partition("@")[0] == "depth"
           for r in told["rows"] if r["model"] == speeds[-1]["model"]]  # fmt: skip
    lfps = [r for r in (*speeds, *far) if r["method"] == "lfps"]
    deepest = max(row["depth"] for row in lfps)

    def of_full(depth: int) -> str:
        """The least and the most ratio of lfps to full at a depth, on all machines."""
        return range_of(row["of_full"] for row in lfps if row["depth"] == depth)

    eight = {
        row["test"].rpartition(", ")[2]: row["ratio"]
        for row in data["peer_several"]["rows"]
        if " d8192 b8, " in row["test"]
    }
    faster = "the faster of llama.cpp and ik_llama.cpp"
    lines = [
        ("reading a prompt", times("pp512"), faster),
        ("a second question about a document", f"{kept['cached_s']:.1f} s to the first token",
         f"{kept['without_s']:.1f} s for the first one (135M, {kept['prompt_tokens']} tokens)"),
        ("decoding with `full`, at the start", times("tg16 @ d0, full"), faster),
        ("the same after 8192 tokens", times("tg16 @ d8192, full"), faster),
        ("a sparse method (`lfps`) after 8192 tokens", of_full(8192), "our `full`"),
        (f"the same after {deepest} tokens", of_full(deepest), "our `full`"),
        ("8 sequences of 8192 tokens", f"{eight['full']:.1f} times, with `lfps` "
         f"{eight['lfps']:.1f}", "llama.cpp"),
    ]  # fmt: skip
    return measuring.table(("1.5B on two CPU cores", "speed", "compared with"), lines)


def prefill_remark(rows: Iterable[Row]) -> str:
    pairs = ", ".join(f"{three(row['tokens_per_s'])} of {row['n_prompt']}" for row in rows)
    return f"Reading with every method, tokens/s of a prompt: {pairs}."


def drafts_remark(rows: Iterable[Row]) -> str:
    edits = (row for row in rows if row["task"] == "edit" and row["method"] == "full")
    tps = {(row["source"], row["depth"]): row["tps"] for row in edits}
    depths = sorted(depth for source, depth in tps if source == "auto")
    found = (f"{tps['auto', d] / tps['off', d]:.1f} times as fast after {d}" for d in depths)
    return f"Drafts write an edited file {', '.join(found)} tokens."


def with_part(page: str, name: str, data: Data) -> str:
    """A page with a part's tables, or as it was until the part is measured."""
    tables = tables_of(name, data)
    return between(page, name, tables) if tables else page


def between(page: str, marker: str, body: str) -> str:
    """A page with ``body`` between the markers of that name. ValueError when it has none."""
    begin, end = f"<!-- {marker} -->", f"<!-- /{marker} -->"
    before, found, rest = page.partition(begin)
    _, ended, after = rest.partition(end)
    if not (found and ended):
        raise ValueError(f"the page has no {begin} and {end} for the results to go between")
    return f"{before}{begin}\n{body}\n{end}{after}"


def write(root: Path) -> None:
    """Writes the pages and pictures of ``root``/docs/data; README if it is there."""
    docs = root / "docs"
    data = read(docs / "data")
    (docs / "benchmarks.md").write_text(benchmarks(data), encoding="utf-8")
    for file, picture in results_plots.pictures(data).items():
        (docs / file).write_text(picture, encoding="utf-8")
    readme = root / "README.md"
    if readme.is_file() and "real_speed" in data:
        page = between(readme.read_text(encoding="utf-8"), "results", results(data))
        if all(name in data for name in ("peer", "peer_several", "prefix")):
            page = between(page, "gains", gains(data))
        readme.write_text(page, encoding="utf-8")
    for name, part in PARTS.items():
        file = docs / part.page
        if part.page.endswith(".md") and file.is_file():
            page = with_part(file.read_text(encoding="utf-8"), name, data)
            file.write_text(page, encoding="utf-8")
