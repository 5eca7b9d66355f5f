"""The sections of docs/benchmarks.md: a part, what it shows, and the columns of its table."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

Row = Mapping[str, Any]


class Column(NamedTuple):
    """title: of the table; show: a row's cell."""

    title: str
    show: Callable[[Row], str]


def three(value: float | None) -> str:
    """Three figures, as many as such a measurement has."""
    if value is None:
        return ""
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


def figure(key: str, digits: int | None = None) -> Callable[[Row], str]:
    """A cell: ``row[key]`` with ``digits`` decimals, or three figures; empty if there is none."""

    def show(row: Row) -> str:
        value = row.get(key)
        return three(value) if digits is None or value is None else f"{value:.{digits}f}"

    return show


def text(key: str) -> Callable[[Row], str]:
    return lambda row: str(row[key])


def name(row: Row) -> str:
    return f"`{row['method']}`"


def versions(row: Row) -> str:
    """Of the other programs, as code: they are no figures."""
    names = ("llama.cpp version", "ik_llama.cpp version")
    return ", ".join(f"`{row[name]}`" for name in names if row.get(name))


def span(row: Row) -> str:
    return f"{three(row['least'])} to {three(row['most'])}"


def table(rows: Iterable[Row], columns: Sequence[Column]) -> str:
    """A Markdown table; all columns but the first are figures."""
    lines = ["| " + " | ".join(c.title for c in columns) + " |"]
    lines.append("|---" + "|---:" * (len(columns) - 1) + "|")
    lines += ["| " + " | ".join(column.show(row) for column in columns) + " |" for row in rows]
    return "\n".join(lines)


SPEED = (
    Column("method", name),
    Column("depth", text("depth")),
    Column("tokens/s", figure("tokens_per_s")),
    Column("least to most", span),
    Column("times `full`", figure("of_full", 2)),
    Column("of roofline, %", figure("roofline_percent", 0)),
    Column("cache, MB", figure("cache_mb")),
)
ACCURACY = (
    Column("method", name),
    Column("tokens", text("tokens")),
    Column("KLD", figure("kld", 3)),
    Column("least of a text", figure("kld_least", 3)),
    Column("most", figure("kld_most", 3)),
    Column("top-1", figure("top1", 2)),
    Column("needles", figure("needles", 0)),
    Column("of", figure("needles_of", 0)),
    Column("softmax mass", figure("mass", 2)),
    Column("rows scored, %", figure("dots", 1)),
    Column("rows attended, %", figure("attended", 1)),
)


def by_length(rows: Iterable[Row]) -> str:
    """A table a length, the methods under each other."""
    lengths = sorted({row["length"] for row in rows})
    columns = (
        Column("method", lambda row: f"`{row['spec']}`"),
        Column("RULER", figure("ruler", 0)),
        Column("from", figure("ruler_low", 0)),
        Column("to", figure("ruler_high", 0)),
        Column("KLD", figure("kld", 3)),
        Column("top-1", figure("top1", 2)),
        Column("rows attended", figure("rows_attended", 0)),
        Column("tokens/s", figure("tokens_per_s")),
        Column("times `full`", figure("of_full", 2)),
    )
    tables = [
        f"### {length} tokens\n\n{table([r for r in rows if r['length'] == length], columns)}"
        for length in lengths
    ]
    return "\n\n".join(tables)


class Section(NamedTuple):
    """A part's place on the page: a heading, what is measured, its table.

    tables: makes several tables of the rows, in place of one with ``columns``.
    """

    part: str
    title: str
    about: str
    columns: Sequence[Column]
    tables: Callable[[Sequence[Row]], str] | None = None

    def body(self, rows: Sequence[Row]) -> str:
        return table(rows, self.columns) if self.tables is None else self.tables(rows)


AGAINST_PEERS = (
    Column("test", text("test")),
    *(
        Column(title, figure(f"{program} {key}"))
        for program in ("sparsekv-cli", "llama.cpp", "ik_llama.cpp")
        for title, key in ((program, "median"), ("least", "min"), ("most", "max"))
    ),
    Column("unit", text("unit")),
    Column("ratio", figure("ratio", 2)),
    Column("versions", versions),
)

SECTIONS = (
    Section(
        "decode",
        "Decode by depth",
        "Random tokens fill the cache to a depth, then tokens are decoded. The roofline is the "
        "time that a token's bytes take at the bandwidth measured in the same run.",
        SPEED,
    ),
    Section(
        "deep",
        "Decode beyond the trained context",
        "The model is trained on 8192 tokens, so this shows speed only.",
        SPEED,
    ),
    Section(
        "deep_others",
        "The other methods beyond the trained context",
        "The table is like the one above.",
        SPEED,
    ),
    Section(
        "prefill",
        "Prefill",
        "All methods prefill alike.",
        (
            Column("tokens", text("n_prompt")),
            Column("tokens/s", figure("tokens_per_s")),
            Column("least to most", span),
        ),
    ),
    Section(
        "accuracy",
        "Accuracy",
        "The texts continue with their own tokens, and each method predicts these. The table has "
        "KLD(full || method) and top-1 agreement. Needles are facts hidden in a prompt that the "
        "answer must name.",
        ACCURACY,
    ),
    Section(
        "accuracy_all",
        "Accuracy by length, and of presets",
        "The table is like the one above.",
        ACCURACY,
    ),
    Section(
        "accuracy_rows",
        "Accuracy at 512 rows",
        "The table is like the one above. Every method attends to the same number of rows.",
        ACCURACY,
    ),
    Section(
        "budgets",
        "Methods and budgets by length",
        "RULER is the mean of a few samples of needle tasks, in per cent, with Wilson's interval "
        "of 95%. The tasks are those that a model of this size can do at all. All methods have the"
        " same samples. The table also has KLD(full || method), top-1, and the rows attended a "
        "head and layer. Speed is measured after a text of nearly the length. Every method is "
        "sparse from the first row.",
        (),
        by_length,
    ),
    Section(
        "cache_types",
        "Types of K and V",
        "The measures are those of accuracy. Everything is compared with `full` and f16, so a "
        "method's own distance is in its figures.",
        (
            Column("method", name),
            Column("K", text("k")),
            Column("V", text("v")),
            *ACCURACY[1:5],
        ),
    ),
    Section(
        "perplexity",
        "Perplexity",
        "The algorithm is llama-perplexity's, on chunks of 512 tokens of our own texts. The table "
        "has llama.cpp, our prefill, and our decode with `full`. KLD and top-1 are relative to "
        "llama.cpp's log-probabilities.",
        (
            Column("program", text("program")),
            Column("perplexity", figure("ppl", 3)),
            Column("from llama.cpp's, %", figure("percent", 2)),
            Column("KLD", figure("kld", 4)),
            Column("top-1", figure("top1", 3)),
        ),
    ),
    Section(
        "formats",
        "Weight formats",
        "The model is made wider with zeros, so that its rows fit every format, and llama.cpp "
        "quantised it. The table has perplexity on our texts, and facts found in a text (needles)."
        " KLD to the F16 file is what a format costs. KLD to the same file is what a program's "
        "arithmetic costs. A plain f32 decoder is the reference of both. The columns are of "
        "llama.cpp, our prefill and our decode.",
        (
            Column("format", text("format")),
            Column("MB", figure("mb", 0)),
            *(
                Column(f"{title}, {program}", figure(f"{key}_{name}", digits))
                for title, key, digits in (
                    ("PPL", "ppl", 2),
                    ("KLD to F16", "cost", 4),
                    ("KLD to the same file", "kld", 4),
                )
                for program, name in (
                    ("llama.cpp", "llama"),
                    ("prefill", "prefill"),
                    ("decode", "decode"),
                )
            ),
            Column("needles, llama.cpp", figure("needles_llama", 0)),
            Column("ours", figure("needles_ours", 0)),
            Column("of", figure("needles_of", 0)),
        ),
    ),
    Section(
        "start",
        "Start",
        "The prompt has ten tokens. The time is from the command to the first byte of its answer. "
        "It is measured with an empty kernel cache, and with the kernels there.",
        (
            Column("method", name),
            Column("empty cache, s", figure("cold_s", 1)),
            Column("kernels there, s", figure("warm_s", 2)),
            Column("least", figure("warm_least_s", 2)),
            Column("most", figure("warm_most_s", 2)),
        ),
    ),
    Section(
        "memory",
        "Memory",
        "The command reads a document and answers with 16 tokens. The table has the peak memory of"
        " the process.",
        (
            Column("method", name),
            Column("prompt tokens", text("prompt_tokens")),
            Column("peak, MB", figure("peak_mb")),
            Column("cache, MB", figure("cache_mb")),
            Column("command, s", figure("seconds", 2)),
        ),
    ),
    Section(
        "peer",
        "Against llama.cpp and ik_llama.cpp",
        "The programs take turns in the same run, on the same threads. llama.cpp is that of "
        "llama-cpp-python, and ik_llama.cpp is its llama-bench. Both use flash attention and an "
        "f16 cache. The ratio is to the faster of them (for memory: to the smaller).",
        AGAINST_PEERS,
    ),
    Section(
        "peer_larger",
        "Larger models against llama.cpp and ik_llama.cpp",
        "The table is like the one above. The weights are random, so it shows speed only.",
        (Column("model", lambda row: f"`{row['model']}`"), *AGAINST_PEERS),
    ),
    Section(
        "peer_types",
        "Other weight types against llama.cpp and ik_llama.cpp",
        "The table is like the one above. The models have the shape of Llama-3.2-1B.",
        (Column("model", lambda row: f"`{row['model']}`"), *AGAINST_PEERS),
    ),
    Section(
        "caches",
        "What caches hold",
        "The sizes are those after a long prompt. The first is the method's formula, and the "
        "second is what the cache reports. The third is how much the process' memory falls when "
        "the cache is dropped.",
        (
            Column("method", name),
            Column("formula, MB", figure("formula_mb", 1)),
            Column("cache, MB", figure("cache_mb", 1)),
            Column("resident, MB", figure("resident_mb", 1)),
            Column("of `full`, %", figure("of_full_percent", 1)),
        ),
    ),
    Section(
        "shape",
        "A model of 1B",
        "The weights are random, in the shape of Llama-3.2-1B, Q4_K_M.",
        (Column("method", name), Column("prompt", text("n_prompt")), *SPEED[1:]),
    ),
    Section(
        "several",
        "Several sequences at once",
        "The figures are tokens of all sequences together.",
        (Column("method", name), Column("sequences", text("n_seqs")), *SPEED[1:5]),
    ),
    Section(
        "threads",
        "Threads",
        "",
        (Column("method", name), Column("threads", text("threads")), *SPEED[1:6]),
    ),
    Section(
        "far",
        "What depth costs",
        "The cache holds the keys and values of a text laid end to end up to a depth. The budget "
        "is 512 rows a head, on one thread.",
        (
            Column("method", name),
            Column("depth", text("depth")),
            Column("tokens/s", figure("tokens_per_s")),
            Column("attention and index, ms", figure("attention_ms", 2)),
            Column("times as fast as `full`", figure("of_full", 1)),
            Column("cache, MB", figure("resident_mb", 0)),
            Column("rows scored", figure("rows_scored", 0)),
            Column("rows attended", figure("rows_attended", 0)),
        ),
    ),
    Section(
        "calibration",
        "Calibration",
        "A calibration is done once a model, and a sidecar file keeps it.",
        (Column("method", name), Column("seconds", figure("seconds", 0))),
    ),
)
