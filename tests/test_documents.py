"""The documents: sizes, links, commands that exist, and figures that are in docs/data."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
from scripts_as_modules import FOLDER, load_script
from test_imports import ALLOWED, ANYONE

from sparsekv_cli.cli import cli
from sparsekv_cli.methods import METHODS, method_class

ROOT = FOLDER.parent
README = ROOT / "README.md"
PAGES = [README, ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
PATH = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
UPSTREAM = {"docs/gguf.md"}  # ggml's
DATA = sorted((ROOT / "docs" / "data").glob("*.json"))

results = load_script("docs/results.py")
pages, plots = (sys.modules[f"results_{name}"] for name in ("pages", "plots"))


def without_code(text: str) -> str:
    return re.sub(r"```.*?```|`[^`\n]*`", "", text, flags=re.DOTALL)


def test_readme_is_short():
    lines = README.read_text("utf-8").splitlines()
    assert len(lines) <= 120
    long = [line for line in lines if len(line) > 100 and not line.startswith("|")]
    assert not long


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_resolve(page):
    for target in re.findall(r"\]\(([^)]+)\)", without_code(page.read_text("utf-8"))):
        if not target.startswith(("http://", "https://")):
            path, _, anchor = target.partition("#")
            linked = page.parent / path if path else page
            assert linked.exists(), f"{page.name} links to {target}"
            if anchor:
                assert anchor in anchors(linked), f"{page.name} links to {target}"


def anchors(page: Path) -> set[str]:
    """What GitHub makes of a page's headings."""
    titles = re.findall(r"^#+ (.*)$", page.read_text("utf-8"), flags=re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title).lower().replace(" ", "-") for title in titles}


def test_documents_that_are_named_exist():
    folders = ("cpu", "kernels", "models", "sparsekv_cli", "scripts", "tests", "docs", ".ci")
    files = [path for folder in folders for path in (ROOT / folder).rglob("*") if path.is_file()]
    files += [path for path in ROOT.iterdir() if path.suffix in (".md", ".py", ".cfg", ".toml")]
    text = {".py", ".md", ".toml", ".cfg", ""}
    for path in files:
        if path.suffix in text and "__pycache__" not in path.parts and path != Path(__file__):
            for name in re.findall(r"[\w./-]*\w\.md\b", path.read_text("utf-8", "replace")):
                found = [base / name for base in (ROOT, ROOT / "docs", path.parent)]
                is_there = name in UPSTREAM or any(each.is_file() for each in found)
                assert is_there, f"{path} names {name}"


def test_the_table_of_methods():
    section = README.read_text("utf-8").partition("## Methods")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `(\w+)` \| (.*?) \|", section, flags=re.MULTILINE)
    assert [name for name, _ in rows] == list(METHODS)
    for name, paper in rows:
        number = re.search(r"\d{4}\.\d{5}", method_class(name).paper)
        assert number is None or number[0] in paper, name
        assert f"| {method_class(name).use} |" in section, "take README's words from 'methods'"


def test_every_folder_has_its_place():
    text = (ROOT / "docs" / "architecture.md").read_text("utf-8")
    for top in ("sparsekv_cli", "cpu", "kernels", "models"):
        for inner in (ROOT / top).rglob("__init__.py"):
            assert f"{inner.parent.name}/" in text, f"{inner.parent} is not in architecture.md"
    rows = re.findall(r"^\| `(\w+)` \| (.*) \|$", text, flags=re.MULTILINE)
    arrows = {name: set(re.findall(r"`(\w+)`", names)) for name, names in rows}
    assert arrows == {name: set(to) for name, to in ALLOWED.items() if name not in ANYONE}


def shell_lines(page: Path) -> Iterator[str]:
    """The commands of a page's ```sh blocks."""
    for block in re.findall(r"```sh\n(.*?)```", page.read_text("utf-8"), flags=re.DOTALL):
        for line in block.replace("\\\n", " ").splitlines():
            if line.strip() and not line.startswith("#"):
                yield line


COMMANDS = [(page.name, line) for page in PAGES for line in shell_lines(page)]


@pytest.mark.parametrize(("page", "line"), COMMANDS, ids=[" ".join(c) for c in COMMANDS])
def test_commands_exist(page, line):
    """Sub-commands, options and their values are those of the program; scripts have the options."""
    for command in re.split(r" \| | && ", line):
        words = shlex.split(command.partition(" < ")[0], comments=True)
        while "=" in words[0]:
            words.pop(0)
        if words[0] == "sparsekv-cli":
            context = click.Context(cli)
            found = cli.get_command(context, words[1])
            assert found is not None, f"{page}: {line}"
            found.make_context(words[1], words[2:], parent=context)
        elif words[0].startswith("scripts/"):
            assert os.access(ROOT / words[0], os.X_OK), f"{page}: {line}"
            options = [word for word in words[1:] if re.match(r"--?[a-z]", word)]
            source = (ROOT / words[0]).read_text("utf-8")
            if words[0] == "scripts/results":
                source += Path(results.__file__).read_text("utf-8")
            if "parser_of(" in source:
                source += (FOLDER / "measuring.py").read_text("utf-8")
            assert all(f'"{o}"' in source or f" {o} " in source for o in options), f"{page}: {line}"
        else:
            builtin = words[0] in ("source", "cd", "export")
            assert builtin or shutil.which(words[0], path=PATH), f"{page}: {line}"


@pytest.mark.nightly
def test_the_pipeline_of_the_readme_runs(default_model):
    line = next(line for line in shell_lines(README) if line.startswith("cat "))
    done = subprocess.run(
        line, shell=True, cwd=ROOT, capture_output=True, text=True, timeout=600,
        env={**os.environ, "PATH": PATH},
    )  # fmt: skip
    assert done.returncode == 0 and done.stdout.strip(), done.stderr


@pytest.mark.parametrize("path", DATA, ids=lambda path: path.stem)
def test_data_say_where_they_come_from(path):
    told = json.loads(path.read_text("utf-8"))
    assert path.stem.partition("@")[0] in results.PARTS
    assert re.fullmatch(r"[0-9a-f]{40}\+?", told["commit"])
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", told["date"])
    assert told["machine"]["cpu"] and told["machine"]["cores"] and told["machine"]["memory_gib"]
    assert told["commands"] and told["rows"]
    assert not re.search(r"/(home|root|tmp|work)/", path.read_text("utf-8")), "a machine's path"


def test_pages_are_made_of_the_data():
    data = pages.read(ROOT / "docs" / "data")
    page = (ROOT / "docs" / "benchmarks.md").read_text("utf-8")
    assert page == pages.benchmarks(data), "run scripts/results --pages"
    readme = README.read_text("utf-8")
    written = pages.between(readme, "results", pages.results(data))
    written = pages.between(written, "gains", pages.gains(data))
    assert readme == written, "run scripts/results --pages"
    for name, part in results.PARTS.items():
        if part.page.endswith(".md"):
            page = (ROOT / "docs" / part.page).read_text("utf-8")
            assert page == pages.with_part(page, name, data), "run scripts/results --pages"
    drawn = {p.name for p in (ROOT / "docs").glob("*.svg")} - {"timelines.svg"}
    assert drawn == plots.drawn_from(data)
    shown = (ROOT / "docs" / "terminal.svg").read_text("utf-8").replace("&#160;", " ")
    assert "sparsekv-cli" in shown and "@font-face" not in shown


def numbers(value: Any) -> Iterator[float]:
    """All figures in what JSON holds."""
    if isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from numbers(inner)
    elif isinstance(value, int | float):
        yield value


def is_in(shown: str, figures: list[float]) -> bool:
    """Whether a figure, rounded as it is shown, is ``shown``, which has no sign."""
    decimals = len(shown.partition(".")[2])
    close = 0.5 * 10.0**-decimals + 1e-9
    return any(abs(abs(figure) - float(shown)) <= close for figure in figures)


def shown_numbers(text: str) -> list[str]:
    """Numbers that stand by themselves, unlike those of tg32, Q4_1 or 135M; not those in code."""
    return re.findall(r"(?<![\w.])\d+(?:\.\d+)?(?!\w|\.\d)", without_code(text))


def test_figures_are_in_the_data():
    """Each table of benchmarks.md holds figures of its own part, README's results of all parts."""
    data = pages.read(ROOT / "docs" / "data")
    text = (ROOT / "docs" / "benchmarks.md").read_text("utf-8")
    for name, part in results.PARTS.items():
        rows = [told["rows"] for key, told in data.items() if key.partition("@")[0] == name]
        if rows and not part.page:
            section = text.partition(f"## {part.title}\n")[2].partition("\n## ")[0]
            lines = "\n".join(line for line in section.splitlines() if line.startswith("| "))
            figures, shown = list(numbers(rows)), shown_numbers(lines)
            assert shown and [s for s in shown if not is_in(s, figures)] == []
    readme = README.read_text("utf-8")
    parts = (readme.partition(f"<!-- {name} -->")[2] for name in ("gains", "results"))
    body = "\n".join(part.partition("<!-- /")[0] for part in parts)
    for told in data.values():
        body = body.replace(told["machine"]["cpu"], "")
    figures = list(numbers(data))
    shown = shown_numbers(body)
    assert len(shown) > 10 and [s for s in shown if not is_in(s, figures)] == []


def test_our_figures_next_to_the_papers_are_in_the_data():
    of_gpu = json.loads((ROOT / "docs" / "data" / "gpu" / "h200.json").read_text("utf-8"))
    figures = list(numbers([pages.read(ROOT / "docs" / "data"), of_gpu]))
    table = (ROOT / "docs" / "papers.md").read_text("utf-8").partition("\n| paper |")[2]
    rows = [line.split("|") for line in table.splitlines() if line.startswith("| ")]
    shown = [s for row in rows for s in shown_numbers(row[5])]
    assert len(shown) > 100 and [s for s in shown if not is_in(s, figures)] == []


def test_a_figure_that_is_not_in_the_data_is_found():
    assert is_in("0.09", [0.0949]) and is_in("132", [131.6]) and not is_in("0.10", [0.0949])
    shown = shown_numbers(
        "| `x1` | 3 (0.5) |\nSmolLM2-135M (Q4_1) reads 8192. d32 has 2.5 GB, 2.5GHz"
    )
    assert shown == ["3", "0.5", "8192", "2.5"]


def test_the_example_of_a_weight_format_is_the_code():
    page = (ROOT / "docs" / "extending.md").read_text("utf-8")
    example = page.partition("```python\ndef _tq2_0")[2].partition("The block")[0]
    code = (ROOT / "cpu" / "weights" / "blocks_large.py").read_text("utf-8").splitlines()
    lines = example.replace("```", "").splitlines()[1:]
    assert len(lines) > 8 and set(lines) - set(code) == set()


def test_the_page_of_reliability_is_that_of_its_data():
    written = load_script("docs/reliability_page.py")
    expected = written.page(*map(written.read, ("fuzz", "faults", "soak", "arm")))
    assert written.PAGE.read_text("utf-8") == expected


def test_the_tables_of_the_gpus_page_are_those_of_its_data(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "scripts" / "docs"))
    import gpu_page

    text = gpu_page.PAGE.read_text(encoding="utf-8")
    assert gpu_page.page(text) == text
