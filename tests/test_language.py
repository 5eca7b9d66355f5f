"""Pages and docstrings are in plain English: short sentences that begin with their subject."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
MOST_WORDS = 25
UNCLEAR = ("Of", "As", "Those")  # first words that hide the subject
# Docstrings hold further rules.
UNCLEAR_IN_CODE = (*UNCLEAR, "What", "That", "Whose")
PLACES = re.compile(r"\b(behind|beside)\b")  # after, next to or with say which place is meant
MODULES = [
    path
    for name in ("sparsekv_cli", "cpu", "kernels", "models")
    for path in sorted((ROOT / name).rglob("*.py"))
]
SHAPE = re.compile(r"\([^()]*,[^()]*\)|\[[^\[\]]*\]")

ITEM = re.compile(r"^\s*(?:[-*] |\d+\. )")


def blocks(page: str) -> Iterator[str]:
    """Paragraphs, headings and items of lists as one line each, without code and tables."""
    page = re.sub(r"^ *```.*?^ *```", "", page, flags=re.DOTALL | re.MULTILINE)
    page = re.sub(r"\$\$.*?\$\$|<!--.*?-->", "", page, flags=re.DOTALL)
    page = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", page)
    block: list[str] = []
    after_item = False
    for line in [*page.splitlines(), ""]:
        is_item = bool(ITEM.match(line))
        indent = len(line) - len(line.lstrip())
        is_code = not block and not is_item and indent >= (6 if after_item else 4)
        ends = not line.strip() or line.startswith(("|", "#")) or is_item or is_code
        if ends and block:
            yield " ".join(block)
            block = []
        if is_item or line.startswith("#"):
            block = [ITEM.sub("", line).lstrip("# ").strip()]
        elif not ends:
            block.append(line.strip())
        after_item = is_item or (after_item and (not line.strip() or line.startswith("  ")))
        if line.startswith("#"):
            yield block.pop()


def sentences(page: str) -> Iterator[str]:
    """The sentences of a page. A span of code counts as one word."""
    for block in blocks(page):
        text = re.sub(r"`[^`]+`", "CODE", block)
        text = re.sub(r"(?<!\w)[*_]+|[*_]+(?!\w)", "", text)
        yield from re.split(r"(?<=[.!?])[\")\]]*\s+", text)


def faults(page: str, unclear: tuple[str, ...] = UNCLEAR) -> list[str]:
    found = []
    for sentence in sentences(page):
        n = len(re.findall(r"\w[^\s]*", sentence))
        if n > MOST_WORDS:
            found.append(f"{n} words: {sentence}")
        first = re.match(r"\W*(\w+)", sentence)
        if first and first[1] in unclear:
            found.append(f"begins with {first[1]}: {sentence}")
    return found


def docstrings(source: str) -> Iterator[str]:
    """The docstrings of a module. A shape, such as ``(H, d)``, counts as one word."""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, kinds) and (text := ast.get_docstring(node)):
            yield SHAPE.sub("SHAPE", re.sub(r"``([^`]+)``", r"`\1`", text))


def faults_of_module(source: str) -> list[str]:
    found = []
    for text in docstrings(source):
        found += faults(text, UNCLEAR_IN_CODE)
        found += [f"says {word[1]}: {text}" for word in PLACES.finditer(text)]
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_sentences_are_short_and_begin_with_their_subject(page):
    assert faults(page.read_text("utf-8")) == []


def test_docstrings_of_the_package():
    found = {
        str(path.relative_to(ROOT)): faults_of_module(path.read_text("utf-8")) for path in MODULES
    }
    assert len(found) > 300
    assert {name: each for name, each in found.items() if each} == {}


@pytest.mark.parametrize(
    "text",
    [
        "word " * (MOST_WORDS + 1),
        "What it is.",
        "Of x f32 (n,).",
        "Rows behind it.",
        "So. As ``x``.",
    ],
)
def test_faults_of_docstrings_are_found(text):
    for source in (
        f'"""{text}"""',
        f'class A:\n    def f(self):\n        """Good.\n\n        {text}"""',
    ):
        assert len(faults_of_module(source)) == 1
    assert faults_of_module('"""Good. Returns f32 (H, d, n) of ``as``."""\nx = "Of y."') == []


def test_faults_are_found():
    long = "word " * (MOST_WORDS + 1)
    assert len(faults(f"{long}.")) == 1
    assert len(faults(f"- an item\n  that is long: {long}\n- another")) == 1
    assert len(faults(f"# A heading\n\nShort. {long}\ngoes on.")) == 1
    assert len(faults("Good. Of the rows, half are read.")) == 1
    assert len(faults("- **As** it was.\n- Those rows.\n- Often it is. Ask.")) == 2


def test_code_tables_and_targets_of_links_are_no_sentences():
    long = "word " * (MOST_WORDS + 1)
    assert faults(f"```sh\n{long}\n```\n\n| {long} | Of |\n|---|---|\n\n    {long}\n") == []
    assert faults(f"`{long}` is one word, [a link](Of/{long}) two.") == []
    half = "word " * (MOST_WORDS // 2 + 1)
    assert faults(f"{half}\n\n{half}") == [], "a paragraph ends a sentence"
    assert faults(f"- {half}\n- {half}") == [], "an item too"
