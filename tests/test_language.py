"""The pages are in plain English: short sentences, and no sentence that begins as a riddle does."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
MOST_WORDS = 25
UNCLEAR = ("Of", "As", "Those")  # first words that hide the subject

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


def faults(page: str) -> list[str]:
    found = []
    for sentence in sentences(page):
        n = len(re.findall(r"\w[^\s]*", sentence))
        if n > MOST_WORDS:
            found.append(f"{n} words: {sentence}")
        first = re.match(r"\W*(\w+)", sentence)
        if first and first[1] in UNCLEAR:
            found.append(f"begins with {first[1]}: {sentence}")
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_sentences_are_short_and_begin_with_their_subject(page):
    assert faults(page.read_text("utf-8")) == []


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
