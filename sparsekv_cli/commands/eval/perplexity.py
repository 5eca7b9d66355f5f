"""``eval perplexity``: perplexity of a text by llama-perplexity's algorithm, with any method."""

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
from sparsekv_cli.commands.options.model import ModelOptions, model_options
from sparsekv_cli.commands.shared.tables import print_table
from sparsekv_cli.commands.shared.terminal import write_json


@click.command(cls=GroupedCommand, short_help="Perplexity of a text.")
@score_options(
    "[default: none; chunks are prefilled]",
    "Write the log-probabilities there, for 'eval kld' and llama-perplexity.",
)
@model_options(bench=True, sparse_from=False, seed=False)
def perplexity(options: ModelOptions, given: ScoreOptions) -> None:
    """Perplexity of a text by llama-perplexity's algorithm.

    The text is cut into chunks, and the second half of each is scored. Without a method a chunk is
    prefilled, as llama-perplexity does. With one the first half is prefilled and the method decodes
    the second token by token. Attended are rows a head, layer and step.
    """
    from sparsekv_cli.distributed.cluster import check_address
    from sparsekv_cli.evaluation.perplexity.chunks import split_chunks
    from sparsekv_cli.evaluation.perplexity.kld import Perplexity
    from sparsekv_cli.evaluation.perplexity.kld_file import write_kld_file
    from sparsekv_cli.evaluation.perplexity.records import PerplexityRecords
    from sparsekv_cli.evaluation.perplexity.scores import PREFILL

    text = read_text(given.file)
    ways = chosen_ways(given.methods, options, PREFILL)
    if given.base is not None and len(ways) > 1:
        raise click.UsageError("--kl-divergence-base takes one method's log-probabilities")
    if given.base is not None and given.path is not None:
        raise click.UsageError("--kl-divergence-base is written in one go: leave --jsonl out")
    if given.ray is not None:
        check_address(given.ray)
    size = given.n_ctx or DEFAULT_CONTEXT
    model = open_eval(options, list(ways.values()), size)
    chunks = split_chunks(model.tokenizer, text, size, given.n_chunks)
    configuration = configuration_of(model, text_sha256=digest(text), n_ctx=size)
    records = PerplexityRecords(given.path, configuration)
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
