"""``eval kld``: how far methods are from a file of log-probabilities, or from dense attention."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from sparsekv_cli.commands.eval.chunks import (
    DEFAULT_CONTEXT,
    ScoreOptions,
    digest,
    score,
    score_options,
    shown,
    sizes,
    title,
)
from sparsekv_cli.commands.eval.options import (
    chosen_ways,
    configuration_of,
    described,
    open_eval,
    read_text,
)
from sparsekv_cli.commands.options.help_page import GroupedCommand
from sparsekv_cli.commands.options.model import ModelOptions, build_method, model_options
from sparsekv_cli.commands.shared.tables import print_table
from sparsekv_cli.commands.shared.terminal import write_json

if TYPE_CHECKING:
    from sparsekv_cli.evaluation.perplexity.kld import Statistic


@click.command(cls=GroupedCommand, short_help="Distance to a base, on a text.")
@score_options(
    "[default with a base file: none; chunks are prefilled]",
    "What to compare with, written by 'eval perplexity' or llama-perplexity; its tokens are "
    "scored. [default: full, which decodes the text given with -f]",
)
@model_options(bench=True, sparse_from=False, seed=False)
def kld(options: ModelOptions, given: ScoreOptions) -> None:
    """Distance of methods to a file of log-probabilities, or to dense attention.

    The statistics are llama-perplexity's. Q is the scored distribution, and KLD is KLD(base || Q).
    The delta of p is the difference of the probabilities of the text's own tokens. Same top p tells
    how often both predict the same token first.
    """
    from sparsekv_cli.distributed.cluster import check_address
    from sparsekv_cli.evaluation.perplexity.chunks import chunks_of, split_chunks
    from sparsekv_cli.evaluation.perplexity.kld_file import KLDFile
    from sparsekv_cli.evaluation.perplexity.records import DivergenceRecords
    from sparsekv_cli.evaluation.perplexity.scores import PREFILL

    base = given.base
    ways = chosen_ways(given.methods, options, PREFILL)
    if base is None and not given.methods:
        raise click.UsageError("nothing to compare: give --method, or --kl-divergence-base FILE")
    if base is not None and (given.file is not None or given.n_ctx is not None):
        raise click.UsageError("--kl-divergence-base has its text and context: no -f, no -c")
    if given.ray is not None:
        check_address(given.ray)
    if base is None:
        text, opened = read_text(given.file), None
        ways = {"full": build_method("full", {}), **ways}
        size = given.n_ctx or DEFAULT_CONTEXT
        of: dict[str, Any] = {"base": "full", "text_sha256": digest(text)}
    else:
        text, opened = "", KLDFile(base)
        size, of = opened.n_ctx, {"base": opened.digest}
    model = open_eval(options, list(ways.values()), size)
    if opened is None:
        chunks = split_chunks(model.tokenizer, text, size, given.n_chunks)
    else:
        chunks = chunks_of(model, opened, given.n_chunks)
    records = DivergenceRecords(given.path, configuration_of(model, **of, n_ctx=size))
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
        told = "full" if base is None else str(base)
        write_json({"base": told, **sizes(chunks), "methods": rows}, ensure_ascii=False)
        return
    lines = [
        (name, *(estimate(statistics[way][name], name) for way in ways))
        for name in next(iter(statistics.values()))
    ]
    rows_read = ("rows attended", *(shown(read[way], ".0f") for way in ways))
    print_table(title(chunks), ("", *ways), [*lines, rows_read])


def estimate(of: Statistic, name: str) -> str:
    """Returns a figure with its standard error; shares in per cent, as in llama-perplexity."""
    is_share = name.startswith("Cor") or name.endswith("p")
    factor, digits = (100, 3) if is_share else (1, 6)
    text = f"{factor * of.value:.{digits}f}"
    if of.stderr is not None:
        text += f" ± {factor * of.stderr:.{digits}f}"
    return text + " %" * is_share
