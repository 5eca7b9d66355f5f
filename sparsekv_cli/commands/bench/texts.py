"""The tokens that ``bench`` reads, random or of a text, and decode steps with drafts of a text."""

from __future__ import annotations

import time
from collections.abc import Sequence as Ids
from pathlib import Path
from typing import TYPE_CHECKING

import click

from sparsekv_cli.commands.shared.prompt import decode_file
from sparsekv_cli.drafts import MOST_DRAFTED
from sparsekv_cli.errors import SparseKVError

if TYPE_CHECKING:
    from sparsekv_cli.model import Model
    from sparsekv_cli.sequence import Engine, Sequence


def check_text(text: Path | None, speculate: str) -> None:
    """Raises click.UsageError if ``speculate`` asks for drafts and there is no text."""
    if speculate != "off" and text is None:
        needs = f"--speculate {speculate} needs a text: add -f FILE"
        raise click.UsageError(needs, click.get_current_context(silent=True))


def tokens_of(model: Model, text: Path | None, n_seqs: int, seed: int) -> list[list[int]]:
    """Returns the tokens of each sequence, as many as the context has room for.

    Without a text they are random. Raises SparseKVError for a text that is too short.
    """
    import numpy as np

    n = model.n_ctx
    if text is None:
        generator = np.random.default_rng(seed)
        return generator.integers(0, model.hparams.n_vocab, size=(n_seqs, n)).tolist()
    ids = model.tokenizer.encode(decode_file(text.read_bytes(), str(text)), parse_special=False)
    if len(ids) < n:
        raise SparseKVError(f"{text}: has {len(ids)} tokens, but the tests take {n}")
    return [ids[:n]] * n_seqs


def decode_texts(engine: Engine, sequences: Ids[Sequence], texts: Ids[Ids[int]], last: int) -> None:
    """Decodes the given text of each sequence, up to ``last`` tokens.

    A draft's tokens are accepted up to the first one that differs from the text.
    """
    for sequence in sequences:
        if sequence.drafts is not None:
            sequence.drafts.begin(sequence.tokens)
    left = list(range(len(sequences)))
    while left := [b for b in left if len(sequences[b].tokens) < last]:
        rows = [rows_of_step(sequences[b], texts[b], last, len(left) == 1) for b in left]
        started = time.perf_counter()
        engine.decode([sequences[b] for b in left], rows)
        seconds = time.perf_counter() - started
        for b, row in zip(left, rows, strict=True):
            accept(sequences[b], texts[b], row, seconds, len(left) == 1)


def rows_of_step(sequence: Sequence, text: Ids[int], last: int, is_alone: bool) -> list[int]:
    """Returns the tokens of the next step: the text's next token, then a draft."""
    started, n, drafts = time.perf_counter(), len(sequence.tokens), sequence.drafts
    if drafts is None or (drafts.alone and not is_alone):
        return [text[n]]
    most = sequence.most_rows(min(1 + MOST_DRAFTED, last - n)) - 1
    draft = drafts.draft(sequence.tokens, text[n], most)
    sequence.timings.speculation.draft_s += time.perf_counter() - started
    return [text[n], *draft]


def accept(
    sequence: Sequence, text: Ids[int], row: Ids[int], seconds: float, is_alone: bool
) -> None:
    """Keeps the tokens of the last step up to the first one that differs from the text."""
    n, n_kept = len(sequence.tokens) - len(row), 1
    while n_kept < len(row) and row[n_kept] == text[n + n_kept]:
        n_kept += 1
    if len(row) > 1:
        sequence.keep(n + n_kept)
        sequence.timings.speculation.add_step(len(row) - 1, n_kept - 1, seconds)
    if sequence.drafts is not None and (is_alone or not sequence.drafts.alone):
        sequence.drafts.checked(len(row) - 1, n_kept - 1, seconds)


def draft_counts(sequences: Ids[Sequence]) -> dict[str, int]:
    """Returns the numbers of drafted and accepted tokens; {} if drafts are off."""
    counts = [sequence.timings.speculation for sequence in sequences]
    if {each.source for each in counts} == {"off"}:
        return {}
    return {
        "tokens_drafted": sum(each.drafted for each in counts),
        "tokens_accepted": sum(each.accepted for each in counts),
    }
