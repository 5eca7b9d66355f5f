"""``eval perplexity`` and ``eval kld`` share options, and chunks that are scored on any machine."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import numpy as np

from sparsekv_cli.commands.eval.options import (
    JSON_OPTION,
    methods_option,
    ray_option,
    records_option,
)
from sparsekv_cli.commands.options.completers import files
from sparsekv_cli.commands.options.model import gathered
from sparsekv_cli.commands.options.prompt import file_option
from sparsekv_cli.commands.shared.progress import PrefillProgress

if TYPE_CHECKING:
    from sparsekv_cli.evaluation.perplexity.chunks import Chunks
    from sparsekv_cli.evaluation.perplexity.kld_file import KLDWriter
    from sparsekv_cli.evaluation.perplexity.records import PerplexityRecords
    from sparsekv_cli.evaluation.perplexity.scores import Ways
    from sparsekv_cli.model import Model

DEFAULT_CONTEXT = 512
SCORED_BY = (
    "Decode the scored tokens with this method, in the syntax of 'compare --methods'; repeatable. "
)


@dataclass(frozen=True)
class ScoreOptions:
    """The user's options of ``eval perplexity`` or ``eval kld``. path: of the records."""

    methods: tuple[str, ...]
    file: str | None
    n_ctx: int | None
    n_chunks: int | None
    base: Path | None
    path: Path | None
    ray: str | None
    as_json: bool


def score_options(methods: str, base: str) -> Callable[[Callable[..., Any]], Any]:
    """Adds the options of both commands, and passes them as ``given``.

    methods, base: the help of ``--method`` and of ``--kl-divergence-base``.
    """
    added = [
        methods_option(SCORED_BY + methods),
        file_option("The text; - is stdin."),
        click.option(
            "-c", "--ctx-size", "n_ctx", metavar="N", type=click.IntRange(min=4),
            help="Tokens of a chunk, of which the second half is scored. "
            f"[default: {DEFAULT_CONTEXT}]",
        ),
        click.option(
            "--chunks", "n_chunks", metavar="N", type=click.IntRange(min=1),
            help="Chunks to score at most. [default: all]",
        ),
        click.option(
            "--kl-divergence-base", "base", metavar="FILE", shell_complete=files,
            type=click.Path(dir_okay=False, path_type=Path), help=base,
        ),
        records_option("Keep a line a chunk and method there, and skip those that it has."),
        ray_option("Score the chunks"),
        JSON_OPTION,
    ]  # fmt: skip

    def gather(values: dict[str, Any]) -> ScoreOptions:
        return ScoreOptions(**{each.name: values.pop(each.name) for each in fields(ScoreOptions)})

    return gathered("given", gather, added)


def digest(text: str) -> str:
    """Returns a hash of a text, 32 hex digits."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:32]


def score(
    model: Model,
    ways: Ways,
    chunks: Chunks,
    records: PerplexityRecords,
    *,
    base: str = "",
    opened: AbstractContextManager[KLDWriter] | None = None,
    ray: str | None = None,
) -> None:
    """Adds to ``records`` the missing ones of all chunks, on a cluster if the user names one.

    base: see ``score_chunk``. opened: a file for the log-probabilities of all chunks.
    """
    from sparsekv_cli.commands.eval.ray import ChunkPart, score_on_cluster
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

    with PrefillProgress("score") as progress, opened or nullcontext() as writer:
        if ray is not None:
            keeps = writer is not None
            for new, rows in score_on_cluster(ray, model, ways, chunks, parts, base, keeps):
                if writer is not None:
                    writer.add_rows(rows)
                count(len(new) * chunks.n_scored)
                records.add_all(new)
            return

        def see(logits: np.ndarray) -> None:
            count(len(logits))
            if writer is not None:
                writer.add(logits)

        for i, some in parts:
            records.add_all(score_chunk(model, some, chunks.chunk(i), base, see))


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
    """Returns a figure as a table's cell; empty if the way has none."""
    return "-" if value is None else format(value, form)
