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
        "The model is trained on 8192 tokens: speed only.",
        SPEED,
    ),
    Section("deep_others", "The other methods beyond the trained context", "As above.", SPEED),
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
        "KLD(full || method) and top-1 agreement over texts that each method continues with "
        "their own tokens, and facts hidden in a prompt (needles) that the answer names.",
        ACCURACY,
    ),
    Section("accuracy_all", "Accuracy by length, and of presets", "As above.", ACCURACY),
    Section(
        "accuracy_rows",
        "Accuracy at 512 rows",
        "As above, where every method attends to as many rows.",
        ACCURACY,
    ),
    Section(
        "budgets",
        "Methods and budgets by length",
        "RULER: the mean of a few samples of needle tasks, those that a model of this size can do "
        "at all, in per cent, with Wilson's interval of 95%; all methods have the same samples. "
        "KLD(full || method), top-1, rows attended a head and layer, and speed after a text of "
        "nearly the length. Every method is sparse from the first row.",
        (),
        by_length,
    ),
    Section(
        "cache_types",
        "Types of K and V",
        "As above; all are compared with `full` and f16, so a method's own distance is in it.",
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
        "By llama-perplexity's algorithm, of chunks of 512 tokens of our own texts: llama.cpp, our "
        "prefill, and our decode with `full`. KLD and top-1 are to llama.cpp's log-probabilities.",
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
        "The model made wider with zeros, so that its rows fit every format, and quantised by "
        "llama.cpp: perplexity on our texts, KLD to the F16 file (what a format costs) and to the "
        "same file (what a program's arithmetic costs), both from a plain f32 decoder, and facts "
        "found in a text (needles); of llama.cpp, our prefill and our decode.",
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
        "From the command to the first byte of its answer to ten tokens: with an empty kernel "
        "cache, and with the kernels there.",
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
        "A document is read and 16 tokens are answered: the most memory that the process had.",
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
        "The programs in the same run, taking turns, on the same threads; llama.cpp as "
        "llama-cpp-python has it, ik_llama.cpp as its llama-bench, with flash attention and an f16 "
        "cache. The ratio is that to the faster of them (of memory: to the smaller).",
        AGAINST_PEERS,
    ),
    Section(
        "peer_larger",
        "Larger models against llama.cpp and ik_llama.cpp",
        "As above, with random weights: they show speed only.",
        (Column("model", lambda row: f"`{row['model']}`"), *AGAINST_PEERS),
    ),
    Section(
        "peer_types",
        "Other weight types against llama.cpp and ik_llama.cpp",
        "As above, in the shape of Llama-3.2-1B.",
        (Column("model", lambda row: f"`{row['model']}`"), *AGAINST_PEERS),
    ),
    Section(
        "caches",
        "What caches hold",
        "After a long prompt: by the method's formula, as the cache says, and as the "
        "process' memory falls when it is dropped.",
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
        "Random weights in the shape of Llama-3.2-1B, Q4_K_M.",
        (Column("method", name), Column("prompt", text("n_prompt")), *SPEED[1:]),
    ),
    Section(
        "several",
        "Several sequences at once",
        "Tokens of all sequences together.",
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
        "The keys and values of a text laid end to end up to a depth, 512 rows a head, one thread.",
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
        "Once a model, kept in a sidecar file.",
        (Column("method", name), Column("seconds", figure("seconds", 0))),
    ),
)
