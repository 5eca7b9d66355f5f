"""Scores chunks in several ways: by a prefill, or by a method that decodes the second half.

A prefill scores a chunk as llama-perplexity does. For methods, the first half is prefilled, once
for all of them. Then each method decodes the other tokens one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from sparsekv_cli.cache.row_sizes import check_memory
from sparsekv_cli.evaluation.perplexity.chunks import Chunk
from sparsekv_cli.evaluation.perplexity.kld import log_probs_of, token_scores
from sparsekv_cli.evaluation.perplexity.kld_file import decode
from sparsekv_cli.evaluation.prefill import prefill_each
from sparsekv_cli.evaluation.rows_read import RowsRead, rows_read
from sparsekv_cli.methods.base import Method

if TYPE_CHECKING:
    from sparsekv_cli.model import Model
    from sparsekv_cli.models.forward import OnProgress

PREFILL = "prefill"  # name of the way without a method: a dense prefill of the whole chunk
PIECE = 256  # tokens of the chunk whose logits are computed at once

Ways = Mapping[str, Method | None]  # name of a way to score -> its method; None: a prefill
See = Callable[[np.ndarray], object]  # is called with logits f32 (T, n_vocab)


def setting_of(method: Method | None) -> dict[str, Any]:
    """Returns the name and the options of a way to score; method None: a prefill."""
    if method is None:
        return {"name": PREFILL, "options": {}}
    return {"name": method.name, "options": method.options()}


def score_chunk(
    model: Model,
    ways: Ways,
    chunk: Chunk,
    base: str = "",
    see: See | None = None,
    on_prefill: OnProgress | None = None,
) -> list[dict[str, Any]]:
    """Returns the records of a chunk, one for each way: prefills first, then ``full``, then others.

    base: the way that all are compared with, a prefill or ``full``; empty: ``chunk.base``, if any.
    see: called with all scored logits.
    """
    ids, first = chunk.ids, chunk.first
    records: list[dict[str, Any]] = []
    reference: list[np.ndarray] = []
    if base:
        what = f"log-probabilities of {len(chunk.targets)} tokens"
        n_bytes = 4 * len(chunk.targets) * model.hparams.n_vocab
        check_memory(what, n_bytes, "give a smaller --ctx-size")

    def add(way: str, parts: Iterable[np.ndarray], read: Callable[[], RowsRead] = RowsRead) -> None:
        """parts: logits f32 (T, n_vocab). read: called at their end."""
        columns: dict[str, list[float]] = {}
        n_done = 0
        for logits in parts:
            part = slice(n_done, n_done + len(logits))
            n_done = part.stop
            expected = None
            if chunk.base is not None:
                expected = decode(chunk.base[part], logits.shape[1])
            elif base:
                if way == base:
                    reference.extend(log_probs_of(logits))
                expected = np.asarray(reference[part])
            found = token_scores(logits, chunk.targets[part], expected)
            for name, values in found.items():
                columns.setdefault(name, []).extend(values.tolist())
            if see is not None:
                see(logits)
        rows = read()
        attended = {"rows_attended": rows.rows, "head_steps": rows.head_steps}
        records.append({"chunk": chunk.number, **setting_of(ways[way]), **attended, **columns})

    methods = {name: method for name, method in ways.items() if method is not None}
    for name in ways.keys() - methods.keys():
        sequence = model.sequence()
        sequence.prefill(ids[:first], on_prefill)
        starts = range(first, len(ids), PIECE)
        add(name, (sequence.prefill(ids[i : i + PIECE], all_logits=True) for i in starts))
        del sequence
    if methods:
        n_steps = len(ids) - first
        started = prefill_each(model, methods, ids[:first], n_steps=n_steps, progress=on_prefill)
        for name, (_, sequence, _) in started:
            steps = (sequence.decode(token)[None] for token in ids[first:])
            add(name, steps, partial(rows_read, sequence.caches, n_steps))
            del steps, sequence  # frees the memory of this method before the next one starts
    return records
