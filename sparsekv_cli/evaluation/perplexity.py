"""Perplexity by llama-perplexity's algorithm: chunks of a text, the second half of each is scored.

A text is cut into chunks of n_ctx tokens. The first of each gives way to BOS if the model adds one.
The logits after the tokens n_ctx/2 to n_ctx - 2 predict the ones that follow. Without a method a
chunk is prefilled; with one its first half is prefilled, once for all methods, and the method
decodes the others token by token.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from sparsekv_cli.cache.kinds import full_layers
from sparsekv_cli.cache.layer import LayerCache, total_counters
from sparsekv_cli.errors import SparseKVError
from sparsekv_cli.evaluation.prefill import prefill_each, resume
from sparsekv_cli.methods.base import Method

if TYPE_CHECKING:
    from sparsekv_cli.evaluation.kld_file import KLDFile
    from sparsekv_cli.session import Progress, Session

PREFILL = "prefill"  # stands for no method: what the dense prefill of a whole chunk gives
PIECE = 256  # rows of logits at once

Ways = Mapping[str, Method | None]  # how to score, by the text that names it; None is a prefill


@dataclass(frozen=True)
class Chunks:
    """tokens i32 (n_chunk, n_ctx); bos: what the first of each gives way to, None if it stays."""

    tokens: np.ndarray
    bos: int | None

    @property
    def first(self) -> int:
        """Position of the first token after which logits are scored."""
        return self.tokens.shape[1] // 2

    @property
    def n_scored(self) -> int:
        """Scored tokens of a chunk."""
        return self.tokens.shape[1] - 1 - self.first

    def fed(self, i: int) -> list[int]:
        """The tokens of chunk ``i`` that the model is given: all but the last."""
        ids = self.tokens[i, :-1].tolist()
        return ids if self.bos is None else [self.bos, *ids[1:]]

    def targets(self, i: int) -> np.ndarray:
        """The tokens of chunk ``i`` that are to be predicted, (n_scored,)."""
        return self.tokens[i, self.first + 1 :]


def split_chunks(tokenizer: Any, text: str, n_ctx: int, n_chunks: int | None = None) -> Chunks:
    """The chunks of a text, at most ``n_chunks``; SparseKVError when it is too short for two."""
    ids = tokenizer.encode(text, add_eos=False, parse_special=False)
    if len(ids) < 2 * n_ctx:
        raise SparseKVError(
            f"the text has {len(ids)} tokens, and a context of {n_ctx} needs {2 * n_ctx} of them: "
            "give a longer text, or a smaller --ctx-size"
        )
    n = min(len(ids) // n_ctx, n_chunks or len(ids))
    tokens = np.array(ids[: n * n_ctx], np.int32).reshape(n, n_ctx)
    return Chunks(tokens, tokenizer.bos_id if tokenizer.add_bos else None)


def chunks_of(session: Session, file: KLDFile, n_chunks: int | None = None) -> Chunks:
    """The chunks of a file of log-probabilities; SparseKVError if it is of another vocabulary."""
    n_vocab = session.hparams.n_vocab
    if file.n_vocab != n_vocab:
        raise SparseKVError(
            f"{file.path}: is of a vocabulary of {file.n_vocab}, the model has one of {n_vocab}: "
            "give the model that it was made with, or one with the same vocabulary"
        )
    tokenizer = session.tokenizer
    return Chunks(file.tokens[:n_chunks], tokenizer.bos_id if tokenizer.add_bos else None)


@dataclass
class RowsRead:
    """What the steps of a method read, over all chunks; counts are of all heads and layers."""

    steps: int = 0
    n_head: int = 0  # of full layers
    counts: Counter[str] = field(default_factory=Counter)

    def add(self, layers: Sequence[LayerCache], n_steps: int) -> None:
        """Counts the steps of caches that are done."""
        self.steps += n_steps
        self.n_head = sum(spec.n_head for spec in full_layers(cache.spec for cache in layers))
        self.counts.update(total_counters(layers))

    def rows(self, name: str = "rows_attended") -> float | None:
        """Rows a head, full layer and step; None where there is none of them."""
        n = self.steps * self.n_head
        return self.counts[name] / n if n else None


class ScoredLogits(NamedTuple):
    """Some logits f32 (T, n_vocab) of a chunk, the ``start``-th scored ones and the next."""

    way: str
    chunk: int
    start: int
    logits: np.ndarray
    targets: np.ndarray  # the tokens that follow, (T,)


def score_chunks(
    session: Session,
    ways: Ways,
    chunks: Chunks,
    attended: Mapping[str, RowsRead],
    progress: Progress | None = None,
) -> Iterator[ScoredLogits]:
    """All scored logits, chunk by chunk, and of each in every way, prefills first, then ``full``.

    A piece is to be used up before the next is asked for. attended: added to, by way.
    """
    n_done, n_all = 0, len(chunks.tokens) * len(ways) * chunks.n_scored
    for i in range(len(chunks.tokens)):
        targets = chunks.targets(i)
        for way, parts in _logits_of(session, ways, chunks.fed(i), chunks.first, attended):
            start = 0
            for logits in parts:
                stop = start + len(logits)
                yield ScoredLogits(way, i, start, logits, targets[start:stop])
                n_done, start = n_done + len(logits), stop
                if progress is not None:
                    progress(n_done, n_all)


def _logits_of(
    session: Session, ways: Ways, ids: list[int], first: int, attended: Mapping[str, RowsRead]
) -> Iterator[tuple[str, Iterator[np.ndarray]]]:
    """The logits after ``ids[first:]`` in every way, in parts."""

    def prefilled() -> Iterator[np.ndarray]:
        session.reset()
        session.prefill(ids[:first])
        for start in range(first, len(ids), PIECE):
            yield session.prefill(ids[start : start + PIECE], all_logits=True)

    def decoded(layers: Sequence[LayerCache], told: RowsRead) -> Iterator[np.ndarray]:
        resume(session, ids[:first], layers)
        for token in ids[first:]:
            yield session.decode(token)[None]
        told.add(layers, len(ids) - first)
        session.caches = []

    methods = {name: method for name, method in ways.items() if method is not None}
    for name in ways.keys() - methods.keys():
        yield name, prefilled()
    if methods:
        each = prefill_each(session, methods, ids[:first], n_steps=len(ids) - first)
        for name, start in each:
            yield name, decoded(start.caches, attended[name])
    session.reset()


def negative_log_probs(logits: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """f64 (T,): of the targets (T,) after logits f32 (T, n_vocab)."""
    best = logits.max(axis=-1)
    total = np.exp(logits - best[:, None]).sum(axis=-1, dtype=np.float64)
    return np.log(total) - (logits[np.arange(len(targets)), targets] - best)


class Perplexity:
    """The perplexity of scored tokens, and its standard error as llama-perplexity has it."""

    def __init__(self) -> None:
        self.nll: list[float] = []

    def add(self, logits: np.ndarray, targets: np.ndarray) -> None:
        self.nll += negative_log_probs(logits, targets).tolist()

    @property
    def value(self) -> float:
        return float(np.exp(np.mean(self.nll)))

    @property
    def stderr(self) -> float:
        return self.value * float(np.std(self.nll)) / max(1, len(self.nll) - 1) ** 0.5
