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

ROOT = Path(__file__).resolve().parents[2]
PAGE, DATA = ROOT / "docs" / "gpu.md", ROOT / "docs" / "data" / "gpu"
NOW, BEFORE = "h200", "h200_before"
TOKENS = "tokens, llama-3.1-8b"
COLUMNS = ((1, 8192), (1, 32768), (1, 131072), (8, 8192), (8, 32768))  # B, rows
PRODUCTS = ("_matvec_kernel", "_matmul_kernel", "_to_f16_kernel", "_add_parts_kernel")
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
    def line(cells: Sequence[object]) -> str:
        return f"| {' | '.join(map(text, cells))} |"

    lines = [line(head), "|---|" + "---:|" * (len(head) - 1), *map(line, rows)]
    return "\n".join(lines)


def text(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"
    return "" if value is None else str(value)


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
        return text(found) + (f" ({full / found:.2f})" if method != "full" else "")

    head = ["", *(f"B = {b}, {n}" for b, n in COLUMNS)]
    return table(head, ([named(m), *(cell(m, c) for c in COLUMNS)] for m in methods))


def steps(now: Row, before: Row) -> str:
    """Milliseconds of a step and of its products with weights, before and after."""

    def found(data: Row, spec: str, b: int) -> tuple[float, float]:
        rows = data[f"profile, {spec} B={b}"]
        products = sum(r["ms a step"] for r in rows if r["kernel"] in PRODUCTS)
        return rows[0]["ms a step"], products

    rows = []
    for spec in ("full", "quest", "fasa"):
        for b in (1, 8):
            old, new = found(before, spec, b), found(now, spec, b)
            rows.append([named(spec), b, old[1], new[1], old[0], new[0], old[0] / new[0]])
    head = ["", "B", "products before", "after", "step before", "after", "times as fast"]
    return table(head, rows)


def weights(now: Row, before: Row) -> str:
    """GB/s of products, before and after."""
    old = {(r["weights"], r["format"], r["B"]): r["GB/s"] for r in before["weights"]}
    rows = [
        [f"{r['weights']}, {r['format']}", r["B"], old.get((r["weights"], r["format"], r["B"])),
         r["GB/s"]]
        for r in now["weights"] if r["format"] == "Q4_K" or r["B"] in (1, 8)
    ]  # fmt: skip
    return table(["matrix", "B", "GB/s before", "GB/s"], rows)


def operators(now: Row) -> str:
    head = ["shape, B, rows", "operator", "us", "times SDPA", "of bandwidth", "launches", "error"]
    rows = [
        [f"{r['shape']}, {r['B']}, {r['context']}", r["operator"], 1e3 * r["ms"], r["over sdpa"],
         r["of bandwidth"], r["launches"], r["error"]]
        for r in now["operators"]
    ]  # fmt: skip
    return table(head, rows)


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
    now, old = (json.loads((DATA / f"{n}.json").read_text("utf-8")) for n in (NOW, BEFORE))
    parts = {
        "machine": machine(now), "tokens": tokens(now), "steps": steps(now, old),
        "weights": weights(now, old), "operators": operators(now), "logits": logits(now),
    }  # fmt: skip
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
