"""``eval perplexity`` and ``eval kld``: score the chunks of a text with any method."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from sparsekv_cli.commands.eval.options import (
    JSON_OPTION,
    chosen_ways,
    configuration_of,
    described,
    methods_option,
    open_eval,
    ray_option,
    read_text,
    records_option,
)
from sparsekv_cli.commands.options.completers import files
from sparsekv_cli.commands.options.help_page import GroupedCommand
from sparsekv_cli.commands.options.model import (
    ModelOptions,
    build_method,
    find_model,
    gathered,
    model_options,
)
from sparsekv_cli.commands.options.numbers import WholeRange
from sparsekv_cli.commands.options.prompt import file_option
from sparsekv_cli.commands.shared.header import model_header
from sparsekv_cli.commands.shared.progress import PrefillProgress
from sparsekv_cli.commands.shared.tables import print_table
from sparsekv_cli.commands.shared.terminal import say, write_json

if TYPE_CHECKING:
    import numpy as np

    from sparsekv_cli.evaluation.perplexity.chunks import Chunks
    from sparsekv_cli.evaluation.perplexity.kld import Statistic
    from sparsekv_cli.evaluation.perplexity.kld_file import WriteRows
    from sparsekv_cli.evaluation.perplexity.records import PerplexityRecords
    from sparsekv_cli.evaluation.perplexity.scores import Ways
    from sparsekv_cli.model import Model

DEFAULT_CONTEXT, METHOD_CONTEXT = 512, 4096
SCORED_BY = (
    "Decode the scored tokens with this method, in the syntax of 'compare --methods'; repeatable. "
)


@dataclass(frozen=True)
class ScoreOptions:
    """The user's options of ``eval perplexity`` or ``eval kld``. path: the file of the records."""

    methods: tuple[str, ...]
    file: str | None
    n_ctx: int | None
    n_chunks: int | None
    base: Path | None
    path: Path | None
    ray: str | None
    as_json: bool


def score_options(methods: str, base: str) -> Callable[[Callable[..., Any]], Any]:
    """Returns a decorator that adds the options of both commands; they come as ``given``.

    methods, base: the help of ``--method`` and of ``--kl-divergence-base``.
    """
    added = [
        methods_option(SCORED_BY + methods),
        file_option("The text; - is stdin."),
        click.option(
            "-c", "--ctx-size", "n_ctx", metavar="N", type=WholeRange(min=4),
            help="Tokens of a chunk; its second half is scored. "
            f"[default: {DEFAULT_CONTEXT}; with a method that selects rows {METHOD_CONTEXT}, or "
            "what the text and the model allow]",
        ),
        click.option(
            "--chunks", "n_chunks", metavar="N", type=WholeRange(min=1),
            help="Chunks to score at most. [default: all]",
        ),
        click.option(
            "--kl-divergence-base", "base", metavar="FILE", shell_complete=files,
            type=click.Path(dir_okay=False, path_type=Path), help=base,
        ),
        records_option("Keep a line for each chunk and method in FILE, and skip those it has."),
        ray_option("Score the chunks"),
        JSON_OPTION,
    ]  # fmt: skip

    def gather(values: dict[str, Any]) -> ScoreOptions:
        return ScoreOptions(**{each.name: values.pop(each.name) for each in fields(ScoreOptions)})

    return gathered("given", gather, added)


def text_chunks(options: ModelOptions, given: ScoreOptions, text: str, ways: Ways) -> Chunks:
    """Returns the chunks of a text. Only the header of the model is read for this.

    Raises SparseKVError for a text that is too short.
    """
    from sparsekv_cli.evaluation.perplexity.chunks import split_chunks

    with model_header(find_model(options.model), options.config) as header:
        size, least = given.n_ctx or DEFAULT_CONTEXT, 0
        if given.n_ctx is None and any(each and each.name != "full" for each in ways.values()):
            size, least = METHOD_CONTEXT, DEFAULT_CONTEXT
            while size > max(least, header.hparams.n_ctx_fit):
                size //= 2
        chunks = split_chunks(header.tokenizer, text, size, given.n_chunks, least)
    size = chunks.tokens.shape[1]
    if least and size > least:
        say(
            f"chunks of {size} tokens: in shorter ones a method attends to much of the text; "
            f"-c {DEFAULT_CONTEXT} scores llama-perplexity's"
        )
    return chunks


def digest(text: str) -> str:
    """Returns a hash of ``text``, 32 hex digits."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:32]


def score(
    model: Model,
    ways: Ways,
    chunks: Chunks,
    records: PerplexityRecords,
    *,
    base: str = "",
    opened: AbstractContextManager[WriteRows] | None = None,
    ray: str | None = None,
) -> None:
    """Adds the missing records of all chunks to ``records``.

    base: see ``score_chunk``. opened: a file for the log-probabilities of all chunks. ray: the
    address of a cluster that scores; None: this machine scores.
    """
    from sparsekv_cli.commands.eval.ray import ChunkPart, score_on_cluster
    from sparsekv_cli.evaluation.perplexity.kld_file import encode
    from sparsekv_cli.evaluation.perplexity.scores import score_chunk

    parts: list[ChunkPart] = []
    for i in range(len(chunks.tokens)):
        if missing := records.missing(ways, i):
            parts.append((i, {base: ways[base], **missing} if base else missing))
    n_done, n_all = 0, sum(len(some) for _, some in parts) * chunks.n_scored

    def count(n: int) -> None:
        nonlocal n_done
        n_done += n
        progress(n_done, n_all)

    reading = PrefillProgress(draws=False)
    with records, reading, PrefillProgress("score") as progress, opened or nullcontext() as write:
        if ray is not None:
            keeps = write is not None
            for new, rows in score_on_cluster(ray, model, ways, chunks, parts, base, keeps):
                if write is not None:
                    write(rows)
                count(len(new) * chunks.n_scored)
                records.add_all(new)
            return

        def see(logits: np.ndarray) -> None:
            count(len(logits))
            if write is not None:
                write(encode(logits))

        for i, some in parts:
            records.add_all(score_chunk(model, some, chunks.chunk(i), base, see, reading))


def sizes(chunks: Chunks) -> dict[str, int]:
    """Returns the sizes for ``--json``."""
    n_chunk, n_ctx = chunks.tokens.shape
    return {"n_ctx": n_ctx, "n_chunks": n_chunk}


def title(chunks: Chunks) -> str:
    """Returns the title of a table."""
    n_chunk, n_ctx = chunks.tokens.shape
    plural = "s" if n_chunk > 1 else ""
    return f"{n_chunk} chunk{plural} of {n_ctx} tokens, {chunks.n_scored} scored in each"


def shown(value: float | None, form: str) -> str:
    """Returns a figure for a table's cell; "-" if there is none."""
    return "-" if value is None else format(value, form)


@click.command(cls=GroupedCommand, short_help="Perplexity of a text.")
@score_options(
    "[default: none; chunks are prefilled]",
    "Write the log-probabilities to FILE, for 'eval kld' and llama-perplexity.",
)
@model_options(bench=True, sparse_from=False, seed=False)
def perplexity(options: ModelOptions, given: ScoreOptions) -> None:
    """Perplexity of a text by llama-perplexity's algorithm.

    The text is cut into chunks, and the second half of each is scored. Without a method a chunk is
    prefilled, as in llama-perplexity. With a method the first half is prefilled, and the method
    decodes the second half token by token. Attended are rows a head, layer and step.
    """
    from sparsekv_cli.distributed.cluster import check_address
    from sparsekv_cli.evaluation.perplexity.kld import Perplexity
    from sparsekv_cli.evaluation.perplexity.kld_file import write_kld_file
    from sparsekv_cli.evaluation.perplexity.records import PerplexityRecords
    from sparsekv_cli.evaluation.perplexity.scores import PREFILL

    text = read_text(given.file)
    ways = chosen_ways(given.methods, options, PREFILL)
    if given.base is not None and len(ways) > 1:
        raise click.UsageError("--kl-divergence-base is of one method: give one --method")
    if given.base is not None and given.path is not None:
        raise click.UsageError("--kl-divergence-base needs one whole run: leave --jsonl out")
    if given.ray is not None:
        check_address(given.ray)
    chunks = text_chunks(options, given, text, ways)
    size = chunks.tokens.shape[1]
    model = open_eval(options, list(ways.values()), size)
    configuration = configuration_of(model, text_sha256=digest(text), n_ctx=size)
    calibrations = model.calibrations.digests(filter(None, ways.values()))
    records = PerplexityRecords(given.path, configuration, calibrations)
    n_vocab = model.hparams.n_vocab
    opened = None if given.base is None else write_kld_file(given.base, chunks.tokens, n_vocab)
    score(model, ways, chunks, records, opened=opened, ray=given.ray)
    rows = []
    for way, method in ways.items():
        n = len(chunks.tokens)
        found = Perplexity(**records.scores(method, n))
        rows.append(
            {
                **described(way, method),
                "ppl": found.value,
                "ppl_stderr": found.stderr,
                "n_tokens": len(found.nll),
                "rows_attended_mean": records.rows(method, n).mean,
            }
        )
    if given.as_json:
        first = {key: rows[0][key] for key in ("ppl", "ppl_stderr", "n_tokens")}
        write_json({**first, **sizes(chunks), "methods": rows}, ensure_ascii=False)
    else:
        cells = []
        for row in rows:
            figures = f"{row['ppl']:.4f}", f"{row['ppl_stderr']:.5f}", row["n_tokens"]
            cells.append([row["spec"], *figures, shown(row["rows_attended_mean"], ".0f")])
        print_table(title(chunks), ("method", "PPL", "+/-", "tokens", "attended"), cells)


@click.command(cls=GroupedCommand, short_help="Distance to a base, on a text.")
@score_options(
    "[default with a base file: none; chunks are prefilled]",
    "The base to compare with, written by 'eval perplexity' or llama-perplexity; its tokens are "
    "scored. [default: full, which decodes the text given with -f]",
)
@model_options(bench=True, sparse_from=False, seed=False)
def kld(options: ModelOptions, given: ScoreOptions) -> None:
    """Distance of methods to a file of log-probabilities, or to dense attention.

    The statistics are llama-perplexity's. Q is the scored distribution, and KLD is KLD(base || Q).
    The delta of p is the difference of the probabilities of the text's own tokens. Same top p says
    how often both predict the same token first.
    """
    from sparsekv_cli.distributed.cluster import check_address
    from sparsekv_cli.evaluation.perplexity.chunks import chunks_of
    from sparsekv_cli.evaluation.perplexity.kld_file import KLDFile
    from sparsekv_cli.evaluation.perplexity.records import DivergenceRecords
    from sparsekv_cli.evaluation.perplexity.scores import PREFILL

    base = given.base
    ways = chosen_ways(given.methods, options, PREFILL)
    if base is None and not given.methods:
        raise click.UsageError("nothing to compare: give --method, or --kl-divergence-base FILE")
    if base is not None and (given.file is not None or given.n_ctx is not None):
        raise click.UsageError("--kl-divergence-base has its text and context: leave -f and -c out")
    if given.ray is not None:
        check_address(given.ray)
    if base is None:
        text, opened = read_text(given.file), None
        ways = {"full": build_method("full", {}), **ways}
        chunks = text_chunks(options, given, text, ways)
        size = chunks.tokens.shape[1]
        of: dict[str, Any] = {"base": "full", "text_sha256": digest(text)}
    else:
        opened = KLDFile(base)
        size, of = opened.n_ctx, {"base": opened.digest}
    model = open_eval(options, list(ways.values()), size)
    if opened is not None:
        chunks = chunks_of(model, opened, given.n_chunks)
    configuration = configuration_of(model, **of, n_ctx=size)
    calibrations = model.calibrations.digests(filter(None, ways.values()))
    records = DivergenceRecords(given.path, configuration, calibrations)
    score(model, ways, chunks, records, base="full" if opened is None else "", ray=given.ray)
    n = len(chunks.tokens)
    found = {way: records.divergence(method, n) for way, method in ways.items()}
    read = {way: records.rows(method, n).mean for way, method in ways.items()}
    statistics = {way: each.statistics() for way, each in found.items()}
    if given.as_json:
        rows = [
            {
                **described(way, method),
                "kld_mean": statistics[way]["Mean KLD"].value,
                "kld_stderr": statistics[way]["Mean KLD"].stderr,
                "top1_agreement": statistics[way]["Same top p"].value,
                "n_tokens": len(found[way].kld),
                "rows_attended_mean": read[way],
                "statistics": {name: e._asdict() for name, e in statistics[way].items()},
            }
            for way, method in ways.items()
        ]
        base_name = "full" if base is None else str(base)
        write_json({"base": base_name, **sizes(chunks), "methods": rows}, ensure_ascii=False)
        return
    lines = [
        (name, *(estimate(statistics[way][name], name) for way in ways))
        for name in next(iter(statistics.values()))
    ]
    rows_read = ("rows attended", *(shown(read[way], ".0f") for way in ways))
    print_table(title(chunks), ("", *ways), [*lines, rows_read])


def estimate(of: Statistic, name: str) -> str:
    """Returns a figure with its standard error. Shares are in per cent, as in llama-perplexity."""
    is_share = name.startswith("Cor") or name.endswith("p")
    factor, digits = (100, 3) if is_share else (1, 6)
    text = f"{factor * of.value:.{digits}f}"
    if of.stderr is not None:
        text += f" ± {factor * of.stderr:.{digits}f}"
    return text + " %" * is_share
