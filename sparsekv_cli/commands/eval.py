"""``sparsekv-cli eval``: perplexity and KLD as llama-perplexity has them, and RULER's tasks."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

import click

from sparsekv_cli.commands.completers import files
from sparsekv_cli.commands.eval_options import (
    JSON_OPTION,
    chosen_ways,
    described,
    methods_option,
    open_eval,
    read_text,
    write_json,
)
from sparsekv_cli.commands.eval_ruler import ruler
from sparsekv_cli.commands.help import GroupedCommand
from sparsekv_cli.commands.options import (
    ModelOptions,
    build_method,
    model_options,
    verbose_option,
)
from sparsekv_cli.commands.progress import PrefillProgress
from sparsekv_cli.commands.tables import print_table

if TYPE_CHECKING:
    from sparsekv_cli.evaluation.kld import Statistic
    from sparsekv_cli.evaluation.perplexity import Chunks

DEFAULT_CONTEXT = 512
SCORED_BY = (
    "Decode the scored tokens with this method, in the syntax of 'compare --methods'; repeatable. "
)
FILE_OPTION = click.option(
    "-f",
    "--file",
    metavar="FILE",
    shell_complete=files,
    help="The text; - is stdin.",
)
CHUNK_OPTION = click.option(
    "-c",
    "--ctx-size",
    "n_ctx",
    metavar="N",
    type=click.IntRange(min=4),
    help=f"Tokens of a chunk, of which the second half is scored. [default: {DEFAULT_CONTEXT}]",
)
CHUNKS_OPTION = click.option(
    "--chunks",
    "n_chunks",
    metavar="N",
    type=click.IntRange(min=1),
    help="Chunks to score at most. [default: all]",
)


@click.group(short_help="Measure what methods lose: perplexity, KLD, RULER.")
@verbose_option
def command() -> None:
    """Measure what methods lose, on a text or on RULER's tasks."""


@command.command(cls=GroupedCommand, short_help="Perplexity of a text.")
@FILE_OPTION
@methods_option(SCORED_BY + "[default: none; chunks are prefilled]")
@CHUNK_OPTION
@CHUNKS_OPTION
@click.option(
    "--kl-divergence-base",
    "base",
    metavar="FILE",
    type=click.Path(dir_okay=False, path_type=Path),
    shell_complete=files,
    help="Write the log-probabilities there, for 'eval kld' and llama-perplexity.",
)
@JSON_OPTION
@model_options(bench=True, sparse_from=False, seed=False)
def perplexity(
    options: ModelOptions,
    file: str | None,
    methods: Sequence[str],
    n_ctx: int | None,
    n_chunks: int | None,
    base: Path | None,
    as_json: bool,
) -> None:
    """Perplexity of a text by llama-perplexity's algorithm.

    The text is cut into chunks, and the second half of each is scored. Without a method a chunk is
    prefilled, as llama-perplexity does; with one the first half is prefilled and the method decodes
    the second token by token. Attended are rows a head, layer and step.
    """
    from sparsekv_cli.evaluation import perplexity as measured
    from sparsekv_cli.evaluation.kld_file import write_kld_file

    text = read_text(file)
    ways = chosen_ways(methods, options, measured.PREFILL)
    if base is not None and len(ways) > 1:
        raise click.UsageError("--kl-divergence-base takes one method's log-probabilities")
    size = n_ctx or DEFAULT_CONTEXT
    session = open_eval(options, list(ways.values()), size)
    chunks = measured.split_chunks(session.tokenizer, text, size, n_chunks)
    found = {way: measured.Perplexity() for way in ways}
    attended = {way: measured.RowsRead() for way in ways}
    n_vocab = session.hparams.n_vocab
    with (
        PrefillProgress("score") as progress,
        write_kld_file(base, chunks.tokens, n_vocab) if base else nullcontext() as writer,
    ):
        for piece in measured.score_chunks(session, ways, chunks, attended, progress):
            found[piece.way].add(piece.logits, piece.targets)
            if writer is not None:
                writer.add(piece.logits)
    rows = [
        {
            **described(way, method),
            "ppl": found[way].value,
            "ppl_stderr": found[way].stderr,
            "n_tokens": len(found[way].nll),
            "rows_attended_mean": attended[way].rows(),
        }
        for way, method in ways.items()
    ]
    if as_json:
        first = {key: rows[0][key] for key in ("ppl", "ppl_stderr", "n_tokens")}
        write_json({**first, **sizes(chunks), "methods": rows})
    else:
        print_table(
            title(chunks),
            ("method", "PPL", "+/-", "tokens", "attended"),
            [
                (
                    row["spec"],
                    f"{row['ppl']:.4f}",
                    f"{row['ppl_stderr']:.5f}",
                    row["n_tokens"],
                    shown(row["rows_attended_mean"], ".0f"),
                )
                for row in rows
            ],
        )


@command.command(cls=GroupedCommand, short_help="Distance to a base, on a text.")
@FILE_OPTION
@methods_option(SCORED_BY + "[default with a base file: none; chunks are prefilled]")
@CHUNK_OPTION
@CHUNKS_OPTION
@click.option(
    "--kl-divergence-base",
    "base",
    metavar="FILE",
    type=click.Path(dir_okay=False, path_type=Path),
    shell_complete=files,
    help="What to compare with, written by 'eval perplexity' or llama-perplexity; its tokens are "
    "scored. [default: full, which decodes the text given with -f]",
)
@JSON_OPTION
@model_options(bench=True, sparse_from=False, seed=False)
def kld(
    options: ModelOptions,
    file: str | None,
    methods: Sequence[str],
    n_ctx: int | None,
    n_chunks: int | None,
    base: Path | None,
    as_json: bool,
) -> None:
    """Distance of methods to a file of log-probabilities, or to dense attention.

    The statistics are llama-perplexity's: Q is what is scored, KLD is KLD(base || Q), the delta of
    p the difference of the probabilities of the text's own tokens, Same top p how often both
    predict the same token first.
    """
    from sparsekv_cli.evaluation import perplexity as measured
    from sparsekv_cli.evaluation.kld import divergences
    from sparsekv_cli.evaluation.kld_file import KLDFile

    ways = chosen_ways(methods, options, measured.PREFILL)
    if base is None and not methods:
        raise click.UsageError("nothing to compare: give --method, or --kl-divergence-base FILE")
    if base is None:
        text, opened = read_text(file), None
        ways = {"full": build_method("full", {}), **ways}
        size = n_ctx or DEFAULT_CONTEXT
    elif file is None and n_ctx is None:
        opened = KLDFile(base)
        size = opened.n_ctx
    else:
        raise click.UsageError("--kl-divergence-base has its text and context: no -f, no -c")
    session = open_eval(options, list(ways.values()), size)
    if opened is None:
        chunks = measured.split_chunks(session.tokenizer, text, size, n_chunks)
    else:
        chunks = measured.chunks_of(session, opened, n_chunks)
    attended = {way: measured.RowsRead() for way in ways}
    with PrefillProgress("score") as progress:
        pieces = measured.score_chunks(session, ways, chunks, attended, progress)
        found = divergences(pieces, "full" if opened is None else opened)
    statistics = {way: found[way].statistics() for way in ways}
    if as_json:
        rows = [
            {
                **described(way, method),
                "kld_mean": statistics[way]["Mean KLD"].value,
                "kld_stderr": statistics[way]["Mean KLD"].stderr,
                "top1_agreement": statistics[way]["Same top p"].value,
                "n_tokens": len(found[way].kld),
                "rows_attended_mean": attended[way].rows(),
                "statistics": {name: e._asdict() for name, e in statistics[way].items()},
            }
            for way, method in ways.items()
        ]
        told = "full" if base is None else str(base)
        write_json({"base": told, **sizes(chunks), "methods": rows})
        return
    lines = [
        (name, *(estimate(statistics[way][name], name) for way in ways))
        for name in next(iter(statistics.values()))
    ]
    rows_read = ("rows attended", *(shown(attended[way].rows(), ".0f") for way in ways))
    print_table(title(chunks), ("", *ways), [*lines, rows_read])


def sizes(chunks: Chunks) -> dict[str, int]:
    n_chunk, n_ctx = chunks.tokens.shape
    return {"n_ctx": n_ctx, "n_chunks": n_chunk}


def title(chunks: Chunks) -> str:
    n_chunk, n_ctx = chunks.tokens.shape
    return f"{n_chunk} chunks of {n_ctx} tokens, {chunks.n_scored} scored in each"


def shown(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def estimate(of: Statistic, name: str) -> str:
    """With its standard error; shares in per cent, as llama-perplexity has them."""
    is_share = name.startswith("Cor") or name.endswith("p")
    factor, digits = (100, 3) if is_share else (1, 6)
    text = f"{factor * of.value:.{digits}f}"
    if of.stderr is not None:
        text += f" ± {factor * of.stderr:.{digits}f}"
    return text + " %" * is_share


command.add_command(ruler)
