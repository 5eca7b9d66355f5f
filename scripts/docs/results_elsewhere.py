"""Parts whose tables stand beside what they are about, in other pages than docs/benchmarks.md.

Such a page has the markers ``<!-- PART -->`` and ``<!-- /PART -->``; the table goes between them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from results_sections import Column, Row, figure, name, table, text

if TYPE_CHECKING:
    from results_parts import Rows, Sizes
    from results_runner import Runner

Data = Mapping[str, Mapping[str, Any]]  # by part: what its file holds
Provenance = Callable[[Mapping[str, Any]], str]


def prefix(run: Runner, sizes: Sizes) -> Rows:
    return run.script("bench/prefix", "-m", sizes.model, "--methods", sizes.fast, "--llama",
                      *sizes.questions.split())  # fmt: skip


def prefix_kld(run: Runner, sizes: Sizes) -> Rows:
    return run.script("accuracy/prefix", "-m", sizes.model, *sizes.kept.split())


def schemas(run: Runner, sizes: Sizes) -> Rows:
    return run.script("bench/schemas", "-m", sizes.model, *sizes.schemas.split())


def serve(run: Runner, sizes: Sizes) -> Rows:
    return run.script("bench/serve", "-m", sizes.model, "--methods", sizes.fast)


def of(key: str, of_key: str) -> Any:
    """A cell: ``3 of 10``; empty if there is none."""
    return lambda row: f"{row[key]} of {row[of_key]}" if key in row else ""


def span(key: str) -> Any:
    """A cell: a median and, of several, the range in brackets; empty if there is none."""

    def show(row: Row) -> str:
        if f"{key}_s" not in row:
            return ""
        median, least, most = (row[f"{key}_{x}"] for x in ("s", "least_s", "most_s"))
        spread = f" ({least:.2f} to {most:.2f})" if row[f"{key}_n"] > 1 else ""
        return f"{median:.2f}{spread}"

    return show


PAGES: Mapping[str, str] = {
    "prefix": "pipelines.md",
    "prefix_kld": "pipelines.md",
    "schemas": "pipelines.md",
    "serve": "serve.md",
}
COLUMNS: Mapping[str, Sequence[Column]] = {
    "prefix": (
        Column("method", name),
        Column("tokens", text("prompt_tokens")),
        Column("first token without, s", span("without")),
        Column("from disk, s", span("cached")),
        Column("process without, s", figure("without_process_s", 1)),
        Column("from disk, s", figure("cached_process_s", 1)),
        Column("same answers", of("same_answers", "without_n")),
    ),
    "prefix_kld": (
        Column("method", name),
        Column("tokens", text("prompt_tokens")),
        Column("from disk", text("cached_tokens")),
        Column("KLD", figure("kld", 4)),
        Column("most of a position", figure("kld_most", 4)),
        Column("positions", text("positions")),
        Column("top-1", figure("top1", 2)),
    ),
    "schemas": (
        Column("schema", text("schema")),
        Column("valid", of("valid", "answers")),
        Column("tokens an answer", figure("mean_tokens", 0)),
        Column("a token of free text, ms", figure("free_ms", 2)),
        Column("of the schema, ms", figure("schema_ms", 2)),
        Column("slower, %", figure("slower_percent", 1)),
    ),
    "serve": (
        Column("server", text("server")),
        *(Column(f"tokens/s, {n} clients", figure(f"tps_{n}", 0)) for n in (1, 2, 4, 8)),
        Column("first token beside a prefill, s", figure("first_beside_prefill_s", 2)),
        Column("of that prefill, s", figure("first_of_prefill_s", 1)),
    ),
}


def write(docs: Path, data: Data, provenance: Provenance) -> None:
    """Puts the tables of what was measured into the pages that are there."""
    for part, page in PAGES.items():
        file = docs / page
        if file.is_file():
            with_table = with_part(file.read_text(encoding="utf-8"), part, data, provenance)
            file.write_text(with_table, encoding="utf-8")


def with_part(page: str, part: str, data: Data, provenance: Provenance) -> str:
    """A page with a part's table, and with what it was until that is measured."""
    if part not in data:
        return page
    body = f"{table(data[part]['rows'], COLUMNS[part])}\n\n{provenance(data[part])}"
    return between(page, part, body)


def between(page: str, marker: str, body: str) -> str:
    """A page with ``body`` between the markers of that name. ValueError when it has none."""
    begin, end = f"<!-- {marker} -->", f"<!-- /{marker} -->"
    before, found, rest = page.partition(begin)
    _, ended, after = rest.partition(end)
    if not (found and ended):
        raise ValueError(f"the page has no {begin} and {end} for the results to go between")
    return f"{before}{begin}\n{body}\n{end}{after}"
