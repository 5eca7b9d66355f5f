"""The tables of docs/gpu.md, from the files in docs/data/gpu.

    python scripts/docs/gpu_page.py take FOLDER NAME   a file there, of figures of scripts/gpu/first
    python scripts/docs/gpu_page.py                    the tables again

The same files give the same page, byte for byte: a test makes it again and compares.
"""

import json
import re
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import measuring
from measuring import ROOT, number

PAGE, DATA = ROOT / "docs" / "gpu.md", ROOT / "docs" / "data" / "gpu"
NOW = "h200"
TOKENS = "tokens, llama-3.1-8b"
HOST = (
    "method",
    "K and V",
    "B",
    "context",
    "rows",
    "ms",
    "GPU",
    "host",
    "copies",
    "waiting",
    "MB moved",
)
COLUMNS = ((1, 8192), (1, 32768), (1, 131072), (8, 8192), (8, 32768))  # B, rows
OPERATORS_AT = ((1, 8192), (1, 32768), (1, 131072), (8, 32768))
BATCHES = (1, 2, 8)  # of products with weights
PARTS = {  # of a step, by kernel; what is in none of them is said to be the rest
    "products": ("_matvec_kernel", "_matmul_kernel", "_to_f16_kernel", "_add_parts_kernel"),
    "attention": ("_attend_kernel", "_merge_kernel"),
}
Row = Mapping[str, Any]


def take(folder: Path, name: str) -> None:
    """Joins the figures that lie below ``folder``, with the commit and the date."""
    joined: dict[str, Any] = {}
    for path in sorted(folder.rglob("*.json")):
        found = json.loads(path.read_text(encoding="utf-8"))
        joined |= {k: v for k, v in found.items() if k not in ("errors", "left out") or v}
    commit = ["git", "log", "-1", "--format=%h", "--", "kernels", "sparsekv_cli/device"]
    done = subprocess.run(commit, cwd=ROOT, capture_output=True, text=True, check=True)
    joined |= {"commit": done.stdout.strip(), "date": datetime.now(UTC).date().isoformat()}
    DATA.mkdir(parents=True, exist_ok=True)
    text = json.dumps(joined, indent=1)
    (DATA / f"{name}.json").write_text(text + "\n", encoding="utf-8")


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    return measuring.table(head, (map(number, row) for row in rows))


def named(method: str) -> str:
    """A method as the command line has it, its option behind."""
    name, _, option = method.partition(":")
    return f"`{name}`" + f" `{option}`" * bool(option)


def tokens(now: Row) -> str:
    """Milliseconds of a step, and how many times as fast as full."""
    ms = {
        (row["method"], row["B"], row["context"]): row["ms"]
        for row in now[TOKENS] if row["K and V"] == "auto"
    }  # fmt: skip
    methods = dict.fromkeys(method for method, *_ in ms)

    def cell(method: str, where: tuple[int, int]) -> str:
        found, full = ms.get((method, *where)), ms["full", *where]
        if found is None:
            return ""
        return number(found) + (f" ({full / found:.2f})" if method != "full" else "")

    head = ["", *(f"B = {b}, {n}" for b, n in COLUMNS)]
    return table(head, ([named(m), *(cell(m, c) for c in COLUMNS)] for m in methods))


def host(now: Row) -> str:
    """Milliseconds of steps whose K and V lie on the host. The table is empty before they ran."""
    rows = now.get("host", [])
    head = ["", *HOST[1:5], "ms a step", *HOST[6:10], "MB moved"]
    return table(head, ([named(r["method"]), *(r[name] for name in HOST[1:])] for r in rows))


def threads(now: Row) -> str:
    """Tokens a second of the CPU by its number of threads. The table is empty before they ran."""
    rows = now.get("threads", [])
    found = {(r["method"], r["depth"], r["threads"]): r["t/s"] for r in rows}
    numbers = sorted({n for *_, n in found})
    cases = dict.fromkeys((method, depth) for method, depth, _ in found)
    made = ([named(m), d, *(found.get((m, d, n)) for n in numbers)] for m, d in cases)
    return table(["", "rows", *(f"{n} threads" for n in numbers or (1, 2, 4, 8, 16))], made)


def prefill(now: Row) -> str:
    """Seconds of prompts, and tokens a second."""
    rows = now.get("prefill, llama-3.1-8b", [])
    return table(
        ["tokens", "s", "tokens a second"], ([r["tokens"], r["s"], r["t/s"]] for r in rows)
    )


def steps(now: Row) -> str:
    """Milliseconds of a step at 32768 rows by what its kernels do."""
    rows = []
    for spec in ("full", "quest", "fasa"):
        for b in (1, 8):
            step, *kernels = now[f"profile, {spec} B={b}"]
            ms = [
                sum(r["ms a step"] for r in kernels if r["kernel"] in names)
                for names in PARTS.values()
            ]
            rest, idle = step["busy ms"] - sum(ms), step["ms a step"] - step["busy ms"]
            rows.append([named(spec), b, step["launches"], *ms, rest, idle])
    return table(["", "B", "launches", *PARTS, "other kernels", "no kernel"], rows)


def weights(now: Row) -> str:
    """GB/s of products."""
    found = {(f"{r['weights']}, {r['format']}", r["B"]): r["GB/s"] for r in now["weights"]}
    matrices = dict.fromkeys(name for name, _ in found)
    rows = [[name, *(found.get((name, b)) for b in BATCHES)] for name in matrices]
    return table(["matrix", *(f"B = {b}" for b in BATCHES)], rows)


def operators(now: Row) -> str:
    """Microseconds of attention of one layer, and how many times as fast as torch."""
    rows = [r for r in now["operators"] if r["shape"] == "llama-3.1-8b"]
    found = {(r["operator"], r["B"], r["context"]): r for r in rows}

    def cell(name: str, where: tuple[int, int]) -> str:
        row = found.get((name, *where))
        return "" if row is None else f"{number(1e3 * row['ms'])} ({number(row['over sdpa'])})"

    head = ["", *(f"B = {b}, {n}" for b, n in OPERATORS_AT)]
    names = dict.fromkeys(r["operator"] for r in rows)
    return table(head, ([f"`{name}`", *(cell(name, at) for at in OPERATORS_AT)] for name in names))


def freekv(now: Row) -> str:
    """FreeKV's parts switched on and off."""
    rows = [
        [named(r["method"]), r["ms"], r["MB moved a token, random rows"], r["us waited"]]
        for r in now["freekv"]
    ]
    return table(["", "ms a step", "MB from the host", "us waited"], rows)


def commands(now: Row) -> str:
    """Returns the table that compares texts of the GPU with texts of the CPU."""
    rows = sorted(now["commands"], key=lambda r: r["command"])
    return table(["command", "text"], ([f"`{r['command']}`", r["result"]] for r in rows))


def logits(now: Row) -> str:
    head = ["method", "KLD to the CPU", "same top-1", "KLD of the prefill"]
    rows = [[named(r["method"]), r["KLD"], r["top-1"], r["KLD of prefill"]] for r in now["logits"]]
    return table(head, rows)


def machine(now: Row) -> str:
    copies = f"copies {now['copy_gb_s']:.0f} GB/s (bytes read and written)"
    link = f"from the host {now['link_gb_s']:.0f} GB/s"
    return f"{now['device']}, {copies}, {link}; commit {now['commit']}, {now['date']}."


def page(before: str) -> str:
    """docs/gpu.md with its tables made again."""
    now = json.loads((DATA / f"{NOW}.json").read_text(encoding="utf-8"))
    makers = (
        machine, host, threads, tokens, prefill, steps, freekv, weights, operators, logits,
        commands,
    )  # fmt: skip
    parts = {make.__name__: make(now) for make in makers}
    for name, made in parts.items():
        mark = rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)"
        put = f"\\g<1>{made}\n\\g<2>"
        before, n = re.subn(mark, put, before, flags=re.DOTALL)
        if n != 1:
            raise SystemExit(f"{PAGE} has {n} places for the table {name!r}: expected 1")
    return before


if __name__ == "__main__":
    if sys.argv[1:2] == ["take"]:
        take(Path(sys.argv[2]), sys.argv[3])
    else:
        PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
